"""An arrival loop whose copies from the ring come late, as from a stream that does not go on."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from kvctl.lab.faults.injector import FaultInjector
from kvctl_agent.protocol.events import Check, Scatter
from kvctl_agent.runtime.arrival_loop import ArrivalLoop


class FaultyArrivalLoop(ArrivalLoop):
    """Arrivals under `faults`: what has landed is heard of at once, and waits for its copy; all else goes on."""

    def __init__(self, faults: FaultInjector, *loop: Any) -> None:
        super().__init__(*loop)
        self._faults = faults
        self._held: deque[tuple[int, Scatter]] = deque()  # filled by the control loop, emptied here

    def put(self, order: Scatter | Check) -> None:
        pause_ns = self._faults.ns("slow-scatter")
        if pause_ns and isinstance(order, Scatter):
            self._faults.count("slow-scatter")
            self._held.append((time.monotonic_ns() + pause_ns, order))
        else:
            super().put(order)

    def _hear(self) -> bool:
        while self._held and (self._held[0][0] <= time.monotonic_ns() or not self._faults.ns("slow-scatter")):
            super().put(self._held.popleft()[1])
        return super()._hear()
