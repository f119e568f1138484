"""Waits for the engine's events, so that the engine need not: what it says of a forward is passed on once that is done.

A device's events wake nobody, so a thread looks: often while some forward is awaited, never else. A look takes the
interpreter from the engine, so the pause grows with the time in which nothing has come, and stays a small share of it.
There are no deadlines here: the machine is told of each forward when it is launched, and it knows best what a room
waits for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import shown
from kvctl_agent.device.base import Device, Event
from kvctl_agent.errors import DeviceError, KvctlError, LocalProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.runtime.timer_slack import minimize_timer_slack

_SHORTEST_S = 20e-6  # the kernel makes about 70 of it
_LONGEST_S = 200e-6
_SHARE_OF_SILENCE = 1 / 128


class PendingEvent(NamedTuple):
    """An engine's event, as it was given and as the device knows it; engines give one for all rooms of a batch."""

    given: Any
    event: Event


class Sender(Protocol):
    """What is needed of a room's handle."""

    room: int
    state: RoomState

    def post_unless_over(self, event: ev.Event) -> bool:
        """Passes an event on; False: the room has ended, and nothing that was said of it matters any more."""
        ...


class _Deferred(NamedTuple):
    moment: PendingEvent | None
    make: Callable[[int], ev.Event]


class EventPoller:
    """One thread of a prefill rank whose pool is on a device; `moment` and `tell` are the engine's, from any thread.

    What is said of one room is passed on in its order, whatever its events do; rooms do not wait for each other.
    """

    def __init__(self, name: str, device: Device) -> None:
        self._device = device
        self._said: dict[Sender, deque[_Deferred]] = {}  # never an empty one
        self._changed = threading.Condition(threading.Lock())
        self._stirred_s = 0.0  # when something new was waited for, or came
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Drop what is waited for and stop; True when the thread has ended."""
        with self._changed:
            self._stopping = True
            self._said.clear()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Rooms of which something waits for a forward."""
        return len(self._said)

    def moment(self, room: int, given: Any) -> PendingEvent:
        """Raises LocalProtocolError where `given` is no event of this device."""
        try:
            return PendingEvent(given, self._device.event_of(given))
        except DeviceError as error:
            raise LocalProtocolError(f"room {room}: event: {error}") from None
        except Exception as error:  # the engine's own type
            raise LocalProtocolError(f"room {room}: event is {shown(given)}, which is none: {error}") from None

    def tell(self, sender: Sender, moment: PendingEvent | None, make: Callable[[int], ev.Event]) -> None:
        """Pass on what `make` returns for the monotonic ns of that time, once the moment has come; None: at once,
        unless something of this room is waited for."""
        with self._changed:
            if moment is not None:
                self._stirred_s = time.monotonic()
            waiting = self._said.get(sender)
            if waiting is not None:
                waiting.append(_Deferred(moment, make))
            elif moment is None:
                sender.post_unless_over(make(time.monotonic_ns()))
            elif not self._stopping:
                self._said[sender] = deque([_Deferred(moment, make)])
                self._changed.notify()

    def _run(self) -> None:
        minimize_timer_slack()
        while not self._stopping:
            with self._changed:
                while not self._said and not self._stopping:
                    self._changed.wait()
                waiting = list(self._said.items())
            pending: set[int] = set()
            for sender, said in waiting:
                self._pass_on(sender, said, pending)
            silence_s = time.monotonic() - self._stirred_s
            time.sleep(min(max(silence_s * _SHARE_OF_SILENCE, _SHORTEST_S), _LONGEST_S))

    def _pass_on(self, sender: Sender, said: deque[_Deferred], pending: set[int]) -> None:
        """What was said of one room, as far as it need not wait. `pending`: events that were not done this time, by
        id."""
        over = sender.state.finished
        while not over:
            moment = said[0].moment
            try:
                if moment is not None and not _come(moment, pending):
                    return
            except Exception as error:  # a kernel failed; or it is a bug, which must cost this room, not the thread
                text = str(error) if isinstance(error, KvctlError) else f"{type(error).__name__}: {error}"
                sender.post_unless_over(ev.ForwardFailed(sender.room, f"its forward failed: {text}"))
                break
            with self._changed:
                if self._stopping:
                    return
                over = not sender.post_unless_over(said.popleft().make(time.monotonic_ns()))
                self._stirred_s = time.monotonic()
                if not said:
                    del self._said[sender]
                    return
        with self._changed:
            self._said.pop(sender, None)


def _come(moment: PendingEvent, pending: set[int]) -> bool:
    # That an event was done is not remembered: the engine may have recorded it anew since, for what it gave just now.
    key = id(moment.given)
    if key in pending:
        return False
    if moment.event.done():
        return True
    pending.add(key)
    return False
