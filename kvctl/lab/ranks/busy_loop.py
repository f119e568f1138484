"""A loop of plain Python on the engine's thread, as a scheduler's, and the measurement of its speed and stalls.

While a thread runs Python, every other thread of the process waits for the interpreter (the GIL), by default up to 5 ms
each time. So an agent beside a busy scheduler behaves differently from one beside a thread that sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median_low
from typing import TypedDict

_ADDITIONS = 2000  # about 70 µs: short beside the switch interval, long beside reading the clock
# The iterations of a millisecond are alike but for interruptions; those of two seconds are not: depending on what else
# a host runs, its cores change their speed by up to 80 %.
_ALIKE = 15


class LoopTimes(TypedDict):
    """Measurements of a busy loop.

    `ns` is the time of all iterations together, without the calls of the agent between them.
    """

    iterations: int
    ns: int
    undisturbed_ns: int  # as long as the iterations would have taken if each had been as its neighbours' median
    longest_ns: int  # the longest iteration
    longest_call_ns: int  # the longest step of a forward: the layer groups due together, or all pages


class BusyLoop:
    """Runs iterations of plain Python and measures them."""

    def __init__(self) -> None:
        self.times = LoopTimes(iterations=0, ns=0, undisturbed_ns=0, longest_ns=0, longest_call_ns=0)
        self._latest: list[int] = []

    def iterate(self) -> None:
        """Runs one iteration."""
        since = time.monotonic_ns()
        total = 0
        for number in range(_ADDITIONS):
            total += number
        ns = time.monotonic_ns() - since
        self._latest.append(ns)
        if len(self._latest) == _ALIKE:
            self._add(self._latest)
            self._latest = []

    def _add(self, durations: list[int]) -> None:
        times = self.times
        times["iterations"] += len(durations)
        times["ns"] += sum(durations)
        times["undisturbed_ns"] += len(durations) * median_low(durations)
        times["longest_ns"] = max(times["longest_ns"], *durations)

    def called(self, since_ns: int) -> None:
        """Records the end of a step of a forward that began at `since_ns` on the monotonic clock."""
        self.times["longest_call_ns"] = max(self.times["longest_call_ns"], time.monotonic_ns() - since_ns)


def measure_idle(seconds: float) -> LoopTimes:
    """Runs the loop for `seconds`, with nothing between its iterations."""
    loop = BusyLoop()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        loop.iterate()
    return loop.times


def slowdown(busy: Sequence[LoopTimes], idle: Sequence[LoopTimes]) -> float:
    """Returns the share of their time that busy loops lost to interruptions, beyond that of idle loops.

    The durations of iterations are not compared, because a core may have another speed when the other loop runs.
    """
    speed, idle_speed = (
        sum(each["undisturbed_ns"] for each in loops) / sum(each["ns"] for each in loops) for loops in (busy, idle)
    )
    return 1 - speed / idle_speed
