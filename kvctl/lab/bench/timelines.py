"""Timelines of single rooms for the HTML report.

The prefill rank and the decode rank each record only some stages of a part; a part's timeline joins both records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from kvctl.lab.bench.program import Case
from kvctl.lab.bench.room_timing import TimedTrial
from kvctl.lab.bench.statistics import median
from kvctl.lab.bench.trials import Trial
from kvctl.lab.ranks.plan import Plan, PlannedRank


class PartTimeline(TypedDict):
    """Times of one part of a room.

    `agent` is the prefill rank, `peer` the decode rank, and `layers` is [lo, hi). `moments` maps each stage
    (`contract.states.STAGES`) to its end in nanoseconds, on one clock for all parts of the room; stages that the part's
    path does not have are absent.
    """

    agent: str
    peer: str
    writer: int
    chunk: int
    layers: Sequence[int]
    path: str
    moments: Mapping[str, int]


class RoomTimeline(TypedDict):
    """Times of one room: its forward pass, its success and its parts, in nanoseconds on one clock."""

    title: str
    room: str
    path: str
    transport: str
    pipeline: str
    forward_start_ns: int
    forward_done_ns: int
    success_ns: int
    parts: Sequence[PartTimeline]


def layer_groups(trial: Trial, names: Mapping[str, PlannedRank], layers: int) -> int | None:
    """Returns the number of layer groups in which the shown room (`Trial.shown`) was sent; None if no part is known.

    If writers or chunks differ, the largest number is returned.

    Args:
        names: The planned ranks, by rank name.
        layers: Number of the model's layers. A draft model's layers have higher numbers and are not counted.
    """
    groups: dict[tuple[str, str, int], set[tuple[int, ...]]] = {}
    for name, report in trial.reports.items():
        if names[name]["role"] == "prefill":
            for part in report["waterfall"]:
                if part["chunk"] is not None and part["layers"][0] < layers:
                    groups.setdefault((name, part["peer"], part["chunk"]), set()).add(tuple(part["layers"]))
    return max(map(len, groups.values()), default=None)


def room_timelines(
    trials: Mapping[Case, Sequence[TimedTrial]], names: Mapping[str, PlannedRank], plan: Plan
) -> list[RoomTimeline]:
    """Returns the timeline of a room of about median latency, for each path and pipeline setting."""
    timelines = []
    for case in _shown_cases(trials):
        trial = typical(trials[case])
        if trial is None:
            continue
        timing = trial.timings[trial.trial.shown]
        planned = plan["loads"][case.load]
        pipeline = "" if case.pipeline == "off" else f", pipeline {case.pipeline}"
        timelines.append(
            RoomTimeline(
                title=f"{case.path}{pipeline}: {timing.room.tokens:,} tokens, concurrency {planned['concurrency']}",
                room=str(timing.room.number),
                path=case.path,
                transport=plan["transport"],
                pipeline=case.pipeline,
                forward_start_ns=timing.started_ns,
                forward_done_ns=timing.forward_done_ns,
                success_ns=timing.success_ns,
                parts=_parts(trial.trial, names),
            )
        )
    return timelines


def typical(trials: Sequence[TimedTrial]) -> TimedTrial | None:
    """Returns the trial whose shown room (`Trial.shown`) is nearest to the median latency; None if none succeeded."""
    shown = [trial for trial in trials if trial.trial.shown in trial.timings]
    if not shown:
        return None
    latencies = [trial.timings[trial.trial.shown].latency_ns for trial in shown]
    middle = median(latencies)
    return min(zip(latencies, shown, strict=True), key=lambda pair: abs(pair[0] - middle))[1]


def _shown_cases(trials: Mapping[Case, Sequence[TimedTrial]]) -> list[Case]:
    """Returns one case of each path and pipeline setting: the middle one in the order of loads and layer times."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in trials:
        groups.setdefault((case.path, case.pipeline), []).append(case)
    return [cases[len(cases) // 2] for cases in groups.values()]


def _parts(trial: Trial, names: Mapping[str, PlannedRank]) -> list[PartTimeline]:
    """Joins the records of the prefill and the decode rank on each part of the shown room, ordered by first record."""
    parts: dict[tuple[str, str, int, tuple[int, ...]], PartTimeline] = {}
    for name, report in trial.reports.items():
        for part in report["waterfall"]:
            if part["chunk"] is None or part["writer"] is None:
                continue
            ends = (name, part["peer"]) if names[name]["role"] == "prefill" else (part["peer"], name)
            joined = parts.setdefault(
                (*ends, part["chunk"], tuple(part["layers"])),
                PartTimeline(
                    agent=ends[0],
                    peer=ends[1],
                    writer=part["writer"],
                    chunk=part["chunk"],
                    layers=part["layers"],
                    path=part["path"],
                    moments={},
                ),
            )
            joined["moments"] = {**joined["moments"], **part["moments"]}
    return sorted(parts.values(), key=lambda part: min(part["moments"].values(), default=0))
