"""Applies faults to one rank during one run of a batch and reports their effects.

With faults, a room may fail with a cause that a fault in force explains. The other rooms are verified as usual, and
when all rooms have ended the rank must hold no resources.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.specification import Fault
from kvctl.lab.ranks.content import own_coord, own_side
from kvctl.lab.ranks.messages import FaultReport, Room, Start
from kvctl_agent.agent import Agent
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.runtime.handles import Handle

ABORTED = "given up by --faults abort"
"""Reason given for a room that the fault `abort` aborts."""

_DRAIN_S = 10.0
_POLL_S = 0.005
_FIRST_ROOM_NS = 50_000_000


class _PlannedAbort(NamedTuple):
    handle: Handle
    began_ns: int
    share: float  # delay as a fraction of the usual duration of a room


class Aborts:
    """Aborts a share of the rooms, each room at a random time on one of its ranks.

    All ranks generate the same random numbers for a room, so that exactly one rank aborts the room, without
    communication. The delay is a random fraction of the mean duration of a room on this rank, so that most aborts occur
    while the room is in flight, in any of its states; some come too late and have no effect.
    """

    def __init__(self, start: Start, share: float) -> None:
        """Prepares aborts of the fraction `share` of all rooms, over all ranks together."""
        self._seed = start.seed
        self._share = share
        self._role = start.role
        side, at = own_side(start), own_coord(start)
        self._members = side.pp * side.cp * side.tp
        self._member = (at.pp * side.cp + at.cp) * side.tp + at.tp
        self._planned: dict[int, _PlannedAbort] = {}
        self._began: dict[int, int] = {}
        self._total_ns = self._finished = 0

    def began(self, room: Room, handle: Handle, now_ns: int) -> None:
        """Records that a room is in flight from now on and decides whether, and when, this rank aborts it."""
        if not self._share:
            return
        self._began[room.number] = now_ns
        random = Random(f"{self._seed} abort {room.index}")
        if random.random() >= self._share or random.choice(("prefill", "decode")) != self._role:
            return
        if int(random.random() * self._members) == self._member:
            self._planned[room.number] = _PlannedAbort(handle, now_ns, random.random())

    def ended(self, number: int, now_ns: int) -> None:
        """Records the end of a room, adds its duration to the mean of this rank, and cancels its planned abort."""
        self._planned.pop(number, None)
        began_ns = self._began.pop(number, None)
        if began_ns is not None:
            self._total_ns += now_ns - began_ns
            self._finished += 1

    @property
    def next_ns(self) -> int | None:
        """Time of the next abort; None if none is planned."""
        return min(map(self._due_ns, self._planned.values()), default=None)

    def abort_due(self, now_ns: int) -> None:
        """Aborts the rooms whose planned abort is due."""
        if self._planned:
            for number, planned in list(self._planned.items()):
                if self._due_ns(planned) <= now_ns:
                    del self._planned[number]
                    planned.handle.abort(ABORTED)

    def _due_ns(self, planned: _PlannedAbort) -> int:
        usual_ns = self._total_ns // self._finished if self._finished else _FIRST_ROOM_NS
        return planned.began_ns + round(planned.share * usual_ns)


class BatchFaults:
    """The faults of one rank during one run, both those of its agent and those of the driver of the rooms.

    Attributes:
        aborts: performs the fault `abort`.
    """

    def __init__(self, agent: Agent, start: Start, injector: FaultInjector, faults: Sequence[Fault]) -> None:
        """Sets the faults of level "agent" in the agent's injector, where they are in force until `end`."""
        self.aborts = Aborts(start, sum(fault.share for fault in faults if fault.name == "abort"))
        self._agent = agent
        self._injector = injector
        self._explained = {code for fault in faults for code in fault.kind.explains} - {"ABORTED"}
        self._kinds: dict[int, str] = {}
        self._before = injector.counts()
        for fault in faults:
            if fault.kind.level == "agent":
                injector.set(fault)

    def failed(self, index: int, failure: Failure | None) -> None:
        """Records whether a fault explains the failure of a room.

        Args:
            index: index of the room.
            failure: first cause of the failure.
        """
        if failure is None:
            return
        if failure["code"] == "ABORTED" and failure["text"] == ABORTED:
            self._kinds[index] = "aborted"
        elif failure["code"] in self._explained:
            self._kinds[index] = "fault"

    def end(self, failures: Mapping[int, str]) -> FaultReport:
        """Clears the agent's faults, waits until rooms have released their resources, and reports the faults' effects.

        Args:
            failures: causes of all failed rooms, by room index.
        """
        self._injector.clear()
        fired = {name: count - self._before.get(name, 0) for name, count in self._injector.counts().items()}
        return FaultReport(
            explained=[[index, kind] for index, kind in self._kinds.items() if index in failures],
            struck={name: count for name, count in fired.items() if count},
            left=self._resources_left(),
        )

    def _resources_left(self) -> list[str]:
        """Waits up to `_DRAIN_S` for all resources of rooms to be freed; returns descriptions of those still held."""
        deadline = time.monotonic() + _DRAIN_S
        while (held := self._resources()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return held

    def _resources(self) -> list[str]:
        staging = self._agent.observe.staging()
        ring, buffers, gated = staging["ring"], staging["buffers"], staging["gated"]
        resources = []
        if ring is not None and (ring["used_bytes"] or ring["allocations"]):
            resources.append(f"{ring['used_bytes']} bytes of the ring in {len(ring['allocations'])} allocations")
        if buffers is not None and buffers["pieces_used"]:
            resources.append(f"{buffers['pieces_used']} staging buffers")
        if gated:
            resources.append(f"{len(gated)} parked parts")
        if open_rooms := self._agent.machine.open_rooms:
            resources.append(f"{open_rooms} open rooms")
        return [f"{self._agent.name} still holds {resource}" for resource in resources]
