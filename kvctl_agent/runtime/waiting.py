"""Waits of the control loop: microseconds of sleep, and waits for file descriptors with microsecond timeouts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np

_PR_SET_TIMERSLACK = 29
_POLLIN = 1
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


def minimize_timer_slack() -> None:
    """Reduces the timer slack of the calling thread, so that it can sleep for microseconds.

    Linux delays wake-ups by up to 50 µs so that timers can share an interrupt: a sleep of 20 µs takes 74 µs. If the
    slack cannot be changed, sleeps stay that long.
    """
    _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
