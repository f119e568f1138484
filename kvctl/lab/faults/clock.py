"""A wall clock that can be set back or forth while everything runs."""

from __future__ import annotations

from kvctl.lab.faults.injector import FaultInjector
from kvctl_agent.telemetry.clock import Clock


class FaultyClock(Clock):
    """Monotonic time as it is; wall time as far off as `clock-jump` says."""

    def __init__(self, faults: FaultInjector) -> None:
        super().__init__()
        self._faults = faults

    def wall_ns(self, moment_ns: int) -> int:
        return super().wall_ns(moment_ns) + self._faults.ns("clock-jump")
