"""A loop of plain Python on the engine's thread, as a scheduler's, and the measurement of its speed and stalls.

While a thread runs Python, every other thread of the process waits for the interpreter (the GIL), by default up to 5 ms
each time. So an agent beside a busy scheduler behaves differently from one beside a thread that sleeps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from statistics import median, median_low
from typing import TypedDict

_ADDITIONS = 2000  # about 70 µs: short beside the switch interval, long beside reading the clock
_RESOLUTION_NS = 100  # of the typical iteration


class LoopTimes(TypedDict):
    """Measurements of a busy loop.

    `ns` is the time of all iterations together, without the calls of the agent between them.
    """

    iterations: int
    ns: int
    typical_ns: int  # the median iteration, which nothing interrupts
    longest_ns: int  # the longest iteration
    longest_call_ns: int  # the longest call of the agent: all pages of a room, and its end


class BusyLoop:
    """Runs iterations of plain Python and measures them."""

    def __init__(self) -> None:
        self._durations: Counter[int] = Counter()  # in units of the resolution
        self._iterations = self._ns = self._longest_ns = self._longest_call_ns = 0

    @property
    def times(self) -> LoopTimes:
        """The measurements so far."""
        typical = median_low(self._durations.elements()) if self._durations else 0
        return LoopTimes(
            iterations=self._iterations,
            ns=self._ns,
            typical_ns=typical * _RESOLUTION_NS,
            longest_ns=self._longest_ns,
            longest_call_ns=self._longest_call_ns,
        )

    def iterate(self) -> None:
        """Runs one iteration."""
        since = time.monotonic_ns()
        total = 0
        for number in range(_ADDITIONS):
            total += number
        ns = time.monotonic_ns() - since
        self._iterations += 1
        self._ns += ns
        self._durations[ns // _RESOLUTION_NS] += 1
        if ns > self._longest_ns:
            self._longest_ns = ns

    def called(self, since_ns: int) -> None:
        """Records that a call of the agent, begun at `since_ns` on the monotonic clock, has returned."""
        self._longest_call_ns = max(self._longest_call_ns, time.monotonic_ns() - since_ns)


def measure_idle(seconds: float) -> LoopTimes:
    """Runs the loop for `seconds`, with nothing between its iterations."""
    loop = BusyLoop()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        loop.iterate()
    return loop.times


def slowdown(busy: Sequence[LoopTimes], idle: Sequence[LoopTimes]) -> float:
    """Returns the share of their speed that busy loops lost to other threads; 0.5: an iteration took twice the time.

    They are compared with the typical iteration beside idle agents, or with their own if that is shorter: a core that
    has just begun to compute is up to 40 % slower than after a second, and an idle loop may be interrupted too.
    """
    alone_ns = min(median(each["typical_ns"] for each in loops) for loops in (busy, idle))
    return 1 - alone_ns * sum(each["iterations"] for each in busy) / sum(each["ns"] for each in busy)
