"""A few thousand rooms with random aborts, several in flight: what `benchmarks/nothing_left.py` does with 100,000."""

from __future__ import annotations

import time
from argparse import Namespace

import pytest

from benchmarks.leaks.census import Sizes, grown
from benchmarks.leaks.endings import Sides
from benchmarks.nothing_left import more, run

ROOMS, WARM_UP = 2000, 1000
REST_S = 60.0
MOST_MORE_BYTES = 8 << 20  # 4 KiB a room; the benchmark measures it better


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """The shared fleet outlives each test; what it holds is what is tested here."""


def census(sides: Sides) -> Sizes:
    return {path: size for side in sides for path, size in side.ask("census").items()}


def at_rest(sides: Sides, rested: Sizes) -> list[str]:
    """What is held beyond the state at rest, when the tombstones are over."""
    deadline = time.monotonic() + REST_S
    while (lines := grown(rested, census(sides))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return lines


def test_containers_objects_threads_and_descriptors_are_as_before(sides: Sides, rested: Sizes) -> None:
    plan = Namespace(window=24, aborts=0.2, seed=3)
    run([*sides], 10_000, WARM_UP, plan)
    assert at_rest(sides, rested) == []
    before = [(side.threads, side.descriptors(), side.ask("instances"), side.rss_bytes) for side in sides]
    ends = run([*sides], 20_000, ROOMS, plan)
    assert sum(ends.values()) == ROOMS
    assert ends["SUCCESS"] > ROOMS // 2, ends
    assert ends["ABORTED"] > ROOMS // 50, ends
    assert at_rest(sides, rested) == []
    for side, (threads, descriptors, objects, rss_bytes) in zip(sides, before, strict=True):
        assert more(objects, side.ask("instances")) == []
        assert side.threads <= threads
        assert grown(descriptors, side.descriptors()) == []
        assert side.rss_bytes - rss_bytes < MOST_MORE_BYTES
        assert side.ask("errors") == []
