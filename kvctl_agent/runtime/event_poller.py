"""Polls the engine's device events, and posts the engine's report about a forward once that forward is done.

A device event that completes wakes no thread, so the control loop looks at the pending events during its wait, without
the GIL. Where the driver has no function for that (`event_query` is 0), it polls: each poll takes the GIL from the
engine, so the pause between polls is a small fraction of the time since the last event completed. The poller has no
deadlines: the machine gets `Launched` for each forward, and enforces its own deadlines.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import shown
from kvctl_agent.device.base import Device, Event
from kvctl_agent.errors import DeviceError, KvctlError, LocalProtocolError
from kvctl_agent.protocol import events as ev

_SHORTEST_S = 20e-6  # without minimal timer slack, the kernel sleeps for about 70 µs
_LONGEST_S = 200e-6
_SHARE_OF_SILENCE = 1 / 128
_WITH_EVENTS_S = 10e-3  # the loop's wait looks at the events itself, without the GIL


class PendingEvent(NamedTuple):
    """An event object of the engine, which all rooms of a batch may share, and the device's wrapper of it."""

    source: Any
    event: Event


class Sender(Protocol):
    """Interface of a room's handle that the poller uses."""

    room: int
    state: RoomState

    def post_unless_over(self, event: ev.Event) -> bool:
        """Posts an event to the machine; returns False if the room has ended and needs no more events."""
        ...


class _Deferred(NamedTuple):
    pending: PendingEvent | None
    make: Callable[[int], ev.Event]


class EventPoller:
    """Polls the device events of a prefill rank on the control loop's thread.

    Any thread may call `pending` and `post_after`.

    Events of one room are posted in the order of the calls, whatever the order in which the device completes them;
    rooms do not wait for each other.
    """

    def __init__(self, device: Device, wake: Callable[[], None]) -> None:
        """Creates a poller; it calls `wake` to wake the control loop."""
        self._device = device
        self._wake = wake
        self._deferred: dict[Sender, deque[_Deferred]] = {}  # no queue is empty
        self._lock = threading.Lock()
        self._active_s = 0.0  # time at which an event was last added or completed
        self._stopping = False

    def close(self) -> None:
        """Forgets all deferred events; the rooms have ended."""
        with self._lock:
            self._stopping = True
            self._deferred.clear()

    @property
    def waiting(self) -> int:
        """Number of rooms with a pending event."""
        return len(self._deferred)

    def pending(self, room: int, source: Any) -> PendingEvent:
        """Wraps the engine's event `source`; raises LocalProtocolError if `source` is not an event of this device."""
        try:
            return PendingEvent(source, self._device.event_of(source))
        except DeviceError as error:
            raise LocalProtocolError(f"room {room}: event: {error}") from None
        except Exception as error:  # raised by the engine's own type
            raise LocalProtocolError(f"room {room}: event is {shown(source)}, which is none: {error}") from None

    def post_after(self, sender: Sender, pending: PendingEvent | None, make: Callable[[int], ev.Event]) -> None:
        """Posts an event to the machine as soon as `pending` is done, and after the room's earlier deferred events.

        Args:
            sender: handle of the room.
            pending: event of the engine to wait for; None for no wait beyond that for the earlier events.
            make: returns the event to post, for the present monotonic time in ns.
        """
        with self._lock:
            if pending is not None:
                self._active_s = time.monotonic()
            queue = self._deferred.get(sender)
            if queue is not None:
                queue.append(_Deferred(pending, make))
            elif pending is None:
                sender.post_unless_over(make(time.monotonic_ns()))
            elif not self._stopping:
                self._deferred[sender] = deque([_Deferred(pending, make)])
                self._wake()

    def forget(self, sender: Sender, event: ev.Event) -> None:
        """Drops the deferred events of a room, whose pages were recalled, and posts an event after earlier ones."""
        with self._lock:
            self._deferred.pop(sender, None)
            sender.post_unless_over(event)

    def idle(self) -> bool:
        return True

    def turn(self) -> None:
        if not self._deferred:
            return
        with self._lock:
            queues = list(self._deferred.items())
        incomplete: set[int] = set()
        for sender, queue in queues:
            self._post_ready(sender, queue, incomplete)

    def events(self) -> Sequence[Event]:
        """Returns the events that the rooms wait for first."""
        if not self._device.event_query or not self._deferred:
            return ()
        with self._lock:
            heads = [queue[0].pending for queue in self._deferred.values()]
        by_source = {id(pending.source): pending.event for pending in heads if pending is not None}
        return list(by_source.values())

    def wait_s(self) -> float:
        if not self._deferred:
            return inf
        if self._device.event_query:
            return _WITH_EVENTS_S
        silence_s = time.monotonic() - self._active_s
        return min(max(silence_s * _SHARE_OF_SILENCE, _SHORTEST_S), _LONGEST_S)

    def _post_ready(self, sender: Sender, queue: deque[_Deferred], incomplete: set[int]) -> None:
        """Posts the deferred events of one room up to the first whose device event is incomplete.

        Args:
            incomplete: ids of the engine's event objects that were found incomplete in this iteration; may be added to.
        """
        over = sender.state.finished
        while not over:
            pending, make = queue[0]
            try:
                if pending is not None and not _done(pending, incomplete):
                    return
                event = make(time.monotonic_ns())
            except Exception as error:  # a failed kernel or a bug fails this room, but does not end the loop
                text = str(error) if isinstance(error, KvctlError) else f"{type(error).__name__}: {error}"
                with self._lock:
                    if self._deferred.get(sender) is queue:
                        sender.post_unless_over(ev.ForwardFailed(sender.room, f"its forward failed: {text}"))
                break
            with self._lock:
                if self._deferred.get(sender) is not queue:  # closing, or the engine has recalled the pages
                    return
                queue.popleft()
                over = not sender.post_unless_over(event)
                self._active_s = time.monotonic()
                if not queue:
                    del self._deferred[sender]
                    return
        with self._lock:
            if self._deferred.get(sender) is queue:
                del self._deferred[sender]


def _done(pending: PendingEvent, incomplete: set[int]) -> bool:
    # Completion is not cached: the engine may since have recorded the same event again, for a later call.
    key = id(pending.source)
    if key in incomplete:
        return False
    if pending.event.done():
        return True
    incomplete.add(key)
    return False
