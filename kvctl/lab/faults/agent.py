"""The shipped agent with faults between it and the world; there is no other way to have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict

from kvctl.lab.faults.arrival_loop import FaultyArrivalLoop
from kvctl.lab.faults.clock import FaultyClock
from kvctl.lab.faults.control_channel import FaultyControlChannel
from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.specification import FAULT_COMMAND, Fault, parse_faults
from kvctl.lab.faults.transport import FaultyTransport
from kvctl_agent.agent import Agent
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.errors import RequestRefused
from kvctl_agent.runtime.arrival_loop import ArrivalLoop
from kvctl_agent.runtime.control_channel import ControlChannel
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.transport.base import Transport


class FaultState(TypedDict):
    """Answer of the admin command `fault`."""

    active: list[str]  # specs of those in force
    struck_total: dict[str, int]  # by kind, since the agent was made


class FaultyAgent(Agent):
    """An agent that can be hurt while it runs, by its owner or through its admin socket.

    Attributes:
        faults: those in force; to be set and cleared from any thread.
    """

    def __init__(self, *, name: str, faults: Sequence[Fault] = (), fault_seed: int = 0, **rest: Any) -> None:
        """As an `Agent`.

        Args:
            faults: in force from the beginning, when its incarnation is minted too.
            fault_seed: with the agent's name it decides what is hit.

        Raises:
            ValueError: one of the faults is none of an agent.
        """
        self.faults = FaultInjector(name, fault_seed)
        for fault in faults:
            self.faults.set(fault)
        super().__init__(name=name, **rest)
        self._admin.add(FAULT_COMMAND, self._fault)

    def _open_clock(self) -> Clock:
        return FaultyClock(self.faults)

    def _open_transport(self) -> Transport:
        return FaultyTransport(super()._open_transport(), self.faults)

    def _open_links(self, kind: Callable[..., ControlChannel] = ControlChannel) -> ControlChannel:
        return super()._open_links(partial(FaultyControlChannel, self.faults))

    def _open_arrivals(self, kind: Callable[..., ArrivalLoop] = ArrivalLoop) -> ArrivalLoop:
        return super()._open_arrivals(partial(FaultyArrivalLoop, self.faults))

    def _fault(self, args: dict[str, Any]) -> FaultState:
        """The admin command."""
        try:
            wanted = parse_faults(args["spec"]) if "spec" in args else ()
            if foreign := [fault.text for fault in wanted if fault.kind.level != "agent"]:
                raise ValueError(f"{', '.join(foreign)}: no agent can do this to itself")
        except ValueError as error:
            raise RequestRefused(ErrorCode.BAD_ARGUMENT, str(error)) from None
        if args.get("clear"):
            self.faults.clear()
        for fault in wanted:
            self.faults.set(fault, args.get("seconds"))
            self.telemetry.recorder.record("fault", f"injected: {fault.text}", "warning")
        return {"active": self.faults.active(), "struck_total": self.faults.counts()}
