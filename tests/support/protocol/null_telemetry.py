"""Telemetry that keeps nothing, for the machines of the explorer: they write to it and never read it."""

from __future__ import annotations

from typing import Any


class NullRecord:
    """A room's record that keeps nothing; all are one object, also after pickling."""

    planned = sent = landed = scattered = parked = 0

    def __setattr__(self, name: str, value: Any) -> None: ...

    def _discard(self, *_: Any, **__: Any) -> None: ...

    part = state = event = finish = fail = expect = join = leave = _discard

    def __reduce__(self) -> str:
        return "NULL_RECORD"


NULL_RECORD = NullRecord()


class NullTelemetry:
    """Telemetry of a machine, of which only the wall clock works: `clock_offset_ns` ahead of the monotonic clock."""

    def __init__(self, clock_offset_ns: int = 0) -> None:
        self.metrics = self.recorder = self.transfers = self.clock = self
        self._clock_offset_ns = clock_offset_ns

    def wall_ns(self, moment_ns: int) -> int:
        return moment_ns + self._clock_offset_ns

    def open(self, *_: Any) -> NullRecord:
        return NULL_RECORD

    def _discard(self, *_: Any, **__: Any) -> None: ...

    add = observe = record = part = finish = begin = arrived = cancel = _discard
