"""Counts those who were not let in, and tells of them once a minute: they must not fill the flight recorder."""

from __future__ import annotations

import threading
import time

from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.telemetry.metrics import Metrics

_TELL_EVERY_NS = 60_000_000_000


class RejectedKeys:
    """What a gatekeeper tells of refusals; either part may be missing."""

    def __init__(self, metrics: Metrics | None, recorder: FlightRecorder | None) -> None:
        self._metrics = metrics
        self._recorder = recorder
        self._told_ns = -_TELL_EVERY_NS
        self._lock = threading.Lock()

    def refused(self, text: str) -> None:
        """One connection was refused."""
        if self._metrics is not None:
            self._metrics.add("kvctl_connections_refused_total", 1)
        now = time.monotonic_ns()
        with self._lock:
            if now - self._told_ns < _TELL_EVERY_NS:
                return
            self._told_ns = now
        if self._recorder is not None:
            self._recorder.record("security", text, "warning")
