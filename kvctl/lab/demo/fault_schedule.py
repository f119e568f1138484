"""Random faults of a soak run: a schedule generated from a seed before the fleet starts, and its execution.

The same seed, duration and ranks give the same schedule. At any time at least one prefill instance and one decode dp
group are free of kills and pauses; if the fleet has only one of either, only one of its ranks is down at a time. While
a rank is being replaced, no other rank of its instance is killed or paused.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log
from typing import Literal, NamedTuple

from kvctl.lab.demo.fleet import replaceable
from kvctl.lab.demo.traffic import Traffic
from kvctl.lab.ranks.plan import PlannedRank

Kind = Literal["kill", "pause", "replace", "fault"]

_MEAN_GAP_S = 2.5  # between two faults
_QUIET_S = 2.0  # without faults at the start, until rooms flow
_RECOVERY_S = 6.0  # without another kill or pause in the same group
_WEIGHTS: dict[Kind, float] = {"kill": 3, "pause": 3, "replace": 1, "fault": 6}
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_SHORTEST_FREEZE_S, _LONGEST_FREEZE_S = 12.0, 30.0
_SHORTEST_RETURN_S, _LONGEST_RETURN_S = 0.5, 8.0
_KILLED_WHILE_FROZEN = 0.25  # share of replaced processes that are killed instead of resumed
_SHORTEST_DOWN_S, _LONGEST_DOWN_S = 0.1, 5.0
_KILLED_AGAIN = 0.15
_CLOCK_WRONG = 0.2
_CLOCKS = ("clock-jump=-1h", "clock-jump=-1000h", "clock-jump=1h")
# The replacement is started after this share of the freeze, sometimes before the peers declare the rank lost.
_REPLACED_AFTER = 0.2
# Before a freeze, writes are delayed, so that some leave only after the process is resumed. By then other rooms use the
# target pages, unless the decode rank has quarantined them.
_LATE_WRITES, _LATE_S = "slow-lane=200ms", 0.4
_LEAVES_AFTER_S = 2.0  # time that a replaced process runs when it is resumed because the run ends

Draw = random.Random
_BOTH = ("prefill", "decode")
# Name, roles to which it applies, and its value.
_FAULTS: tuple[tuple[str, tuple[str, ...], Callable[[Draw], str]], ...] = (
    ("control-loss", _BOTH, lambda draw: _percent(draw, 2, 20)),
    ("control-delay", _BOTH, lambda draw: _milliseconds(draw, 1, 200)),
    ("control-dup", _BOTH, lambda draw: _percent(draw, 5, 30)),
    ("control-reorder", _BOTH, lambda draw: _percent(draw, 5, 30)),
    ("control-truncate", _BOTH, lambda draw: _percent(draw, 1, 10)),
    ("control-garbage", _BOTH, lambda draw: _percent(draw, 1, 10)),
    ("notify-loss", ("decode",), lambda draw: _percent(draw, 5, 50)),
    ("notify-dup", ("decode",), lambda draw: _percent(draw, 5, 50)),
    ("slow-reader", ("decode",), lambda draw: _milliseconds(draw, 1, 100)),
    ("write-error", ("prefill",), lambda draw: _percent(draw, 1, 5)),
    ("write-doubt", ("prefill",), lambda draw: _percent(draw, 1, 5)),
    ("slow-writer", ("prefill",), lambda draw: _milliseconds(draw, 1, 50)),
    ("preempt", _BOTH, lambda draw: _percent(draw, 20, 80)),
    ("clock-jump", _BOTH, lambda draw: draw.choice(["-1h", "1h", "-30s", "30s"])),
)


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """One fault of a schedule.

    Attributes:
        at_s: start, counted from the start of the traffic.
        kind: "kill" restarts the rank later; "pause" resumes it; "replace" pauses the rank (the freeze) and starts
            another process in its place; "fault" sets a fault of the rank's agent.
        rank: name of the rank.
        seconds: duration of the outage, pause, freeze or agent fault.
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


