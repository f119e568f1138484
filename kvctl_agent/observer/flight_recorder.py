"""The latest events of one agent's flight recorder, numbered as the agent has numbered them."""

from __future__ import annotations

from collections import deque
from itertools import islice

from kvctl_agent.contract.snapshots import EventRow, Events
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.flight_recorder import Entry, FlightRecorder


class RecordedEvents(FlightRecorder):
    """Bounded log of events: those of the agent, and those that are recorded here, which take numbers in between."""

    def __init__(self, clock: Clock, agent_name: str, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity of a flight recorder must be at least 1, got {capacity}")
        super().__init__(clock, self._add_own)
        self._agent = agent_name
        self._ring: deque[Entry] = deque(maxlen=capacity)
        self._end = 0

    @property
    def added(self) -> int:
        """Number of events that were recorded here and by earlier observers."""
        return self._next

    @property
    def end(self) -> int:
        """Number of the next event."""
        return self._end

    def resume(self, added: int) -> None:
        """Numbers the agent's events as an earlier observer has, which had added so many of its own."""
        self._next += added

    def skip(self, end: int) -> None:
        """Leaves out the numbers below `end`, which an earlier observer has used."""
        self._end = max(self._end, end)

    def add(self, entry: Entry) -> None:
        """Adds an event that the agent has recorded."""
        number = max(entry.sequence + self._next, self._end)  # `_next`: number of those that were recorded here
        self._append(entry._replace(sequence=number))

    def _add_own(self, entry: Entry) -> None:
        self._append(entry._replace(sequence=self._end))

    def _append(self, entry: Entry) -> None:
        self._ring.append(entry)
        self._end = entry.sequence + 1

    def since(self, sequence: int | None, limit: int) -> Events:
        """Returns events from number `sequence` on, oldest first, at most `limit`; None returns the latest `limit`.

        `dropped` counts the events from `sequence` on that the recorder no longer has. A `sequence` beyond the last
        number, for example from an earlier incarnation of the agent, returns no events and the correct `next`.
        """
        end = self._end
        if sequence is None:
            chosen = list(self._ring)[-limit:] if limit > 0 else []
            return {"events": [self._row(entry) for entry in chosen], "next": end, "dropped": 0}
        chosen = list(islice((entry for entry in self._ring if entry.sequence >= sequence), max(0, limit)))
        oldest = self._ring[0].sequence if self._ring else end
        follow = end if sequence >= end else chosen[-1].sequence + 1 if chosen else max(sequence, oldest)
        return {
            "events": [self._row(entry) for entry in chosen],
            "next": follow,
            "dropped": max(0, follow - sequence - len(chosen)) if sequence < end else 0,
        }

    def _row(self, entry: Entry) -> EventRow:
        return {
            "sequence": entry.sequence,
            "at_ns": self._clock.wall_ns(entry.at_ns),
            "agent": self._agent,
            "kind": entry.kind,
            "severity": entry.severity,
            "room": None if entry.room is None else str(entry.room),
            "peer": entry.peer,
            "text": entry.text,
        }
