"""Decides when a decode rank opens the rooms of a batch, and simulates their decoding.

Closed-loop rooms are opened as soon as the window (the maximum number of rooms in flight) allows. Other rooms have an
arrival time; time that an arrived room waits for the window counts as part of its latency. All ranks of a dp group open
the same rooms in the same order.
"""

from __future__ import annotations

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
        """Queues rooms; their arrival times, which ascend, are relative to `start_ns`."""
        self._waiting = deque((start_ns + round((room.arrival_ms or 0.0) * 1e6), room) for room in rooms)

    def __bool__(self) -> bool:
        """Whether any room is still in the queue."""
        return bool(self._waiting)

    @property
    def next_ns(self) -> int | None:
        """Time at which the next room arrives; None if there is none."""
        return self._waiting[0][0] if self._waiting else None

    def take(self, now_ns: int) -> RoomVisit | None:
        """Removes and returns the next room that has arrived by `now_ns`; None if there is none."""
        if not self._waiting or self._waiting[0][0] > now_ns:
            return None
        at_ns, room = self._waiting.popleft()
        # A closed-loop room arrives when the window allows it to be opened.
        return RoomVisit(room, now_ns if room.arrival_ms is None else at_ns)

    def untaken(self) -> list[Room]:
        """Returns the rooms that are still in the queue."""
        return [room for _, room in self._waiting]


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
