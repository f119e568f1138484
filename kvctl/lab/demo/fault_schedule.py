"""Faults of a live fleet's ranks at scheduled times: kills, pauses, replacements and faults of their agents."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvctl.lab.demo.traffic import Traffic

Kind = Literal["kill", "pause", "replace", "fault"]

# The replacement is started after this share of the freeze, sometimes before the peers declare the rank lost.
_REPLACED_AFTER = 0.2
# Before a freeze, writes are delayed, so that some leave only after the process is resumed. By then other rooms use the
# target pages, unless the decode rank has quarantined them.
_LATE_WRITES, _LATE_S = "slow-lane=200ms", 0.4
_LEAVES_AFTER_S = 2.0  # time that a replaced process runs when it is resumed because the run ends


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """One fault of a schedule.

    Attributes:
        at_s: start, counted from the start of the traffic.
        kind: "kill" restarts the rank later; "pause" resumes it; "replace" pauses the rank (the freeze) and starts
            another process in its place; "fault" sets a fault of the rank's agent.
        spec: for "fault", spec of the agent's fault; for "kill", spec of a fault in force in the restarted process.
        again_s: for "kill", time after which the restarted process is killed again (0: never). For "replace", time for
            which the frozen process is resumed before it is ended (0: it is killed without being resumed).
    """

    at_s: float
    kind: Kind
    rank: str
    seconds: float
    spec: str = ""
    again_s: float = 0.0


class FaultRunner:
    """Executes a schedule in the event loop of the traffic.

    Attributes:
        injected: number of injected faults by kind; faults of agents by their name.
    """

    def __init__(self, traffic: Traffic, faults: Sequence[ScheduledFault]) -> None:
        """Schedules all faults, relative to the current time."""
        self._traffic = traffic
        self._began = time.monotonic()
        self._ended = False
        self.injected: Counter[str] = Counter()
        self._killed: set[str] = set()  # ranks that have been killed and not been started again
        self._now: dict[str, tuple[str, float]] = {}
        for fault in faults:
            self._later(fault.at_s, partial(self._inject, fault))

    @property
    def now(self) -> dict[str, str]:
        """Current fault of each rank, by rank name."""
        now = time.monotonic() - self._began
        return {rank: what for rank, (what, until_s) in self._now.items() if until_s > now}

    def end(self) -> None:
        """Cancels all scheduled faults, resumes paused ranks, restarts ranks that are down, and ends agents' faults."""
        self._ended = True
        for name, rank in self._traffic.fleet.ranks.items():
            if rank.paused:
                self._traffic.resume(name)
            if rank.replaced is not None:
                self._end_replaced(name, _LEAVES_AFTER_S)
            if name in self._killed or not rank.running:
                self._killed.add(name)
                self._restart(name, "", 0.0)
            else:
                self._traffic.fleet.fault(name, "clear")

    def _later(self, seconds: float, action: Callable[[], None], *, always: bool = False) -> None:
        """Schedules an action; unless `always` is set, `end` cancels it."""
        self._traffic.later(seconds, lambda: action() if always or not self._ended else None)

    def _inject(self, fault: ScheduledFault) -> None:
        traffic, name = self._traffic, fault.rank
        rank = traffic.fleet.ranks[name]
        if not rank.running or rank.paused or (fault.kind == "replace" and rank.replaced is not None):
            return  # the rank has not recovered from an earlier fault in the scheduled time
        self._now[name] = (fault.spec or fault.kind, fault.at_s + max(fault.seconds, 1.0))
        if fault.kind == "kill":
            self._kill(name, fault.seconds, fault.spec, fault.again_s)
        elif fault.kind == "pause":
            traffic.pause(name)
            self.injected["pause"] += 1
            self._later(fault.seconds, partial(self._resume, name))
        elif fault.kind == "replace":
            traffic.fault(name, _LATE_WRITES, 2 * _LATE_S)
            self._later(_LATE_S, partial(self._freeze, fault))
        else:
            traffic.fault(name, fault.spec, fault.seconds)
            self.injected[fault.spec.partition("=")[0]] += 1

    def _kill(self, name: str, down_s: float, spec: str, again_s: float) -> None:
        self._traffic.kill(name)
        self._killed.add(name)
        self.injected["kill"] += 1
        self._later(down_s, partial(self._restart, name, spec, again_s))

    def _restart(self, name: str, spec: str, again_s: float) -> None:
        if name not in self._killed:  # `end` has restarted it
            return
        if self._traffic.fleet.ranks[name].running:  # its exit has not been seen yet
            self._later(0.05, partial(self._restart, name, spec, again_s), always=True)
            return
        self._killed.discard(name)
        self._traffic.restart(name, spec)
        if spec:
            self.injected["clock-jump"] += 1
        if again_s:
            self._later(again_s, partial(self._kill_again, name))

    def _kill_again(self, name: str) -> None:
        rank = self._traffic.fleet.ranks[name]
        if rank.running and not rank.paused:
            self._kill(name, 0.1, "", 0.0)

    def _freeze(self, fault: ScheduledFault) -> None:
        rank = self._traffic.fleet.ranks[fault.rank]
        if rank.running and not rank.paused:
            self._traffic.pause(fault.rank)
            self.injected["replace"] += 1
            self._later(fault.seconds * _REPLACED_AFTER, partial(self._replace, fault))

    def _replace(self, fault: ScheduledFault) -> None:
        if not self._traffic.fleet.ranks[fault.rank].paused:
            return
        self._traffic.replace(fault.rank)
        frozen_s = fault.seconds * (1 - _REPLACED_AFTER)
        self._later(frozen_s, partial(self._end_replaced, fault.rank, fault.again_s))

    def _end_replaced(self, name: str, resumed_s: float) -> None:
        """Resumes a replaced process and ends it after `resumed_s`; if that is 0, kills it without resuming it."""
        if resumed_s:
            self._traffic.resume_replaced(name)
            self._later(resumed_s, partial(self._traffic.end_replaced, name, kill=False), always=True)
        else:
            self._traffic.end_replaced(name, kill=True)

    def _resume(self, name: str) -> None:
        if self._traffic.fleet.ranks[name].paused:
            self._traffic.resume(name)