@dataclass(frozen=True, slots=True)
class _Outage:
    group: tuple[str, int]
    rank: str
    until_s: float
    alone: bool


def draw_schedule(seed: int, seconds: float, ranks: Mapping[str, PlannedRank]) -> list[ScheduledFault]:
    """Generates the faults of a run, in order of time; all faults end before the run does.

    Args:
        seconds: duration of the traffic.
        ranks: the planned ranks by name.
    """
    draw = Draw(f"schedule {seed}")
    groups = {name: _group(rank) for name, rank in ranks.items()}
    faults: list[ScheduledFault] = []
    outages: list[_Outage] = []
    at_s = _QUIET_S
    while (at_s := round(at_s + draw.expovariate(1 / _MEAN_GAP_S), 2)) < seconds:
        kind = draw.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        able = [name for name, rank in sorted(ranks.items()) if kind != "replace" or replaceable(rank)]
        if not able:
            continue
        name = draw.choice(able)
        # All random numbers of a fault are drawn even if the fault is omitted, so that later faults do not change.
        fault = _draw_fault(draw, at_s, kind, name, ranks[name]["role"])
        if kind != "fault":
            outages = [outage for outage in outages if outage.until_s > at_s]
            alone = kind == "replace"
            if not _can_go_down(groups, outages, name, alone):
                continue
            until_s = at_s + fault.seconds + fault.again_s + _RECOVERY_S
            outages.append(_Outage(groups[name], name, until_s, alone))
        if fault.at_s + fault.seconds + fault.again_s < seconds:
            faults.append(fault)
    return faults


def _draw_fault(draw: Draw, at_s: float, kind: Kind, name: str, role: str) -> ScheduledFault:
    if kind == "kill":
        seconds = _between(draw, _SHORTEST_DOWN_S, _LONGEST_DOWN_S)
        spec = draw.choice(_CLOCKS) if draw.random() < _CLOCK_WRONG else ""
        again_s = _between(draw, 0.2, 3.0) if draw.random() < _KILLED_AGAIN else 0.0
        return ScheduledFault(at_s, kind, name, seconds, spec, again_s)
    if kind == "pause":
        return ScheduledFault(at_s, kind, name, _between(draw, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S))
    if kind == "replace":
        again_s = _between(draw, _SHORTEST_RETURN_S, _LONGEST_RETURN_S)
        seconds = _between(draw, _SHORTEST_FREEZE_S, _LONGEST_FREEZE_S)
        killed = draw.random() < _KILLED_WHILE_FROZEN
        return ScheduledFault(at_s, kind, name, seconds, again_s=0.0 if killed else again_s)
    fault, _, value = draw.choice([each for each in _FAULTS if role in each[1]])
    return ScheduledFault(at_s, kind, name, _between(draw, 0.5, 8.0), f"{fault}={value(draw)}")


def _can_go_down(groups: Mapping[str, tuple[str, int]], outages: list[_Outage], name: str, alone: bool) -> bool:
    """Whether a rank may be killed, paused or replaced now, so that the fleet can still serve.

    Args:
        groups: group of each rank, by name.
        outages: ranks that are down now.
        name: the rank.
        alone: whether no other rank of its group may be down at the same time.
    """
    group = groups[name]
    if any(outage.rank == name or (outage.group == group and (alone or outage.alone)) for outage in outages):
        return False
    siblings = {other for other in groups.values() if other[0] == group[0]}
    down = {outage.group for outage in outages if outage.group[0] == group[0]}
    if len(siblings) == 1:
        return not down
    return len(down | {group}) < len(siblings)


def _group(rank: PlannedRank) -> tuple[str, int]:
    """Returns the group of ranks that can serve only together: a prefill instance or a decode dp group."""
    return ("prefill", rank["instance"]) if rank["role"] == "prefill" else ("decode", rank["dp"])


