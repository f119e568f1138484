"""Loops of an engine's thread beside an agent, as schedulers run them, and the measurement of their speed and stalls.

While a thread runs Python, every other thread of the process waits for the interpreter (the GIL), by default up to 5 ms
each time. A thread that releases the GIL often and briefly keeps it from the others for longer: each release wakes a
waiting thread, which finds the GIL taken again and begins a new wait of 5 ms. So an agent beside a busy scheduler
behaves differently from one beside a thread that sleeps.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from statistics import median_low
from typing import NamedTuple, TypedDict

import zmq

_LAUNCH = bytes(16384)
_LONG_CALL_S = 0.02


def _add(count: int) -> None:
    """Runs plain Python: 1,000 additions take about 35 µs."""
    total = 0
    for number in range(count):
        total += number


def _python(_: zmq.Socket[bytes]) -> None:
    _add(2000)


def _spin(socket: zmq.Socket[bytes]) -> None:
    _add(300)
    with suppress(zmq.Again):
        socket.recv(zmq.NOBLOCK)


def _launch(_: zmq.Socket[bytes]) -> None:
    _add(700)
    zlib.crc32(_LAUNCH)


def _long(_: zmq.Socket[bytes]) -> None:
    time.sleep(_LONG_CALL_S)


class _Kind(NamedTuple):
    """One kind of `request.ENGINE_KINDS`.

    Attributes:
        iterate: one iteration, which is measured; called with a socket that receives nothing.
        alike: number of iterations that are alike but for interruptions: those of a millisecond or of a few long calls.
            Those of two seconds are not: depending on what else a host runs, its cores change their speed by up to
            80 %.
        burst_ns: time for which a turn repeats its iterations; 0: one iteration a turn.
        pause_s: pause after a burst.
    """

    iterate: Callable[[zmq.Socket[bytes]], None]
    alike: int
    burst_ns: int = 0
    pause_s: float = 0.0


_KINDS = {
    # 70 µs without a release of the GIL: short beside the switch interval, long beside reading the clock.
    "python": _Kind(_python, 15),
    # 10 µs and the receive call of an idle SGLang scheduler, which releases the GIL for a microsecond.
    "spin": _Kind(_spin, 75),
    # A prefill forward of 22 ms: launches of 25 µs, each with a native call that releases the GIL for 5 µs.
    "launch": _Kind(_launch, 35, 22_000_000, 0.002),
    # Waits for a GPU, which release the GIL.
    "long": _Kind(_long, 5),
}


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
    """Runs the loop of an engine's thread and measures its iterations; `kind` is one of `request.ENGINE_KINDS`.

    Between two turns the caller looks for changes of its rooms, as an engine polls its senders and receivers.
    """

    def __init__(self, kind: str) -> None:
        self.times = LoopTimes(iterations=0, ns=0, undisturbed_ns=0, longest_ns=0, longest_call_ns=0)
        self._kind = _KINDS[kind]
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._latest: list[int] = []

    def turn(self) -> None:
        """Runs one turn: an iteration, or a burst of them and a pause."""
        kind = self._kind
        end = time.monotonic_ns() + kind.burst_ns
        self._iterate()
        while kind.burst_ns and time.monotonic_ns() < end:
            self._iterate()
        if kind.pause_s:
            time.sleep(kind.pause_s)

    def close(self) -> None:
        """Closes the socket of the loop."""
        self._context.destroy(0)

    def _iterate(self) -> None:
        since = time.monotonic_ns()
        self._kind.iterate(self._socket)
        ns = time.monotonic_ns() - since
        self._latest.append(ns)
        if len(self._latest) == self._kind.alike:
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


def measure_idle(kind: str, seconds: float) -> LoopTimes:
    """Runs the loop of a kind for `seconds`, with nothing between its turns."""
    with closing(BusyLoop(kind)) as loop:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            loop.turn()
    return loop.times


def slowdown(busy: Sequence[LoopTimes], idle: Sequence[LoopTimes]) -> float:
    """Returns the share of their time that busy loops lost to interruptions, beyond that of idle loops.

    The durations of iterations are not compared, because a core may have another speed when the other loop runs.
    """
    speed, idle_speed = (
        sum(each["undisturbed_ns"] for each in loops) / sum(each["ns"] for each in loops) for loops in (busy, idle)
    )
    return 1 - speed / idle_speed
