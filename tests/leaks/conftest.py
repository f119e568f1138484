"""A small fleet in processes that the tests of this folder share, for each transport."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Of `benchmarks.leaks`, which `benchmarks/nothing_left.py` shares with these tests.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.leaks.census import Sizes
from benchmarks.leaks.endings import ENDINGS, Sides, finish
from benchmarks.nothing_left import fleet

TOMBSTONES_S = 1.5
WAITING_S = 1.0


@pytest.fixture(scope="session", params=["nixl", "mooncake"])
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    """Prefill and decode side; deadlines are short, so that tombstones expire soon."""
    timeouts = {"bootstrap_timeout_s": TOMBSTONES_S, "waiting_timeout_s": WAITING_S}
    with fleet(request.param, **timeouts) as ((prefill, decode), directory):
        yield prefill, decode
        for side in (prefill, decode):
            side.ask("close")
            assert side.end() == 0
        left = [path.name for path in directory.rglob("*") if not path.is_dir()]
        assert left == []


@pytest.fixture(scope="session")
def rested(sides: Sides) -> Sizes:
    """What is held by agents that have seen a room of each kind, when its tombstones are over."""
    for room, ending in enumerate(ENDINGS, 1):
        ending(*sides, room)
    for room, ending in enumerate(ENDINGS, 1):
        finish(sides, ending, room)
    time.sleep(TOMBSTONES_S + 0.5)
    return {path: size for side in sides for path, size in side.ask("census").items()}
