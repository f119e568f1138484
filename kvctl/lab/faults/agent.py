"""Builds an agent whose clock, transport, control channel and arrivals inject faults."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import Any, TypedDict

from kvctl.lab.faults.control_channel import FaultyControlChannel
from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.specification import FAULT_COMMAND, parse_faults
from kvctl.lab.faults.transport import FaultyTransport
from kvctl_agent.agent import Agent
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.errors import RequestRefused
from kvctl_agent.parts import PartFactories
from kvctl_agent.protocol.events import Check, Scatter
from kvctl_agent.runtime.arrivals import Arrivals
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.transport.base import Transport
from kvctl_agent.transport.registry import open_transport


class FaultState(TypedDict):
    """Answer to the admin command `fault`."""

    active: list[str]  # specs of the faults in force
    struck_total: dict[str, int]  # by kind, since the agent was built


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
    """Builds an agent with fault injection, without starting it; its admin socket also serves the command `fault`.

    Args:
        faults: the faults in force, which may change at any time. Those set before this call affect the construction
            of the agent as well, such as its incarnation.
        arguments: keyword arguments of `Agent`.
    """

    def transport(*opened: Any) -> Transport:
        return FaultyTransport(open_transport(*opened), faults)

    factories = PartFactories(
        clock=partial(FaultyClock, faults),
        transport=transport,
        control_channel=partial(FaultyControlChannel, faults),
        arrivals=partial(FaultyArrivals, faults),
    )
    agent = Agent(**arguments, factories=factories)
    agent.admin.add(FAULT_COMMAND, partial(_change, faults, agent.telemetry.recorder))
    return agent


def _change(faults: FaultInjector, recorder: FlightRecorder, args: dict[str, Any]) -> FaultState:
    """Handles the admin command `fault`: clears faults if requested, then sets those of the given specs.

    Raises:
        RequestRefused: a spec is invalid, or an agent cannot inject the fault.
    """
    try:
        wanted = parse_faults(args["spec"]) if "spec" in args else ()
        if foreign := [fault.text for fault in wanted if fault.kind.level != "agent"]:
            raise ValueError(f"{', '.join(foreign)}: an agent cannot inject this fault into itself")
    except ValueError as error:
        raise RequestRefused(ErrorCode.BAD_ARGUMENT, str(error)) from None
    if args.get("clear"):
        faults.clear()
    for fault in wanted:
        faults.set(fault, args.get("seconds"))
        recorder.record("fault", f"injected: {fault.text}", "warning")
    return {"active": faults.active(), "struck_total": faults.counts()}
