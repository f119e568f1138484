"""Which fault hits whom, when, and for how long: drawn once, from a seed, before anything is started.

The same seed, time and ranks give the same schedule. Deaths and pauses never take more at once than leaves a prefill
instance and a decode dp group that can serve; where there is only one of either, its ranks go down one at a time.
While a process that was replaced is there, nothing else goes down in its instance.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log
from typing import Literal, NamedTuple

from kvctl.lab.demo.fleet import replaceable
from kvctl.lab.demo.socket_noise import SocketNoise
from kvctl.lab.demo.traffic import Traffic
from kvctl.lab.ranks.plan import PlannedRank

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


# Of the time that a rank is frozen: then its replacement is started, sometimes before the others take it for lost.
_REPLACED_AFTER = 0.2
# Writes that a process has posted, and that leave once it goes on, when others have its pages unless those are kept.
_LATE_WRITES, _LATE_S = "slow-lane=200ms", 0.4
_LEAVES_AFTER_S = 2.0  # a replaced process that goes on because the run ends


class Restart(NamedTuple):
    """How long a new life took, in seconds since its process was started; None: it was over before that."""

    rank: str
    met_s: float | None
    served_s: float | None


class FaultRunner:
    """Strikes while traffic runs.

    Attributes:
        injected: by kind; of in-process faults by the fault's name.
        restarts: lives that have come so far that they served, or that have ended.
    """

    def __init__(self, traffic: Traffic, strikes: Sequence[ScheduledFault], seed: int) -> None:
        """Time begins now."""
        self._traffic = traffic
        self._began = time.monotonic()
        self._order = itertools.count()
        self._due = [(strike.at_s, next(self._order), partial(self._strike, strike)) for strike in strikes]
        heapq.heapify(self._due)
        self._noise = SocketNoise(seed)
        self.injected: Counter[str] = Counter()
        self.restarts: list[Restart] = []
        self._coming: dict[str, int] = {}  # ranks whose new life is awaited, and when it began
        self.now: dict[str, tuple[str, float]] = {}  # what is done to a rank at present, and until when

    def turn(self) -> None:
        """Do what is due."""
        now = time.monotonic() - self._began
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        self.now = {rank: what for rank, what in self.now.items() if what[1] > now}
        self._look()

    def end(self) -> None:
        """Nothing more is struck: resume what is paused, start what is down, end every fault."""
        self._due.clear()
        for name, rank in self._traffic.fleet.ranks.items():
            if rank.paused:
                self._traffic.resume(name)
            if rank.former is not None:
                self._return(name, _LEAVES_AFTER_S)
            if not rank.running:
                self._start(name, "")
            else:
                self._traffic.fleet.fault(name, "clear")

    def close(self) -> None:
        """Close what it made noise with."""
        self._noise.close()

    def _strike(self, strike: ScheduledFault) -> None:
        traffic, name = self._traffic, strike.rank
        rank = traffic.fleet.ranks[name]
        if not rank.running or rank.paused or (strike.kind == "replace" and rank.former is not None):
            return  # it took longer to come back than the schedule thought
        self.now[name] = (strike.spec or strike.kind, strike.at_s + max(strike.seconds, 1.0))
        if strike.kind == "kill":
            self._kill(name, strike.seconds, strike.spec, strike.again_s)
        elif strike.kind == "pause":
            traffic.pause(name)
            self.injected["pause"] += 1
            self._later(strike.seconds, partial(self._resume, name))
        elif strike.kind == "replace":
            traffic.fault(name, _LATE_WRITES, 2 * _LATE_S)
            self._later(_LATE_S, partial(self._freeze, strike))
        elif strike.kind == "fault":
            traffic.fault(name, strike.spec, strike.seconds)
            self.injected[strike.spec.partition("=")[0]] += 1
        else:
            self.injected["noise"] += self._noise.make(rank.pid)

    def _kill(self, name: str, down_s: float, spec: str, again_s: float) -> None:
        self._give_up_on(name)
        self._traffic.kill(name)
        self.injected["kill"] += 1
        self._later(down_s, partial(self._restart, name, spec, again_s))

    def _restart(self, name: str, spec: str, again_s: float) -> None:
        rank = self._traffic.fleet.ranks[name]
        if rank.running:  # its end has not been seen yet
            self._later(0.05, partial(self._restart, name, spec, again_s))
            return
        self._start(name, spec)
        if spec:
            self.injected["clock-jump"] += 1
        if again_s:
            self._later(again_s, partial(self._again, name))

    def _again(self, name: str) -> None:
        rank = self._traffic.fleet.ranks[name]
        if rank.running and not rank.paused:
            self._kill(name, 0.1, "", 0.0)

    def _start(self, name: str, spec: str) -> None:
        self._traffic.restart(name, spec)
        self._coming[name] = time.monotonic_ns()

    def _freeze(self, strike: ScheduledFault) -> None:
        rank = self._traffic.fleet.ranks[strike.rank]
        if rank.running and not rank.paused:
            self._traffic.pause(strike.rank)
            self.injected["replace"] += 1
            self._later(strike.seconds * _REPLACED_AFTER, partial(self._replace, strike))

    def _replace(self, strike: ScheduledFault) -> None:
        if not self._traffic.fleet.ranks[strike.rank].paused:
            return
        self._give_up_on(strike.rank)
        self._traffic.replace(strike.rank)
        self._coming[strike.rank] = time.monotonic_ns()
        frozen_s = strike.seconds * (1 - _REPLACED_AFTER)
        self._later(frozen_s, partial(self._return, strike.rank, strike.again_s))

    def _return(self, name: str, for_s: float) -> None:
        """A process that was replaced goes on for so long, or is killed without."""
        if for_s:
            self._traffic.thaw(name)
            self._later(for_s, partial(self._traffic.end_former, name, kill=False))
        else:
            self._traffic.end_former(name, kill=True)

    def _resume(self, name: str) -> None:
        if self._traffic.fleet.ranks[name].paused:
            self._traffic.resume(name)

    def _look(self) -> None:
        """Which new lives have served a room by now."""
        for name, since_ns in list(self._coming.items()):
            served_ns = self._traffic.first_success_ns.get(name, 0)
            met_ns = self._traffic.fleet.ranks[name].met_ns
            if met_ns and served_ns > since_ns:
                del self._coming[name]
                self.restarts.append(Restart(name, (met_ns - since_ns) / 1e9, (served_ns - since_ns) / 1e9))

    def _give_up_on(self, name: str) -> None:
        """A life that is killed before it has served anything."""
        since_ns = self._coming.pop(name, None)
        if since_ns is not None:
            met_ns = self._traffic.fleet.ranks[name].met_ns
            self.restarts.append(Restart(name, (met_ns - since_ns) / 1e9 if met_ns else None, None))

    def _later(self, seconds: float, action: partial[None]) -> None:
        heapq.heappush(self._due, (time.monotonic() - self._began + seconds, next(self._order), action))
