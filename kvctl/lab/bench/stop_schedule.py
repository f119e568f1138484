"""Ranks of a bench that are stopped for a while, as the kernel stops a process that somebody suspends."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from kvctl.lab.faults.specification import Fault

Signal = Callable[[str, signal.Signals], None]
"""Sends a rank, by name, a signal."""


class StopSchedule:
    """Those of one run; they begin with it."""

    def __init__(self, faults: Sequence[Fault], send: Signal) -> None:
        """Of the faults only those of kind `pause` are looked at."""
        self._send = send
        self._started = time.monotonic_ns()
        self._waiting = [fault for fault in faults if fault.name == "pause"]
        self._stopped: list[Fault] = []

    def tick(self) -> None:
        """Stop and continue what is due; to be called several times a second."""
        ran_ns = time.monotonic_ns() - self._started
        for fault in [each for each in self._waiting if each.at_ns <= ran_ns]:
            self._waiting.remove(fault)
            self._stopped.append(fault)
            self._send(fault.rank, signal.SIGSTOP)
        self._continue([each for each in self._stopped if each.at_ns + (each.for_ns or 0) <= ran_ns])

    def end(self) -> None:
        """Let everyone go on, and stop nobody any more."""
        self._waiting.clear()
        self._continue(self._stopped[:])

    def _continue(self, faults: Sequence[Fault]) -> None:
        for fault in faults:
            self._stopped.remove(fault)
            if all(each.rank != fault.rank for each in self._stopped):
                self._send(fault.rank, signal.SIGCONT)


def last_ns(faults: Sequence[Fault]) -> int:
    """How long after a run's beginning the last pause ends."""
    return max((fault.at_ns + (fault.for_ns or 0) for fault in faults if fault.name == "pause"), default=0)
