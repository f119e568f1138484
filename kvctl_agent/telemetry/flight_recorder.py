"""Flight recorder: events of an agent for people to read, with consecutive numbers.

The numbers tell a client that polls which events are new, and how many were dropped between two requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.records import Severity


class Entry(NamedTuple):
    """One event; `at_ns` is monotonic."""

    sequence: int
    at_ns: int
    kind: str
    severity: Severity
    room: int | None
    peer: str | None
    text: str


class FlightRecorder:
    """Numbers events and passes them on to `write`; any thread may call `record`."""

    def __init__(self, clock: Clock, write: Callable[[Entry], None]) -> None:
        self._clock = clock
        self._write = write
        # Keeps the entries in the order of their numbers. A signal handler may interrupt the thread that has it.
        self._numbering = threading.RLock()
        self._next = 0

    def record(
        self,
        kind: str,
        text: str,
        severity: Severity = "info",
        room: int | None = None,
        peer: str | None = None,
        at_ns: int | None = None,
    ) -> None:
        """Records one event.

        Args:
            kind: category to filter by: room, peer, ring, admin ...
            text: one line that describes the event.
            room: number of the room that the event is about, if any.
            peer: agent name of the peer that the event is about, if any.
            at_ns: monotonic time of the event; None: now.
        """
        if at_ns is None:
            at_ns = self._clock.now_ns()
        with self._numbering:
            number = self._next
            self._next += 1
            self._write(Entry(number, at_ns, kind, severity, room, peer, text))
