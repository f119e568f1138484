"""Where an agent's rooms meet the engine: one handle per room, made by the engine's calls, told by the control loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.protocol.events import Pages
from kvctl_agent.runtime.handles import Receive, Send
from kvctl_agent.runtime.page_owners import Destinations

OnState = Callable[[Send | Receive, RoomState], None]


class HandleRegistry:
    """The handles of one agent; `add` may be called from any thread, the rest by the control loop.

    Args:
        on_state: called at each change of a room's state; it must only enqueue.
        destinations: of a decode rank: which room its memory belongs to.
    """

    def __init__(self, name: str, on_state: OnState | None, destinations: Destinations | None = None) -> None:
        self._name = name
        self._on_state = on_state
        self._destinations = destinations or Destinations(())
        self._handles: dict[int, Send | Receive] = {}
        self._lock = threading.Lock()

    def add(self, handle: Send | Receive, written: tuple[Pages, ...] = ()) -> None:
        """Take a new room in; `written` is the memory that it receives into, as `Destinations.take` wants it.

        Raises:
            LocalProtocolError: its number is in use here, or its memory belongs to another room.
        """
        with self._lock:
            if handle.room in self._handles:
                raise LocalProtocolError(f"room {handle.room} is in use on {self._name}")
            if written:
                self._destinations.take(handle.room, written)
            self._handles[handle.room] = handle

    @property
    def rooms(self) -> list[int]:
        """Rooms whose handles have not ended."""
        return list(self._handles)

    def tell(self, room: int, state: RoomState, failure: Failure | None) -> None:
        """A room has reached a state."""
        handle = self._handles.get(room)
        if handle is None:
            return
        if state is RoomState.SUCCESS:  # before the engine can know and give the pages to another room
            self._free(room)
        handle.tell(state, failure)
        self._forget(handle)
        if self._on_state is not None:
            self._on_state(handle, state)

    def release(self, room: int) -> None:
        """A room's pages are free."""
        handle = self._handles.get(room)
        if handle is not None:
            self._free(room)
            handle.release()
            self._forget(handle)

    def refuse(self, room: int, text: str) -> None:
        """The machine does not take this room."""
        handle = self._handles.get(room)
        if handle is not None:
            self._free(room)
            handle.release()
            self.tell(room, RoomState.FAILED, self._failure("KV_ROOM_DUPLICATE", text))

    def finish(self, handle: Send | Receive) -> None:
        """A room of which nothing moves: it has succeeded at once."""
        handle.release()
        handle.tell(RoomState.SUCCESS, None)
        if self._on_state is not None:
            self._on_state(handle, RoomState.SUCCESS)

    def close(self) -> None:
        """Fail what is left. Not released: whoever writes to these pages has not said that nothing is in flight."""
        for handle in list(self._handles.values()):
            text = f"agent {self._name} was closed with the room in flight"
            handle.tell(RoomState.FAILED, self._failure("AGENT_CLOSED", text))
        self._handles.clear()

    def _free(self, room: int) -> None:
        with self._lock:
            self._destinations.free(room)

    def _failure(self, code: str, text: str) -> Failure:
        return {"rank": self._name, "code": code, "at_ns": time.time_ns(), "text": text}

    def _forget(self, handle: Send | Receive) -> None:
        if handle.state.finished and handle.released:
            with self._lock:
                self._handles.pop(handle.room, None)
