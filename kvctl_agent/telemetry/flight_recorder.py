"""The flight recorder: the last few thousand things that happened to this agent, numbered without gaps.

Numbers let a reader that comes back ask for what is new and be told how much it missed, instead of being shown an
incomplete story as a complete one.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Literal, NamedTuple

from kvctl_agent.contract.snapshots import EventRow, Events
from kvctl_agent.telemetry.clock import Clock

Severity = Literal["debug", "info", "warning", "error"]


class _Entry(NamedTuple):
    sequence: int
    at_ns: int  # monotonic
    kind: str
    severity: Severity
    room: int | None
    peer: str | None
    text: str


class FlightRecorder:
    """Bounded ring of events; any thread may record, any thread may read."""

    def __init__(self, clock: Clock, agent_name: str, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a flight recorder needs room for at least one event, got {capacity}")
        self._clock = clock
        self._agent = agent_name
        # Taken by writers only, so that numbers and places agree; a reader copies the ring without it.
        self._writers = threading.Lock()
        self._next = 0
        self._ring: deque[_Entry] = deque(maxlen=capacity)

    def record(
        self, kind: str, text: str, severity: Severity = "info", room: int | None = None, peer: str | None = None
    ) -> None:
        """Appends one event; the oldest makes room.

        Args:
            kind: a short word to filter by: room, peer, ring, admin ...
            text: what happened, to what; one line.
            room: the room's number where it concerns one.
            peer: the peer's agent name where it concerns one.
        """
        now = self._clock.now_ns()
        with self._writers:
            self._ring.append(_Entry(self._next, now, kind, severity, room, peer, text))
            self._next += 1

    def since(self, sequence: int | None, limit: int) -> Events:
        """Events numbered `sequence` and up, oldest first, at most `limit`; with None the latest `limit`.

        `dropped` counts events from `sequence` on that the ring had already lost. A `sequence` from another life
        of the agent (above what was ever given out) answers nothing and the right `next`.
        """
        ring = self._copy()
        end = ring[-1].sequence + 1 if ring else 0
        oldest = ring[0].sequence if ring else 0
        if sequence is None:
            chosen, dropped = ring[-limit:] if limit > 0 else [], 0
        else:
            first = max(sequence, oldest)
            chosen, dropped = ring[first - oldest :][:limit], max(0, oldest - sequence)
        if sequence is not None and sequence < end:
            follow = chosen[-1].sequence + 1 if chosen else max(sequence, oldest)
        else:
            follow = end
        return {"events": [self._row(entry) for entry in chosen], "next": follow, "dropped": dropped}

    def _copy(self) -> list[_Entry]:
        # A writer may append while we iterate; the interpreter notices and we start over.
        while True:
            try:
                return list(self._ring)
            except RuntimeError:
                continue

    def _row(self, entry: _Entry) -> EventRow:
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
