"""Waits of the control loop: microseconds of sleep, and waits for file descriptors with microsecond timeouts."""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvctl_agent.device.base import Event
from kvctl_agent.native import Turns

if TYPE_CHECKING:
    from kvctl_agent.runtime.arrivals import Arrivals
    from kvctl_agent.runtime.transfers import Transfers

_PR_SET_TIMERSLACK = 29
_POLLIN = 1
_FEW_ROOMS = 4
_PAUSE_A_ROOM_S = 50e-6
_LONGEST_PAUSE_S = 1e-3
_EVENT_PAUSE_NS = 10_000  # a look at an event takes a microsecond, without the GIL
_libc = ctypes.CDLL(None)
# A turn of the control loop takes some 60 µs, the opening of a room in cold caches up to 1.1 ms. The engine's thread
# waits meanwhile, but not for longer than this; a long turn lets it run in between.
_LOAN_NS = 1_000_000
_HOLD_NS, _HOLD_FEW_CORES_NS = 750_000, 500_000
_PAUSE_NS, _PAUSE_FEW_CORES_NS = 300_000, 100_000


def turns_of_loop(few_cores: bool = False) -> Turns:
    """Returns the turns of a control loop at the GIL.

    Args:
        few_cores: whether ranks that share this host have no core to spare.
    """
    hold_ns, pause_ns = (_HOLD_FEW_CORES_NS, _PAUSE_FEW_CORES_NS) if few_cores else (_HOLD_NS, _PAUSE_NS)
    return Turns(loan_ns=_LOAN_NS, hold_ns=hold_ns, pause_ns=pause_ns, spins=not few_cores)


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


class PolledDescriptors:
    """File descriptors to wait for.

    Attributes:
        polled: array of `struct pollfd`.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        count = len(descriptors)
        self.polled = (_PollFd * count)(*(_PollFd(fd, _POLLIN, 0) for fd in descriptors))
        self._revents = np.ndarray(4 * count, np.int16, memoryview(self.polled)).data[3::4]

    def readable(self) -> list[int]:
        """Returns the indices of the descriptors that the latest wait found readable."""
        return [index for index, events in enumerate(self._revents.tolist()) if events]


class InputWait:
    """Waits for input of the control loop without the GIL."""

    def __init__(
        self,
        turns: Turns,
        waited: Callable[[int, int], None],
        arrivals: Arrivals | None = None,
        transfers: Transfers | None = None,
        *,
        few_cores: bool = False,
        event_query: int = 0,
    ) -> None:
        """Creates the waits of one loop.

        Args:
            turns: the loop's turns at the GIL.
            waited: called with the time limit and the duration of each wait, in ns.
            arrivals, transfers: decode, prefill: can wait in place of the loop, and let the transport work meanwhile.
            few_cores: whether ranks that share this host have no core to spare, so that the loop makes fewer turns, and
                does not poll for arrivals more often when bytes are about to come.
            event_query: address of the driver's function that tells whether an event of the GPU is done.
        """
        self.yield_if_due = turns.yield_if_due
        self.end = turns.end
        self._turns = turns
        self._note = waited
        self._arrivals = arrivals
        self._waiter = arrivals or transfers
        self._few_cores = few_cores
        self._event_query = event_query
        self._descriptors = self._none = PolledDescriptors(())

    def watch(self, descriptors: Sequence[int]) -> None:
        """Sets the descriptors to wait for."""
        self._descriptors = PolledDescriptors(descriptors)

    def expect(self) -> None:
        """Has arrivals polled more often for a moment, because bytes are about to come."""
        if self._arrivals is not None and not self._few_cores:
            self._arrivals.expect()

    def pause(self, rooms: int, limit_s: float) -> float:
        """Pauses on few cores if many rooms are in flight, at most `limit_s` seconds; returns the seconds.

        A turn costs about 60 µs whatever it carries. With many rooms in flight no room waits for this turn: they wait
        for processor time, which fewer turns leave free. After the pause the loop waits as with few rooms.
        """
        if not self._few_cores or self._turns.busy or rooms <= _FEW_ROOMS:
            return 0.0
        pause_s = min((rooms - _FEW_ROOMS) * _PAUSE_A_ROOM_S, _LONGEST_PAUSE_S, max(limit_s, 0.0))
        self.sleep(pause_s)
        return pause_s

    def wait(self, pause_s: float, due_s: float, events: Sequence[Event] = ()) -> list[int]:
        """Waits for input; returns the indices of the descriptors that are readable. A signal may end the wait early.

        Args:
            pause_s: seconds to wait at most.
            due_s: the same without the pause between two looks for tags, which the transport may make itself.
            events: events of the GPU, recorded before, one of which ends the wait when it is done.
        """
        if self._waiter is not None and not events and 0 < pause_s < due_s:
            since_ns = time.monotonic_ns()
            ended_ns = self._waiter.wait(self._descriptors.polled, self._turns, due_s, pause_s)
            if ended_ns is not None:
                self._waited(since_ns, ended_ns - since_ns, int(due_s * 1e9))
                return self._descriptors.readable()
        self._wait(self._descriptors, pause_s, events)
        return self._descriptors.readable()

    def sleep(self, seconds: float) -> None:
        """Sleeps without the GIL."""
        self._wait(self._none, seconds)

    def _wait(self, descriptors: PolledDescriptors, seconds: float, events: Sequence[Event] = ()) -> None:
        handles = array("Q", [int(event.handle) for event in events])
        since_ns = time.monotonic_ns()
        limit_ns = int(seconds * 1e9)
        ended_ns = self._turns.wait(descriptors.polled, limit_ns, self._event_query, handles, _EVENT_PAUSE_NS)
        self._waited(since_ns, ended_ns - since_ns, limit_ns)

    def _waited(self, since_ns: int, waited_ns: int, limit_ns: int) -> None:
        """Notes a wait that began at `since_ns`; one that ended before its limit shows nothing of the GIL."""
        took_ns = time.monotonic_ns() - since_ns
        self._note(limit_ns, took_ns if waited_ns >= limit_ns else min(took_ns, limit_ns - 1))


def minimize_timer_slack() -> None:
    """Reduces the timer slack of the calling thread, so that it can sleep for microseconds.

    Linux delays wake-ups by up to 50 µs so that timers can share an interrupt: a sleep of 20 µs takes 74 µs. If the
    slack cannot be changed, sleeps stay that long.
    """
    _libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
