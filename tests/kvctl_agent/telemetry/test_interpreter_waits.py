"""Timed waits that end late: by the kernel's doing, by a stop of the process, or because of the interpreter."""

from __future__ import annotations

import pytest

from kvctl_agent import gil
from kvctl_agent.telemetry.durations import INTERPRETER_WINDOW_NS, InterpreterWaits

MS = 1_000_000
WAITS = 100
ASKED_NS = INTERPRETER_WINDOW_NS // WAITS


@pytest.fixture(autouse=True)
def no_core_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel's count of the time without a core, as the list's only item."""
    count = [7_000 * MS]
    monkeypatch.setattr(gil, "no_core_ns", lambda: count[0])
    return count


def window(waits: InterpreterWaits, *late_ns: int) -> None:
    for number in range(WAITS):
        waits.note(ASKED_NS, ASKED_NS + late_ns[number % len(late_ns)])


def test_nothing_is_known_before_the_first_window_is_complete() -> None:
    waits = InterpreterWaits()
    for _ in range(WAITS - 1):
        waits.note(ASKED_NS, ASKED_NS)
    assert waits.wait_ns is None
    waits.note(ASKED_NS, ASKED_NS)
    assert waits.wait_ns == 0


def test_the_mean_of_a_busy_interpreter() -> None:
    waits = InterpreterWaits()
    window(waits, 5 * MS, 7 * MS)
    assert waits.wait_ns == 6 * MS
    window(waits, 0)
    assert waits.wait_ns == 0


def test_time_without_a_core_is_not_the_interpreter(no_core_ns: list[int]) -> None:
    waits = InterpreterWaits()
    waits.note(ASKED_NS, ASKED_NS + 5 * MS)
    no_core_ns[0] += WAITS * 4 * MS
    window(waits, 5 * MS)
    assert waits.wait_ns == pytest.approx(1 * MS, rel=0.1)


def test_one_stop_of_the_whole_process_is_not_the_interpreter() -> None:
    waits = InterpreterWaits()
    window(waits, *[10_000 * MS] + [0] * (WAITS - 1))
    assert waits.wait_ns == 0


def test_waits_that_end_early_show_nothing() -> None:
    waits = InterpreterWaits()
    for _ in range(3 * WAITS):
        waits.note(ASKED_NS, ASKED_NS // 2)
        waits.note(0, 20 * MS)
    assert waits.wait_ns is None
