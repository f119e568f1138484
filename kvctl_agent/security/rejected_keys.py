"""Counts refused connections, and records at most one per minute in the flight recorder so as not to fill it."""

from __future__ import annotations

import threading
import time

from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.telemetry.metrics import Metrics

_REPORT_INTERVAL_NS = 60_000_000_000


class RejectedKeys:
    """Receives the refusals of an authenticator; metrics and flight recorder are both optional."""

    def __init__(self, metrics: Metrics | None, recorder: FlightRecorder | None) -> None:
        self._metrics = metrics
        self._recorder = recorder
        self._reported_ns = -_REPORT_INTERVAL_NS
        self._lock = threading.Lock()

    def refused(self, text: str) -> None:
        """Counts one refused connection; `text` describes it."""
        if self._metrics is not None:
            self._metrics.add("kvctl_connections_refused_total", 1)
        now = time.monotonic_ns()
        with self._lock:
            if now - self._reported_ns < _REPORT_INTERVAL_NS:
                return
            self._reported_ns = now
        if self._recorder is not None:
            self._recorder.record("security", text, "warning")
