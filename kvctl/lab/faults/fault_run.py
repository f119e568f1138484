"""One run of a rank under faults: they begin with it and end with it, and what they can explain is no trouble.

A room may fail with a cause that one of the faults in force explains. Everything else is as without them: what the
others received is verified, and when all rooms are over this rank holds nothing any more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from kvctl.lab.faults.aborts import ABORTED
from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.specification import Fault
from kvctl.lab.ranks.bench_messages import FaultReport
from kvctl_agent.agent import Agent
from kvctl_agent.contract.snapshots import Failure

_EMPTY_S = 10.0
_LOOK_S = 0.005


class FaultRun:
    """Faults of any level; those of an agent are in force from the beginning until `end`."""

    def __init__(self, agent: Agent, injected: FaultInjector, faults: Sequence[Fault]) -> None:
        """`injected` are the faults in force in `agent`; those of `faults` that an agent can have are set in it."""
        self._agent = agent
        self._injected = injected
        self._explained = {code for fault in faults for code in fault.kind.explains} - {"ABORTED"}
        self._kinds: dict[int, str] = {}
        self._before = injected.counts()
        for fault in faults:
            if fault.kind.level == "agent":
                injected.set(fault)

    def failed(self, index: int, failure: Failure | None) -> None:
        """A room has failed with this as its first cause."""
        if failure is None:
            return
        if failure["code"] == "ABORTED" and failure["text"] == ABORTED:
            self._kinds[index] = "aborted"
        elif failure["code"] in self._explained:
            self._kinds[index] = "fault"

    def end(self, failures: Mapping[int, str]) -> FaultReport:
        """End the faults and say what they did.

        Args:
            failures: causes of all rooms that failed, by index.
        """
        faults = self._injected
        faults.clear()
        struck = {name: count - self._before.get(name, 0) for name, count in faults.counts().items()}
        return FaultReport(
            explained=[[index, kind] for index, kind in self._kinds.items() if index in failures],
            struck={name: count for name, count in struck.items() if count},
            left=self._left(),
        )

    def _left(self) -> list[str]:
        """What this rank holds of rooms although none is left; waits a little for it to be nothing."""
        deadline = time.monotonic() + _EMPTY_S
        while (held := self._held()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return held

    def _held(self) -> list[str]:
        staging = self._agent.observe.staging()
        ring, buffers, gated = staging["ring"], staging["buffers"], staging["gated"]
        words = []
        if ring is not None and (ring["used_bytes"] or ring["allocations"]):
            words.append(f"{ring['used_bytes']} bytes of the ring in {len(ring['allocations'])} allocations")
        if buffers is not None and buffers["pieces_used"]:
            words.append(f"{buffers['pieces_used']} staging buffers")
        if gated:
            words.append(f"{len(gated)} parked parts")
        if open_rooms := self._agent.observe.statistics().open_rooms:
            words.append(f"{open_rooms} open rooms")
        return [f"{self._agent.name} still holds {what}" for what in words]
