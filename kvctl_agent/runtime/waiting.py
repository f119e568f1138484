"""Waits of the control loop: microseconds of sleep, and waits for file descriptors with microsecond timeouts."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvctl_agent.gil import GilSharing

if TYPE_CHECKING:
    from kvctl_agent.runtime.arrivals import Arrivals

_PR_SET_TIMERSLACK = 29
_POLLIN = 1
_FEW_ROOMS = 4
_PAUSE_A_ROOM_S = 50e-6
_LONGEST_PAUSE_S = 1e-3
_libc = ctypes.CDLL(None)
_held = ctypes.PyDLL(None)  # does not release the GIL


class LoopTask(Protocol):
    """Work that the control loop does in every turn, besides its messages; used by the loop's thread only."""

    def turn(self) -> None:
        """Makes progress without waiting; must not raise."""
        ...

    def wait_s(self) -> float:
        """Returns the seconds after which the next turn is due; 0 if there is work already."""
        ...

    def idle(self) -> bool:
        """Returns whether nothing is in progress, so that the loop may end."""
        ...


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class DescriptorWait:
    """Waits until one of several file descriptors is readable.

    The waits of the `select` module that take any number of descriptors round timeouts up to milliseconds, which is
    longer than most transfers of small rooms take.

    Attributes:
        polled: array of `struct pollfd`, which others may poll in place of `wait`.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._count = len(descriptors)
        self.polled = (_PollFd * self._count)(*(_PollFd(fd, _POLLIN, 0) for fd in descriptors))
        self._revents = np.ndarray(4 * self._count, np.int16, memoryview(self.polled)).data[3::4]
        self._timeout = _TimeSpec()
        self._timeout_at = ctypes.byref(self._timeout)

    def wait(self, timeout_s: float, *, held: bool = False) -> list[int]:
        """Returns the indices of the descriptors that are readable, at the latest after `timeout_s` seconds.

        A signal may end the wait early, as if none were readable.

        Args:
            held: keep the GIL during the wait.
        """
        self._timeout.seconds = seconds = int(timeout_s)
        self._timeout.nanoseconds = int((timeout_s - seconds) * 1e9)
        libc = _held if held else _libc
        if libc.ppoll(self.polled, self._count, self._timeout_at, None) <= 0:
            return []
        return self.readable()

    def readable(self) -> list[int]:
        """Returns the indices of the descriptors that the latest poll of `polled` found readable."""
        return [index for index, events in enumerate(self._revents.tolist()) if events]


class InputWait:
    """Waits for input of the control loop, and decides how long, and with or without the GIL."""

    def __init__(
        self,
        sharing: GilSharing,
        waited: Callable[[int, int], None],
        arrivals: Arrivals | None = None,
        few_cores: bool = False,
    ) -> None:
        """Creates the waits of one loop.

        Args:
            sharing: decides which waits keep the GIL; shared with the transport.
            waited: called with the time limit and the duration of each wait without the GIL, in ns.
            arrivals: decode: can wait in place of the loop.
            few_cores: whether ranks that share this host have no core to spare, so that the loop makes fewer turns, and
                does not poll for arrivals more often when bytes are about to come.
        """
        self.yield_if_due = sharing.yield_if_due
        self._sharing = sharing
        self._note = waited
        self._arrivals = arrivals
        self._few_cores = few_cores
        self._descriptors = DescriptorWait(())

    def watch(self, descriptors: Sequence[int]) -> None:
        """Sets the descriptors to wait for."""
        self._descriptors = DescriptorWait(descriptors)

    def expect(self) -> None:
        """Has arrivals polled more often for a moment, because bytes are about to come."""
        if self._arrivals is not None and not self._few_cores:
            self._arrivals.expect()

    def pause(self, rooms: int, limit_s: float) -> float:
        """Pauses on few cores if many rooms are in flight, at most `limit_s` seconds; returns the seconds.

        A turn costs about 60 µs whatever it carries. With many rooms in flight no room waits for this turn: they wait
        for processor time, which fewer turns leave free. After the pause the loop waits as with few rooms.
        """
        if not self._few_cores or self._sharing.contended or rooms <= _FEW_ROOMS:
            return 0.0
        pause_s = min((rooms - _FEW_ROOMS) * _PAUSE_A_ROOM_S, _LONGEST_PAUSE_S, max(limit_s, 0.0))
        self.sleep(pause_s)
        return pause_s

    def wait(self, pause_s: float, due_s: float) -> list[int]:
        """Waits for input; returns as `DescriptorWait`.

        Args:
            pause_s: seconds to wait at most; more if the GIL is contended.
            due_s: the same without the pause between two looks for tags, which the transport may make itself.
        """
        wait_s, held = self._sharing.plan(pause_s, time.monotonic_ns())
        if held:
            return self._descriptors.wait(wait_s, held=True)
        if self._sharing.contended and (not wait_s or self._descriptors.wait(0.0, held=True)):
            # A wait that ends at once would give the engine's thread no time to take the GIL.
            self._sharing.yield_if_due()
            return self._descriptors.wait(0.0, held=True)
        since_ns = time.monotonic_ns()
        if self._arrivals is not None and 0 < pause_s < due_s:
            ended_ns = self._arrivals.wait(self._descriptors.polled, due_s, pause_s)
            if ended_ns is not None:
                self._waited((ended_ns - since_ns) * 1e-9, since_ns)
                return self._descriptors.readable()
        readable = self._descriptors.wait(wait_s)
        self._waited(wait_s, since_ns)
        return readable

    def sleep(self, seconds: float) -> None:
        """Sleeps without the GIL."""
        since_ns = time.monotonic_ns()
        time.sleep(seconds)
        self._waited(seconds, since_ns)

    def _waited(self, asked_s: float, since_ns: int) -> None:
        """Notes a wait without the GIL, begun at `since_ns` with a time limit of `asked_s` seconds."""
        now_ns = time.monotonic_ns()
        asked_ns, took_ns = int(asked_s * 1e9), now_ns - since_ns
        self._sharing.released(asked_ns, took_ns, now_ns)
        self._note(asked_ns, took_ns)


def minimize_timer_slack() -> None:
    """Reduces the timer slack of the calling thread, so that it can sleep for microseconds.

    Linux delays wake-ups by up to 50 µs so that timers can share an interrupt: a sleep of 20 µs takes 74 µs. If the
    slack cannot be changed, sleeps stay that long.
    """
    _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
