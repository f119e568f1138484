"""What a steady rank of either role does: rooms come at any time, and none of them is ever waited for.

All of it runs on the rank's main thread: commands and state changes are taken from one queue, and what is due later is
kept in order of time.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from kvctl.lab.ranks.content import allocate_pool, own_coord, own_side
from kvctl.lab.ranks.geometry import model_shape
from kvctl.lab.ranks.steady.agent import make_agent
from kvctl.lab.ranks.steady.page_allocator import PageAllocator
from kvctl.lab.ranks.steady_messages import Abort, Ended, Mismatch, News, OpenRoom, Released, SendRoom, Serve
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import KvctlError
from kvctl_agent.runtime.handles import Handle

CLOSE_TIMEOUT_S = 3.0
_LOOK_S = 0.01  # how often rooms that have ended are looked at: nobody calls when their pages are free
_MEET_S = 0.02
_IDLE_S = 0.5


class Change(NamedTuple):
    """A room's handle reached a state, on the monotonic clock."""

    handle: Handle
    state: RoomState
    at_ns: int


class Worker(ABC):
    """One rank: pool, agent, and the rooms it has.

    Attributes:
        rooms: handles of rooms that have not ended, or whose pages are not free yet.
    """

    def __init__(self, serve: Serve, inbox: queue.SimpleQueue[Any], tell: Callable[[News], None]) -> None:
        """Allocate the pool and start the agent; state changes go to `inbox`, news to `tell`."""
        start = self.start = serve.start
        self.at = own_coord(start)
        self.rooms: dict[int, Handle] = {}
        self._verifies = serve.verify
        self._tell = tell
        self._inbox = inbox
        self._ending: set[int] = set()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._met: list[int] | None = None
        self._pool = allocate_pool(start)
        self.tenancy = PageAllocator(self._pool, start, serve.verify)
        self.agent = make_agent(
            start,
            serve.faults,
            self._pool,
            own_side(start),
            self.at,
            model_shape(start.shape, start.page_size),
            self._on_state,
        )
        self.agent.start()

    # ---- what the fleet says ------------------------------------------------------------------------------------

    def obey(self, command: OpenRoom | SendRoom | Abort) -> None:
        """Carry out a command about a room."""
        if isinstance(command, Abort):
            if handle := self.rooms.get(command.room):
                handle.abort(command.reason)
            return
        try:
            self.tenancy.take(command.room, command.index, command.tokens, command.prefix_tokens)
            self.rooms[command.room] = self.begin(command)
        except KvctlError as error:
            self.tenancy.give_back(command.room)
            cause = Failure(rank=self.start.name, code=type(error).__name__, at_ns=time.time_ns(), text=str(error))
            now_ns = time.monotonic_ns()
            self._ended(command.room, RoomState.FAILED, cause, now_ns, 0, None)
            self._tell(News(kind="released", data=dict(Released(room=command.room, at_ns=now_ns))))

    @abstractmethod
    def begin(self, command: OpenRoom | SendRoom) -> Handle:
        """Take part in a room whose pages are there.

        Raises:
            KvctlError: the agent refuses.
        """

    # ---- what the agent says ------------------------------------------------------------------------------------

    def changed(self, change: Change) -> None:
        """A room has reached a state."""
        number = change.handle.room
        if self.rooms.get(number) is not change.handle:
            return
        if not change.state.finished:
            self.goes_on(change)
            return
        if number in self._ending:
            return
        self._ending.add(number)
        nbytes, mismatch = 0, None
        if change.state is RoomState.SUCCESS and self._verifies:
            nbytes, mismatch = self.landed(number)
        self._ended(number, change.state, change.handle.error, change.at_ns, nbytes, mismatch)

    @abstractmethod
    def goes_on(self, change: Change) -> None:
        """A room has reached a state that is not its last."""

    @abstractmethod
    def landed(self, number: int) -> tuple[int, Mismatch | None]:
        """A room has succeeded: bytes compared, and the first that is wrong."""

    @abstractmethod
    def over(self, number: int) -> None:
        """A room's pages are free: forget what else is known of it."""

    @abstractmethod
    def serving(self) -> list[int]:
        """The prefill instances that this rank can exchange rooms with by now."""

    # ---- time ---------------------------------------------------------------------------------------------------

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something then."""
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), action))

    def patience_s(self) -> float:
        """How long the queue may be waited for now."""
        waits = [_IDLE_S]
        if self._ending:
            waits.append(_LOOK_S)
        if self._met is None or len(self._met) < len(self.start.bootstraps):
            waits.append(_MEET_S)
        if self._due:
            waits.append(max(0.0, self._due[0][0] - time.monotonic()))
        return min(waits)

    def look(self) -> None:
        """Do what is due, and see which rooms' pages are free and which peers have come."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        for number in [number for number in self._ending if self.rooms[number].released]:
            self._ending.discard(number)
            del self.rooms[number]
            self.tenancy.give_back(number)
            self.over(number)
            self._tell(News(kind="released", data=dict(Released(room=number, at_ns=time.monotonic_ns()))))
        serving = self.serving()
        if serving != self._met and (serving or self._met):
            self._met = serving
            data = {"instances": serving, "incarnation": f"{self.agent.incarnation:016x}"}
            self._tell(News(kind="met", data=data))

    def close(self) -> None:
        """Close the agent, then the pool that it wrote to."""
        self.agent.close(CLOSE_TIMEOUT_S)
        self._pool.close()

    def _ended(
        self, room: int, state: RoomState, cause: Failure | None, at_ns: int, nbytes: int, mismatch: Mismatch | None
    ) -> None:
        ended = Ended(room=room, state=state.label, cause=cause, at_ns=at_ns, verified_bytes=nbytes, mismatch=mismatch)
        self._tell(News(kind="ended", data=dict(ended)))

    def _on_state(self, handle: Handle, state: RoomState) -> None:
        # On the agent's control thread: only note the time and pass it on.
        self._inbox.put(Change(handle, state, time.monotonic_ns()))
