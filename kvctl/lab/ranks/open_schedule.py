"""When a decode rank opens which room, and what becomes of the rooms that have arrived: queued, in flight, decoded.

Closed-loop rooms are there from the beginning and wait for a place. Others come at a time of their own, a session's
next turn when the one before has been decoded; time in the queue is theirs. All ranks of a dp group see the same rooms
in the same order.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvctl.lab.ranks.messages import Room


@dataclass(slots=True)
class RoomVisit:
    """One room on its way, in monotonic nanoseconds; 0: not yet.

    Attributes:
        arrival_ns: when its request came: the beginning of its time to first token.
        success_ns: decode may start.
        first_ns, last_ns: when its first and its last token were there.
    """

    room: Room
    arrival_ns: int = 0
    success_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    tokens_left: int = 0

    def row(self) -> list[int]:
        """As `RunReport.rooms` has it."""
        return [self.room.index, self.arrival_ns, self.success_ns, self.first_ns, self.last_ns]


class Arrivals:
    """The rooms of a run in the order in which they come."""

    def __init__(self, rooms: Iterable[Room], start_ns: int) -> None:
        """Arrival times count from `start_ns`."""
        self._due: list[tuple[int, int, Room]] = []
        self._ready: deque[tuple[int, Room]] = deque()
        self._turns: dict[int, deque[tuple[int, Room]]] = {}
        for order, room in enumerate(rooms):
            if room.session < 0:
                self._add(start_ns, order, room)
                continue
            turns = self._turns.setdefault(room.session, deque())
            turns.append((order, room))
            if len(turns) == 1:
                self._add(start_ns, order, room)

    def __bool__(self) -> bool:
        """Whether any room has not been taken yet."""
        return bool(self._due or self._ready or any(len(turns) > 1 for turns in self._turns.values()))

    @property
    def next_ns(self) -> int | None:
        """When the next room comes; None where none does by itself."""
        return self._due[0][0] if self._due else None

    def take(self, now_ns: int) -> RoomVisit | None:
        """The next room that has come by now."""
        while self._due and self._due[0][0] <= now_ns:
            at_ns, _, room = heapq.heappop(self._due)
            self._ready.append((at_ns, room))
        if not self._ready:
            return None
        at_ns, room = self._ready.popleft()
        # A closed-loop room's request is made when there is a place for it.
        return RoomVisit(room, at_ns if self._timed(room) else now_ns)

    def over(self, room: Room, now_ns: int) -> None:
        """A room has been decoded, or has failed: its session's next turn comes."""
        turns = self._turns.get(room.session)
        if turns and turns[0][1] is room:
            turns.popleft()
            if turns:
                order, following = turns[0]
                heapq.heappush(self._due, (now_ns, order, following))

    def untaken(self) -> list[Room]:
        """The rooms that were never taken."""
        waiting = [room for _, _, room in self._due] + [room for _, room in self._ready]
        return waiting + [room for turns in self._turns.values() for _, room in list(turns)[1:]]

    def _add(self, start_ns: int, order: int, room: Room) -> None:
        heapq.heappush(self._due, (start_ns + round((room.arrival_ms or 0.0) * 1e6), order, room))

    @staticmethod
    def _timed(room: Room) -> bool:
        return room.arrival_ms is not None or room.session >= 0


class Decoding:
    """Rooms that decode together: one token each in every step, new ones joining at the next step.

    Without a step time every token of a room is there when it joins.
    """

    def __init__(self, step_ns: int) -> None:
        self._step_ns = step_ns
        self._joining: list[RoomVisit] = []
        self._running: list[RoomVisit] = []
        self._step_end_ns: int | None = None

    @property
    def next_ns(self) -> int | None:
        """When the step ends that is under way."""
        return self._step_end_ns

    def join(self, visit: RoomVisit, now_ns: int) -> list[RoomVisit]:
        """A room may start; returns it where it has been decoded already."""
        if not self._step_ns:
            visit.first_ns = visit.last_ns = visit.success_ns
            return [visit]
        visit.tokens_left = max(1, visit.room.output_tokens)
        self._joining.append(visit)
        if self._step_end_ns is None:
            self._begin(now_ns)
        return []

    def advance(self, now_ns: int) -> list[RoomVisit]:
        """End the step that is due by now and begin the next; returns the rooms that are decoded."""
        if self._step_end_ns is None or now_ns < self._step_end_ns:
            return []
        for visit in self._running:
            visit.tokens_left -= 1
            visit.first_ns = visit.first_ns or now_ns
            visit.last_ns = now_ns
        ended = [visit for visit in self._running if not visit.tokens_left]
        self._running = [visit for visit in self._running if visit.tokens_left]
        self._begin(now_ns)
        return ended

    def _begin(self, now_ns: int) -> None:
        self._running += self._joining
        self._joining.clear()
        self._step_end_ns = now_ns + self._step_ns if self._running else None
