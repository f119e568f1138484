"""A small fleet in processes for each transport, shared by the tests of this folder."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from benchmarks.leaks.census import Sizes, grown
from benchmarks.leaks.endings import ENDINGS, Late, Sides, finish, run
from benchmarks.nothing_left import fleet

TOMBSTONES_S = 1.5
REST_S = 60.0
WAITING_S = 1.0


@pytest.fixture(scope="session", params=["nixl", "mooncake"])
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    """Prefill and decode process; deadlines are short, so that tombstones expire soon."""
    timeouts = {"bootstrap_timeout_s": TOMBSTONES_S, "waiting_timeout_s": WAITING_S}
    with fleet(request.param, **timeouts) as ((prefill, decode), directory):
        yield prefill, decode
        for side in (prefill, decode):
            side.ask("close")
            assert side.end() == 0
        left = [path.name for path in directory.rglob("*") if not path.is_dir()]
        assert left == []


def held(sides: Sides) -> Sizes:
    return {path: size for side in sides for path, size in side.ask("census").items()}


@pytest.fixture(scope="session")
def rested(sides: Sides) -> Sizes:
    """Resources held by agents after one room of each kind, once the tombstones have expired."""
    for room, ending in enumerate(ENDINGS, 1):
        ending(*sides, room)
    for room, ending in enumerate(ENDINGS, 1):
        try:
            finish(sides, ending, room)
        except Late:
            run(sides, ending, 100 + room)
    time.sleep(TOMBSTONES_S + 0.5)
    deadline = time.monotonic() + REST_S
    while True:
        before = held(sides)
        time.sleep(0.3)
        after = held(sides)
        if not grown(after, before) or time.monotonic() > deadline:  # nothing gets less any more
            return after
