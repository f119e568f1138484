"""Puts together what all ranks say of a room: when it was opened, computed and received, or why it failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvctl.lab.bench.statistics import median, union
from kvctl.lab.bench.trials import Trial
from kvctl.lab.ranks.messages import Room
from kvctl.lab.ranks.plan import PlannedRank


@dataclass(frozen=True, slots=True)
class RoomTiming:
    """One room's way, in monotonic nanoseconds: the earliest arrival and start, the latest of everything else.

    Attributes:
        opened_ns: it arrived: was asked for, or opened where it has no arrival of its own.
        compute_ns: how long its layers took on the slowest rank, waiting left out.
        first_token_ns, last_token_ns: with success, where no decoding is simulated.
        hidden_ns: transfer before the forward was done, of the rank with most; None of rooms that were not sampled.
        nbytes: what had to move for it.
        alone_ns: what its layers take on the slowest rank while nothing is sent; None where nobody computed for real.
    """

    room: Room
    opened_ns: int
    started_ns: int
    forward_done_ns: int
    compute_ns: int
    success_ns: int
    first_token_ns: int
    last_token_ns: int
    hidden_ns: int | None
    nbytes: int
    alone_ns: int | None = None

    @property
    def slowdown_ratio(self) -> float | None:
        """How much longer its layers took beside transfers than alone, of 1; None where that is not known."""
        return self.compute_ns / self.alone_ns - 1 if self.alone_ns else None

    @property
    def latency_ns(self) -> int:
        """Forward done to decode may start; 0 where a rank that owed nothing was told late."""
        return max(0, self.success_ns - self.forward_done_ns)

    @property
    def token_ns(self) -> float | None:
        """Time per output token after the first; None where there are none."""
        more = self.room.output_tokens - 1
        return (self.last_token_ns - self.first_token_ns) / more if more > 0 else None


@dataclass(frozen=True, slots=True)
class Rate:
    """Throughput over the time in which at least one room was under way."""

    seconds: float
    rooms_per_s: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A lap and what became of its rooms, by index.

    Attributes:
        passages: of those that succeeded.
        failures: causes of those that failed.
        explained: "aborted" or "fault" for those that failed because that was asked for.
    """

    lap: Trial
    passages: Mapping[int, RoomTiming]
    failures: Mapping[int, str]
    explained: Mapping[int, str] = field(default_factory=dict)


def join(lap: Trial, names: Mapping[str, PlannedRank], nbytes: Mapping[int, int]) -> Finished:
    """Join the reports of a lap.

    Args:
        names: every rank of the fleet.
        nbytes: what has to move for each room, by index.
    """
    prefill = [lap.reports[name] for name, rank in names.items() if rank["role"] == "prefill"]
    decode = [lap.reports[name] for name, rank in names.items() if rank["role"] == "decode"]
    failures: dict[int, str] = {}
    explained: dict[int, str] = {}
    for report in (*decode, *prefill):
        known = dict(report["faults"]["explained"]) if "faults" in report else {}
        explained |= known
        for index, text in report["failures"]:
            if index not in known:
                failures.setdefault(index, text)
    explained = {index: kind for index, kind in explained.items() if index not in failures}
    forwards = _merged(row for report in prefill for row in report["rooms"])
    arrivals = _merged(row for report in decode for row in report["rooms"])
    hidden: dict[int, int] = {}
    for index, before_ns, _ in (row for report in prefill for row in report["hidden"]):
        hidden[index] = max(hidden.get(index, 0), before_ns)
    alone: dict[int, int] = {}
    for index, alone_ns in (row for report in prefill for row in report.get("compute_alone", ())):
        alone[index] = max(alone.get(index, 0), alone_ns)
    passages: dict[int, RoomTiming] = {}
    for room in (room for room in lap.rooms if room.index not in failures and room.index not in explained):
        index = room.index
        if index in forwards and index in arrivals:
            started, done, _, compute = forwards[index]
            opened, success, first, last = arrivals[index]
            passages[index] = RoomTiming(
                room,
                opened,
                started,
                done,
                compute,
                success,
                first,
                last,
                hidden.get(index),
                nbytes[index],
                alone.get(index),
            )
        else:
            failures[index] = "no rank reported its end"
    return Finished(lap, passages, failures, explained)


def rate(laps: Iterable[Finished]) -> Rate:
    """Rates over several laps: they do not overlap, so the unions of their spans add up."""
    ns = rooms = nbytes = 0
    for finished in laps:
        passages = finished.passages.values()
        ns += union((each.started_ns, each.success_ns) for each in passages)
        rooms += len(passages)
        nbytes += sum(each.nbytes for each in passages)
    return Rate(ns / 1e9, rooms / ns * 1e9, nbytes / ns) if ns else Rate(0.0, 0.0, 0.0)


def by_repeat(laps: Sequence[Finished]) -> list[list[Finished]]:
    """The laps of each repeat, in order."""
    repeats: dict[int, list[Finished]] = {}
    for finished in laps:
        repeats.setdefault(finished.lap.repeat, []).append(finished)
    return list(repeats.values())


def observer_cost(alone: Sequence[Finished], watched: Sequence[Finished]) -> float | None:
    """Throughput that watching took, of 1: the median over pairs of laps of the same rooms. None without pairs."""

    def pace(finished: Finished) -> float:
        return rate([finished]).gb_per_s

    others = {(each.lap.repeat, each.lap.lot): pace(each) for each in alone}
    pairs = [(others.get((each.lap.repeat, each.lap.lot)), pace(each)) for each in watched]
    costs = [1 - seen / before for before, seen in pairs if before]
    return median(costs) if costs else None


def _merged(rows: Iterable[Sequence[int]]) -> dict[int, list[int]]:
    """What several ranks say of an index: the earliest of their first figures, the latest of each of the others."""
    found: dict[int, list[int]] = {}
    for index, *figures in rows:
        seen = found.setdefault(index, figures)
        found[index] = [min(seen[0], figures[0]), *map(max, seen[1:], figures[1:])]
    return found