def _between(draw: Draw, low: float, high: float) -> float:
    """Returns a log-uniform random number between `low` and `high`."""
    return round(low * exp(draw.random() * log(high / low)), 2)


def _percent(draw: Draw, low: int, high: int) -> str:
    return f"{draw.randint(low, high)}%"


def _milliseconds(draw: Draw, low: int, high: int) -> str:
    return f"{draw.randint(low, high)}ms"


class Restart(NamedTuple):
    """Recovery time of a restarted rank.

    Attributes:
        served_s: seconds from the start of the process until its first room succeeded; None: it was killed before.
    """

    rank: str
    served_s: float | None


class FaultRunner:
    """Executes a schedule in the event loop of the traffic.

    Attributes:
        injected: number of injected faults by kind; faults of agents by their name.
        restarts: recovery times of the restarted processes that have served a room or were killed before.
        now: current fault of each rank and its end, in seconds from the start of the traffic, by rank name.
    """

    def __init__(self, traffic: Traffic, faults: Sequence[ScheduledFault]) -> None:
        """Schedules all faults, relative to the current time."""
        self._traffic = traffic
        self._began = time.monotonic()
        self._ended = False
        self.injected: Counter[str] = Counter()
        self.restarts: list[Restart] = []
        self._killed: set[str] = set()  # ranks that have been killed and not been started again
        self._restarting: dict[str, int] = {}  # ranks whose new process has not served yet, and its start
        self.now: dict[str, tuple[str, float]] = {}
        for fault in faults:
            self._later(fault.at_s, partial(self._inject, fault))

    def turn(self) -> None:
        """Updates `now` and `restarts`; called once per turn of the traffic's event loop."""
        now = time.monotonic() - self._began
        self.now = {rank: what for rank, what in self.now.items() if what[1] > now}
        for name, since_ns in list(self._restarting.items()):
            served_ns = self._traffic.first_success_ns.get(name, 0)
            ready_ns = self._traffic.fleet.ranks[name].serving_ns
            if ready_ns and served_ns > since_ns:
                del self._restarting[name]
                self.restarts.append(Restart(name, (served_ns - since_ns) / 1e9))

    @property
    def recovered(self) -> bool:
        """Whether every process that took the place of a killed or paused one has served a room."""
        return not self._killed and not self._restarting

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
        self.now[name] = (fault.spec or fault.kind, fault.at_s + max(fault.seconds, 1.0))
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
        self._note_cut_short(name)
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
        self._start(name, spec)
        if spec:
            self.injected["clock-jump"] += 1
        if again_s:
            self._later(again_s, partial(self._kill_again, name))

    def _kill_again(self, name: str) -> None:
        rank = self._traffic.fleet.ranks[name]
        if rank.running and not rank.paused:
            self._kill(name, 0.1, "", 0.0)

    def _start(self, name: str, spec: str) -> None:
        self._killed.discard(name)
        self._traffic.restart(name, spec)
        self._restarting[name] = time.monotonic_ns()

    def _freeze(self, fault: ScheduledFault) -> None:
        rank = self._traffic.fleet.ranks[fault.rank]
        if rank.running and not rank.paused:
            self._traffic.pause(fault.rank)
            self.injected["replace"] += 1
            self._later(fault.seconds * _REPLACED_AFTER, partial(self._replace, fault))

    def _replace(self, fault: ScheduledFault) -> None:
        if not self._traffic.fleet.ranks[fault.rank].paused:
            return
        self._note_cut_short(fault.rank)
        self._traffic.replace(fault.rank)
        self._restarting[fault.rank] = time.monotonic_ns()
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

    def _note_cut_short(self, name: str) -> None:
        """Adds an entry to `restarts` if the rank's process is killed before it has served a room."""
        if self._restarting.pop(name, None) is not None:
            self.restarts.append(Restart(name, None))
