"""The loop of a busy engine: what an iteration takes, and the speed that the loop lost beside an agent."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvctl.lab.ranks import busy_loop
from kvctl.lab.ranks.busy_loop import BusyLoop, LoopTimes, measure_idle, slowdown
from kvctl.lab.ranks.request import BUSY_ENGINES, ENGINE_KINDS, engine_kind


class Host:
    """A host whose clock advances by the given durations of iterations, in µs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_ns = 0
        self._steps: Iterator[int] = iter(())
        monkeypatch.setattr(busy_loop, "time", SimpleNamespace(monotonic_ns=self._clock))

    def _clock(self) -> int:
        self._now_ns += next(self._steps)
        return self._now_ns

    def run(self, durations_us: Sequence[int]) -> LoopTimes:
        self._steps = iter([step for each in durations_us for step in (0, 0, 1000 * each)])
        with closing(BusyLoop("python")) as loop:
            for _ in durations_us:
                loop.turn()
        return loop.times


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def test_an_interruption_is_time_lost(host: Host) -> None:
    busy = host.run(([70] * 14 + [70 + 1050]) * 100)
    assert (busy["iterations"], busy["ns"], busy["longest_ns"]) == (1500, 1500 * 140_000, 1_120_000)
    assert slowdown([busy], [host.run([70] * 1500)] * 2) == pytest.approx(0.5)


def test_a_core_that_changes_its_speed_is_no_slowdown(host: Host) -> None:
    fast, slow = host.run([50] * 1500), host.run([90] * 1500)
    assert slowdown([fast], [slow, slow]) == slowdown([slow], [fast, fast]) == 0
    assert slowdown([host.run([50] * 750 + [90] * 750)], [fast]) == 0


def test_interruptions_beside_an_idle_agent_are_not_the_rooms_doing(host: Host) -> None:
    disturbed = host.run(([70] * 14 + [140]) * 100)
    assert slowdown([disturbed], [disturbed]) == 0


@pytest.mark.parametrize("kind", ENGINE_KINDS)
def test_every_kind_is_measured(kind: str) -> None:
    times, end = measure_idle(kind, 0.2), time.monotonic() + 60
    while times["iterations"] < 5 and time.monotonic() < end:  # a busy machine runs few in that time
        times = measure_idle(kind, 0.2)
    assert 0 < times["undisturbed_ns"] <= times["iterations"] * times["longest_ns"]
    assert times["longest_ns"] <= times["ns"]


def test_a_turn_of_launches_is_a_burst() -> None:
    with closing(BusyLoop("launch")) as loop:
        before = time.monotonic_ns()
        loop.turn()
        took_ns = time.monotonic_ns() - before
    assert took_ns >= 22_000_000 + 2_000_000
    assert loop.times["iterations"] > 1


@pytest.mark.parametrize("kind", ENGINE_KINDS[1:])
def test_another_thread_runs_during_a_turn_whose_calls_release_the_interpreter(kind: str) -> None:
    """With a switch interval of an hour a thread runs only while the engine's thread releases the interpreter.

    The receive call of `spin` releases it for a microsecond, in which the other thread may not wake: here it waits.
    """
    go, ran = threading.Event(), threading.Event()

    def run() -> None:
        go.wait()
        ran.set()

    interval_s = sys.getswitchinterval()
    thread = threading.Thread(target=run)
    thread.start()  # which lets it run until it waits
    with closing(BusyLoop(kind)) as loop:
        socket = cast(Any, loop)._socket
        socket.rcvtimeo = 20
        cast(Any, loop)._socket = SimpleNamespace(recv=lambda _: socket.recv())  # it waits, without the interpreter
        sys.setswitchinterval(3600)
        try:
            end = time.monotonic() + 60
            go.set()
            while not ran.is_set() and time.monotonic() < end:
                loop.turn()
            ran_meanwhile = ran.is_set()
        finally:
            sys.setswitchinterval(interval_s)
    thread.join()
    assert ran_meanwhile


def test_a_choice_of_busy_engines_names_ranks_and_their_loop() -> None:
    kinds = {choice: [engine_kind(choice, role) for role in ("prefill", "decode")] for choice in BUSY_ENGINES}
    assert kinds["off"] == ["", ""]
    assert kinds["prefill"] == ["python", ""]
    assert kinds["decode:launch"] == ["", "launch"]
    assert kinds["both:spin"] == ["spin", "spin"]
    assert len({tuple(pair) for pair in kinds.values()}) == len(kinds) == 13
