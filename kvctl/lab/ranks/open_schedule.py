"""Decides when a decode rank opens the rooms of a batch, and simulates their decoding.

Closed-loop rooms are opened as soon as the window (the maximum number of rooms in flight) allows. Other rooms have an
arrival time; the next turn of a session arrives when the previous turn has been decoded. Time that an arrived room
waits for the window counts as part of its latency. All ranks of a dp group open the same rooms in the same order.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvctl.lab.ranks.messages import Room


@dataclass(slots=True)
class RoomVisit:
    """Times of one room on a decode rank, in monotonic nanoseconds; 0: not reached yet.

    Attributes:
        arrival_ns: arrival of the request, from which its time to first token counts.
        success_ns: time at which the KV cache was complete and decoding could start.
        first_ns, last_ns: times of the first and the last decoded token.
        tokens_left: number of tokens still to decode.
    """

    room: Room
    arrival_ns: int = 0
    success_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    tokens_left: int = 0

    def row(self) -> list[int]:
        """Returns the room's row of `RunReport.rooms`."""
        return [self.room.index, self.arrival_ns, self.success_ns, self.first_ns, self.last_ns]


class Arrivals:
    """Queue of the rooms of a run that have not been opened, in the order of their arrival."""

    def __init__(self, rooms: Iterable[Room], start_ns: int) -> None:
        """Queues rooms; their arrival times are relative to `start_ns`."""
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
        """Whether any room is still in the queue, including later turns of sessions."""
        return bool(self._due or self._ready or any(len(turns) > 1 for turns in self._turns.values()))

    @property
    def next_ns(self) -> int | None:
        """Time at which the next room arrives; None if no arrival is scheduled."""
        return self._due[0][0] if self._due else None

    def take(self, now_ns: int) -> RoomVisit | None:
        """Removes and returns the next room that has arrived by `now_ns`; None if there is none."""
        while self._due and self._due[0][0] <= now_ns:
            at_ns, _, room = heapq.heappop(self._due)
            self._ready.append((at_ns, room))
        if not self._ready:
            return None
        at_ns, room = self._ready.popleft()
        # A closed-loop room arrives when the window allows it to be opened.
        timed = room.arrival_ms is not None or room.session >= 0
        return RoomVisit(room, at_ns if timed else now_ns)

    def over(self, room: Room, now_ns: int) -> None:
        """Schedules the next turn of a room's session, after the room was decoded or failed."""
        turns = self._turns.get(room.session)
        if turns and turns[0][1] is room:
            turns.popleft()
            if turns:
                order, following = turns[0]
                heapq.heappush(self._due, (now_ns, order, following))

    def untaken(self) -> list[Room]:
        """Returns the rooms that are still in the queue, including later turns of sessions."""
        waiting = [room for _, _, room in self._due] + [room for _, room in self._ready]
        return waiting + [room for turns in self._turns.values() for _, room in list(turns)[1:]]

    def _add(self, start_ns: int, order: int, room: Room) -> None:
        heapq.heappush(self._due, (start_ns + round((room.arrival_ms or 0.0) * 1e6), order, room))


class Decoding:
    """Simulates continuous batching: a step decodes one token of every running room; new rooms join at the next step.

    With a step time of 0, a room counts as decoded when it joins.
    """

    def __init__(self, step_ns: int) -> None:
        self._step_ns = step_ns
        self._joining: list[RoomVisit] = []
        self._running: list[RoomVisit] = []
        self._step_end_ns: int | None = None

    @property
    def next_ns(self) -> int | None:
        """Time at which the current step ends; None while no room is being decoded."""
        return self._step_end_ns

    def join(self, visit: RoomVisit, now_ns: int) -> list[RoomVisit]:
        """Adds a room to the batch; returns a list with the room if it is decoded at once, else an empty list."""
        if not self._step_ns:
            visit.first_ns = visit.last_ns = visit.success_ns
            return [visit]
        visit.tokens_left = max(1, visit.room.output_tokens)
        self._joining.append(visit)
        if self._step_end_ns is None:
            self._begin(now_ns)
        return []

    def advance(self, now_ns: int) -> list[RoomVisit]:
        """Ends the current step if it is due and begins the next; returns the rooms that decoded their last token."""
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
