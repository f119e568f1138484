"""Puts together what all ranks say of a room: when it was opened, computed and received, or why it failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvctl.bench.laps import Lap
from kvctl.bench.statistics import union
from kvctl_agent.contract.rig import PlannedRank


@dataclass(frozen=True, slots=True)
class Passage:
    """One room's way, in monotonic nanoseconds: the earliest open and start, the latest forward end and success.

    `nbytes` is what had to move for it.
    """

    opened_ns: int
    started_ns: int
    forward_done_ns: int
    success_ns: int
    nbytes: int

    @property
    def latency_ns(self) -> int:
        """Forward done to decode may start; 0 where a rank that owed nothing was told late."""
        return max(0, self.success_ns - self.forward_done_ns)


@dataclass(frozen=True, slots=True)
class Rate:
    """Throughput over the time in which at least one room was under way."""

    seconds: float
    rooms_per_s: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A lap and what became of its rooms: passages of those that succeeded, causes of the others, by index."""

    lap: Lap
    passages: Mapping[int, Passage]
    failures: Mapping[int, str]


def join(lap: Lap, names: Mapping[str, PlannedRank], nbytes: Mapping[int, int]) -> Finished:
    """Join the reports of a lap.

    Args:
        names: every rank of the fleet.
        nbytes: what has to move for each room, by index.
    """
    prefill = [lap.reports[name] for name, rank in names.items() if rank["role"] == "prefill"]
    decode = [lap.reports[name] for name, rank in names.items() if rank["role"] == "decode"]
    failures: dict[int, str] = {}
    for report in (*decode, *prefill):
        for index, text in report["failures"]:
            failures.setdefault(index, text)
    forwards = _outermost((index, start, done) for report in prefill for index, start, done, _ in report["rooms"])
    arrivals = _outermost((index, opened, end) for report in decode for index, opened, end in report["rooms"])
    passages: dict[int, Passage] = {}
    for index in (room.index for room in lap.rooms if room.index not in failures):
        if index in forwards and index in arrivals:
            opened, success = arrivals[index]
            passages[index] = Passage(opened, *forwards[index], success, nbytes[index])
        else:
            failures[index] = "no rank reported its end"
    return Finished(lap, passages, failures)


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


def _outermost(spans: Iterable[tuple[int, int, int]]) -> dict[int, tuple[int, int]]:
    """The earliest start and the latest end of each index."""
    found: dict[int, tuple[int, int]] = {}
    for index, start, end in spans:
        first, last = found.get(index, (start, end))
        found[index] = min(first, start), max(last, end)
    return found
