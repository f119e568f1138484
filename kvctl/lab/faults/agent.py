"""Builds an agent whose clock, transport, control channel and arrivals inject faults."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import Any, cast

from kvctl.lab.faults.control_channel import FaultyControlChannel
from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.transport import FaultyTransport
from kvctl_agent.agent import Agent
from kvctl_agent.parts import PartFactories
from kvctl_agent.protocol.events import Check, Scatter
from kvctl_agent.runtime.arrivals import Arrivals
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.transport.base import Transport
from kvctl_agent.transport.registry import open_transport


class FaultyClock(Clock):
    """Clock whose wall time is shifted by the fault `clock-jump`; its monotonic time is correct."""

    def __init__(self, faults: FaultInjector) -> None:
        super().__init__()
        self._faults = faults

    def wall_ns(self, moment_ns: int) -> int:
        return super().wall_ns(moment_ns) + self._faults.ns("clock-jump")


class FaultyArrivals(Arrivals):
    """Arrivals that delays the copies from the staging ring to pages by the fault `slow-scatter`."""

    def __init__(self, faults: FaultInjector, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._faults = faults
        self._delayed: deque[tuple[int, Scatter]] = deque()

    def put(self, order: Scatter | Check) -> None:
        pause_ns = self._faults.ns("slow-scatter")
        if pause_ns and isinstance(order, Scatter):
            self._faults.count("slow-scatter")
            self._delayed.append((time.monotonic_ns() + pause_ns, order))
        else:
            super().put(order)

    def _poll_arrivals(self) -> bool:
        while self._delayed and (self._delayed[0][0] <= time.monotonic_ns() or not self._faults.ns("slow-scatter")):
            super().put(self._delayed.popleft()[1])
        return super()._poll_arrivals()


def faulty_agent(faults: FaultInjector, **arguments: Any) -> Agent:
    """Builds an agent with fault injection, without starting it.

    Args:
        faults: the faults in force, which may change at any time. Those set before this call affect the construction
            of the agent as well, such as its incarnation.
    """

    def transport(*opened: Any) -> Transport:
        return cast(Transport, FaultyTransport(open_transport(*opened), faults))

    factories = PartFactories(
        clock=partial(FaultyClock, faults),
        transport=transport,
        control_channel=partial(FaultyControlChannel, faults),
        arrivals=partial(FaultyArrivals, faults),
    )
    return Agent(**arguments, factories=factories)
