"""Waits of the control loop: what ends them, who waits in place of the loop, and what is noted."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvctl_agent.runtime.waiting import InputWait, turns_of_loop

QUERY = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value or 0
"""A function that returns its argument, so that the event of handle 600 is pending, and that of handle 0 is done."""
PENDING, DONE = SimpleNamespace(handle=600), SimpleNamespace(handle=0)


class Engine:
    """Stands in for a task that can wait in place of the loop."""

    def __init__(self, ended_ns: int | None) -> None:
        self.ended_ns = ended_ns
        self.waits: list[tuple[float, float]] = []

    def wait(self, polled: Any, turns: Any, timeout_s: float, pause_s: float) -> int | None:
        self.waits.append((timeout_s, pause_s))
        return self.ended_ns


@pytest.fixture
def noted() -> list[tuple[int, int]]:
    return []


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def waits(noted: list[tuple[int, int]], **options: Any) -> InputWait:
    return InputWait(turns_of_loop(), lambda *each: noted.append(each), event_query=QUERY, **options)


@pytest.mark.timeout(60)
def test_a_readable_descriptor_ends_it(noted: list[tuple[int, int]], pipe: tuple[int, int]) -> None:
    wait = waits(noted)
    wait.watch(pipe[:1])
    assert wait.wait(0.001, 0.001) == []
    os.write(pipe[1], b"x")
    assert wait.wait(3600, 3600) == [0]
    (in_time, took), (limit, early) = noted
    assert in_time == 1_000_000 <= took
    assert early < limit, "a wait that ended early shows nothing"


@pytest.mark.timeout(60)
def test_an_event_that_is_done_ends_it(noted: list[tuple[int, int]]) -> None:
    assert waits(noted).wait(3600, 3600, [PENDING, DONE]) == []  # type: ignore[list-item]


@pytest.mark.parametrize("role", ["arrivals", "transfers"])
def test_a_task_waits_in_its_place(noted: list[tuple[int, int]], role: str) -> None:
    engine = Engine(time.monotonic_ns())
    wait = waits(noted, **{role: engine})
    assert wait.wait(0.01, 60) == []
    assert engine.waits == [(60, 0.01)]
    wait.wait(0.0, 60)  # there is work
    wait.wait(0.001, 0.001)  # only messages and deadlines end the wait
    wait.wait(0.001, 60, [PENDING])  # type: ignore[list-item]  # the task does not look at events
    assert len(engine.waits) == 1


def test_a_task_may_refuse_to(noted: list[tuple[int, int]]) -> None:
    engine = Engine(None)
    since = time.monotonic()
    waits(noted, transfers=engine).wait(0.01, 60)
    assert time.monotonic() - since >= 0.01
    assert len(noted) == 1
