"""Combines the reports of all ranks into the times of each room, or the cause of its failure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvctl.lab.bench.statistics import union
from kvctl.lab.bench.trials import Trial
from kvctl.lab.ranks.messages import Room
from kvctl.lab.ranks.plan import PlannedRank


@dataclass(frozen=True, slots=True)
class RoomTiming:
    """Times of one room in monotonic nanoseconds: the earliest start and the latest end over all ranks.

    Attributes:
        opened_ns: arrival of the request, or the room's opening if requests have no arrival times.
        compute_ns: compute time of the room's layers on the slowest rank, without waiting.
        first_token_ns, last_token_ns: equal to `success_ns` if no decoding is simulated.
        hidden_ns: transfer time before the forward ended, the longest of all prefill ranks; None for rooms outside the
            sample that the ranks report.
        done_ns: success on all prefill ranks, which learn from the decode ranks that the room has ended.
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
    done_ns: int

    @property
    def latency_ns(self) -> int:
        """Time from the end of the forward to success.

        0 if a prefill rank that sends no parts of this room ended its forward after success.
        """
        return max(0, self.success_ns - self.forward_done_ns)

    @property
    def token_ns(self) -> float | None:
        """Nanoseconds per output token after the first; None for rooms with fewer than two output tokens."""
        more = self.room.output_tokens - 1
        return (self.last_token_ns - self.first_token_ns) / more if more > 0 else None


@dataclass(frozen=True, slots=True)
class Rate:
    """Throughput over the `seconds` in which at least one room was in flight."""

    seconds: float
    rooms_per_s: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class TimedTrial:
    """A trial with the outcome of its rooms; each room index is in one of the two mappings.

    Attributes:
        timings: times of rooms that succeeded.
        failures: causes of rooms that failed.
    """

    trial: Trial
    timings: Mapping[int, RoomTiming]
    failures: Mapping[int, str]


def time_rooms(trial: Trial, names: Mapping[str, PlannedRank], nbytes: Mapping[int, int]) -> TimedTrial:
    """Combines the ranks' reports of a trial into the outcome of each room."""
    prefill = [trial.reports[name] for name, rank in names.items() if rank["role"] == "prefill"]
    decode = [trial.reports[name] for name, rank in names.items() if rank["role"] == "decode"]
    failures: dict[int, str] = {}
    for report in (*decode, *prefill):
        for index, text in report["failures"]:
            failures.setdefault(index, text)
    forwards = _merged(row for report in prefill for row in report["rooms"])
    arrivals = _merged(row for report in decode for row in report["rooms"])
    hidden: dict[int, int] = {}
    for index, before_ns, _ in (row for report in prefill for row in report["hidden"]):
        hidden[index] = max(hidden.get(index, 0), before_ns)
    timings: dict[int, RoomTiming] = {}
    for room in (room for room in trial.rooms if room.index not in failures):
        index = room.index
        if index in forwards and index in arrivals:
            started, forward_done, done, compute = forwards[index]
            opened, success, first, last = arrivals[index]
            timings[index] = RoomTiming(
                room,
                opened,
                started,
                forward_done,
                compute,
                success,
                first,
                last,
                hidden.get(index),
                nbytes[index],
                done,
            )
        else:
            failures[index] = "no rank reported its end"
    return TimedTrial(trial, timings, failures)


def rate(trials: Iterable[TimedTrial]) -> Rate:
    """Returns the throughput over several trials, which must not overlap in time."""
    ns = rooms = nbytes = 0
    for trial in trials:
        timings = trial.timings.values()
        ns += union((each.started_ns, each.success_ns) for each in timings)
        rooms += len(timings)
        nbytes += sum(each.nbytes for each in timings)
    return Rate(ns / 1e9, rooms / ns * 1e9, nbytes / ns) if ns else Rate(0.0, 0.0, 0.0)


def served_rooms_per_s(trials: Iterable[TimedTrial]) -> float | None:
    """Returns the rate at which rooms succeed, from the first to the last success of each trial.

    None unless a trial has two rooms. With open-loop arrivals, compare it with `asked_rooms_per_s`: a lower value means
    that rooms pile up.
    """
    return _rate_of(sorted(each.success_ns for each in trial.timings.values()) for trial in trials)


def asked_rooms_per_s(trials: Iterable[TimedTrial]) -> float | None:
    """Returns the rate at which rooms arrive, as drawn; None in a closed loop."""
    arrivals = ([room.arrival_ms for room in trial.trial.rooms if room.arrival_ms is not None] for trial in trials)
    return _rate_of(sorted(round(at_ms * 1e6) for at_ms in each) for each in arrivals)


def _rate_of(trials_ns: Iterable[Sequence[int]]) -> float | None:
    """Returns intervals per second between ascending times, over several trials."""
    spans = [(len(times) - 1, times[-1] - times[0]) for times in trials_ns if len(times) > 1]
    ns = sum(span for _, span in spans)
    return sum(count for count, _ in spans) / ns * 1e9 if ns else None


def _merged(rows: Iterable[Sequence[int]]) -> dict[int, list[int]]:
    """Merges rows [room index, times …] of several ranks by room: minimum of the first time, maximum of the others."""
    merged: dict[int, list[int]] = {}
    for index, *figures in rows:
        known = merged.setdefault(index, figures)
        merged[index] = [min(known[0], figures[0]), *map(max, known[1:], figures[1:])]
    return merged
