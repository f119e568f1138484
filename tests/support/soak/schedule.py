"""Random faults of a soak run, generated from a seed before the fleet starts.

The same seed, duration and ranks give the same schedule. At any time at least one prefill instance and one decode dp
group are free of kills and pauses; if the fleet has only one of either, only one of its ranks is down at a time. While
a rank is being replaced, no other rank of its instance is killed or paused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, log

from kvctl.lab.demo.fault_schedule import Kind, ScheduledFault
from kvctl.lab.demo.fleet import replaceable
from kvctl.lab.ranks.plan import PlannedRank

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
