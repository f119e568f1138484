"""Which fault hits whom, when, and for how long: drawn once, from a seed, before anything is started.

The same seed, time and ranks give the same schedule. Deaths and pauses never take more at once than leaves a prefill
instance and a decode dp group that can serve; where there is only one of either, its ranks go down one at a time.
While a process that was replaced is there, nothing else goes down in its instance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, log
from typing import Literal

from kvctl.lab.ranks.bench_messages import PlannedRank

Kind = Literal["kill", "pause", "replace", "fault", "noise"]

_GAP_S = 2.5  # between two strikes, on average
_QUIET_S = 2.0  # nothing happens at first: rooms have to flow before they can be hurt
_RECOVERY_S = 6.0  # after a death or a pause its group is left alone for so long
_WEIGHTS: dict[Kind, float] = {"kill": 3, "pause": 3, "replace": 1, "fault": 6, "noise": 2}
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
_SHORTEST_FREEZE_S, _LONGEST_FREEZE_S = 12.0, 30.0
_SHORTEST_RETURN_S, _LONGEST_RETURN_S = 0.5, 8.0
_DEAD_FROZEN = 0.25
_SHORTEST_DEATH_S, _LONGEST_DEATH_S = 0.1, 5.0
_KILLED_AGAIN = 0.15
_CLOCK_WRONG = 0.2
_CLOCKS = ("clock-jump=-1h", "clock-jump=-1000h", "clock-jump=1h")

Draw = random.Random
_BOTH = ("prefill", "decode")
# Name, the roles at which it can strike, and its value.
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
    ("clock-jump", _BOTH, lambda draw: draw.choice(["-1h", "1h", "-30s", "30s"])),
)


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """One fault.

    Attributes:
        at_s: from the beginning of the traffic.
        seconds: how long the rank is down, paused or frozen, or the fault in force; 0 for noise.
        spec: of an in-process fault; of a killed rank's next life.
        again_s: of a kill: the next life is killed, too, so long after it began; 0: it is not. Of a replace: the frozen
            process goes on for so long; 0: it is killed instead.
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


def replaceable(rank: PlannedRank) -> bool:
    """Whether a second process can take a rank's place while the first one is there: one without the registry."""
    return rank["role"] == "prefill" and rank["unique"] > 0


def draw_schedule(seed: int, seconds: float, ranks: Mapping[str, PlannedRank]) -> list[ScheduledFault]:
    """Strikes in order of time, all of them over a little before the end.

    Args:
        seconds: how long there is traffic.
        ranks: by name.
    """
    draw = Draw(f"schedule {seed}")
    groups = {name: _group(rank) for name, rank in ranks.items()}
    strikes: list[ScheduledFault] = []
    outages: list[_Outage] = []
    at_s = _QUIET_S
    while (at_s := round(at_s + draw.expovariate(1 / _GAP_S), 2)) < seconds:
        kind = draw.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        able = [name for name, rank in sorted(ranks.items()) if kind != "replace" or replaceable(rank)]
        if not able:
            continue
        name = draw.choice(able)
        # Everything is drawn whether it is used or not, so that a strike that is left out changes no later one.
        strike = _strike(draw, at_s, kind, name, ranks[name]["role"])
        if kind in ("kill", "pause", "replace"):
            outages = [outage for outage in outages if outage.until_s > at_s]
            alone = kind == "replace"
            if not _bearable(groups, outages, name, alone):
                continue
            until_s = at_s + strike.seconds + strike.again_s + _RECOVERY_S
            outages.append(_Outage(groups[name], name, until_s, alone))
        if strike.at_s + strike.seconds + strike.again_s < seconds:
            strikes.append(strike)
    return strikes


def _strike(draw: Draw, at_s: float, kind: Kind, name: str, role: str) -> ScheduledFault:
    if kind == "kill":
        seconds = _between(draw, _SHORTEST_DEATH_S, _LONGEST_DEATH_S)
        spec = draw.choice(_CLOCKS) if draw.random() < _CLOCK_WRONG else ""
        again_s = _between(draw, 0.2, 3.0) if draw.random() < _KILLED_AGAIN else 0.0
        return ScheduledFault(at_s, kind, name, seconds, spec, again_s)
    if kind == "pause":
        return ScheduledFault(at_s, kind, name, _between(draw, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S))
    if kind == "replace":
        again_s = _between(draw, _SHORTEST_RETURN_S, _LONGEST_RETURN_S)
        seconds = _between(draw, _SHORTEST_FREEZE_S, _LONGEST_FREEZE_S)
        return ScheduledFault(at_s, kind, name, seconds, again_s=0.0 if draw.random() < _DEAD_FROZEN else again_s)
    if kind == "noise":
        return ScheduledFault(at_s, kind, name, 0.0)
    fault, _, value = draw.choice([each for each in _FAULTS if role in each[1]])
    return ScheduledFault(at_s, kind, name, _between(draw, 0.5, 8.0), f"{fault}={value(draw)}")


def _bearable(groups: Mapping[str, tuple[str, int]], outages: list[_Outage], name: str, alone: bool) -> bool:
    """Whether somebody can still serve when this rank goes down as well, and nothing forbids it in its group."""
    group = groups[name]
    if any(outage.rank == name or (outage.group == group and (alone or outage.alone)) for outage in outages):
        return False
    siblings = {other for other in groups.values() if other[0] == group[0]}
    down = {outage.group for outage in outages if outage.group[0] == group[0]}
    if len(siblings) == 1:
        return not down
    return len(down | {group}) < len(siblings)


def _group(rank: PlannedRank) -> tuple[str, int]:
    """What has to be whole to serve: a prefill instance, a decode dp group."""
    return ("prefill", rank["instance"]) if rank["role"] == "prefill" else ("decode", rank["dp"])


def _between(draw: Draw, low: float, high: float) -> float:
    """Log-uniform: short times as often as long ones."""
    return round(low * exp(draw.random() * log(high / low)), 2)


def _percent(draw: Draw, low: int, high: int) -> str:
    return f"{draw.randint(low, high)}%"


def _milliseconds(draw: Draw, low: int, high: int) -> str:
    return f"{draw.randint(low, high)}ms"
