"""Flight recorder: a bounded log of the agent's latest events, with consecutive numbers.

The numbers tell a client that polls which events are new, and how many were dropped between two requests.
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
    """Bounded log of events; any thread may call any method."""

    def __init__(self, clock: Clock, agent_name: str, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity of a flight recorder must be at least 1, got {capacity}")
        self._clock = clock
        self._agent = agent_name
        # Taken by writers only, to keep the entries in the order of their numbers; readers copy without it.
        self._writers = threading.Lock()
        self._next = 0
        self._ring: deque[_Entry] = deque(maxlen=capacity)

    def record(
        self,
        kind: str,
        text: str,
        severity: Severity = "info",
        room: int | None = None,
        peer: str | None = None,
        at_ns: int | None = None,
    ) -> None:
        """Appends one event; a full recorder drops its oldest event.

        Args:
            kind: category to filter by: room, peer, ring, admin ...
            text: one line that describes the event.
            room: number of the room that the event is about, if any.
            peer: agent name of the peer that the event is about, if any.
            at_ns: monotonic time of the event; None: now.
        """
        if at_ns is None:
            at_ns = self._clock.now_ns()
        with self._writers:
            self._ring.append(_Entry(self._next, at_ns, kind, severity, room, peer, text))
            self._next += 1

    def since(self, sequence: int | None, limit: int) -> Events:
        """Returns events from number `sequence` on, oldest first, at most `limit`; None returns the latest `limit`.

        `dropped` counts the events from `sequence` on that the recorder no longer has. A `sequence` beyond the last
        number, for example from an earlier incarnation of the agent, returns no events and the correct `next`.
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
        # If a writer appends during the iteration, it raises RuntimeError and the copy starts over.
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
