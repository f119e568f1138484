"""Does to a live fleet what a schedule says, and keeps count: what was injected, how long restarts took."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from kvctl.lab.demo.schedule import ScheduledFault
from kvctl.lab.demo.socket_noise import SocketNoise
from kvctl.lab.demo.traffic import Traffic

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
