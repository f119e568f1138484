"""One room of each way to end, and then nothing of it is left: every container of every agent, found by walking."""

from __future__ import annotations

import re
import time

import pytest

from benchmarks.leaks.census import Sizes, grown
from benchmarks.leaks.endings import ENDINGS, Ending, Sides, run

# What is remembered of ended rooms for a while; waited for once, in the last test.
MEMORY = re.compile(r".*: machine\.state\.(tombstones|ended|pending_aborts).*")
SETTLED_S = 60.0
EMPTY = ("machine.rooms", "machine.open", "machine.state.parked[]", "handles._handles", "telemetry.rooms._active")


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """The shared fleet outlives each test; what it holds is what is tested here."""


def held(sides: Sides) -> Sizes:
    return {path: size for side in sides for path, size in side.ask("census").items()}


def left(sides: Sides, before: Sizes, *, memory: bool = False) -> list[str]:
    """What is more than before, once the last messages are answered."""
    deadline = time.monotonic() + SETTLED_S
    while True:
        after = {path: size for path, size in held(sides).items() if memory or not MEMORY.fullmatch(path)}
        lines = grown(before, after)
        if not lines or time.monotonic() > deadline:
            return lines
        time.sleep(0.02)


def test_at_rest_there_are_no_rooms(rested: Sizes) -> None:
    """What the other tests compare with is itself empty."""
    found = {place: size for path, size in rested.items() if (place := path.rpartition(": ")[2]) in EMPTY}
    assert found == dict.fromkeys(EMPTY, 0)


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)
def test_nothing_is_left_of_a_room(sides: Sides, rested: Sizes, ending: Ending) -> None:
    run(sides, ending, 1000 + list(ENDINGS).index(ending))
    assert left(sides, rested) == []


def test_nothing_is_remembered_once_the_tombstones_are_over(sides: Sides, rested: Sizes) -> None:
    """Also after rooms that all had the same number."""
    for ending in ENDINGS:
        if not ending.__name__.startswith("deadline"):
            run(sides, ending, 7)
            # A decode rank takes the number again only when all prefill ranks have said that they know of its end.
            assert left(sides, rested) == []
    assert grown(rested, held(sides)) != [], "there were no tombstones to expire"
    assert left(sides, rested, memory=True) == []
    assert [error for side in sides for error in side.ask("errors")] == []
