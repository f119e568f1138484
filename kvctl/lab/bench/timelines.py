"""Single rooms and rings over time: what a picture of a bench is drawn from.

A part is seen from both its ends, each of which knows other moments of its life; here the two are joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvctl.lab.bench.case import Case
from kvctl.lab.bench.html.data import PartTimeline, RingTimeline, RoomTimeline
from kvctl.lab.bench.room_timing import Finished
from kvctl.lab.bench.statistics import median
from kvctl.lab.bench.trials import Trial
from kvctl.lab.ranks.messages import Ready
from kvctl.lab.ranks.plan import Plan, PlannedRank

_Key = tuple[str, str, int, tuple[int, ...]]


def layer_groups(lap: Trial, names: Mapping[str, PlannedRank], layers: int) -> int | None:
    """Layer groups that the shown room's KV came in, at the writer with most of them; None where no part is known.

    Args:
        layers: of the model; a draft model's come after them and are not counted.
    """
    groups: dict[tuple[str, str, int], set[tuple[int, ...]]] = {}
    for name, report in lap.reports.items():
        if names[name]["role"] == "prefill":
            for part in report["waterfall"]:
                if part["chunk"] is not None and part["layers"][0] < layers:
                    groups.setdefault((name, part["peer"], part["chunk"]), set()).add(tuple(part["layers"]))
    return max(map(len, groups.values()), default=None)


def room_timelines(
    laps: Mapping[Case, Sequence[Finished]], names: Mapping[str, PlannedRank], plan: Plan
) -> list[RoomTimeline]:
    """A typical room of each path and pipeline."""
    lives = []
    for case in _worth_showing(laps):
        finished = typical(laps[case])
        if finished is None:
            continue
        passage = finished.passages[finished.lap.shown]
        planned = plan["loads"][case.load]
        pipeline = "" if case.pipeline == "off" else f", pipeline {case.pipeline}"
        lives.append(
            RoomTimeline(
                title=f"{case.path}{pipeline}: {passage.room.tokens:,} tokens, concurrency {planned['concurrency']}",
                room=str(passage.room.number),
                path=case.path,
                transport=plan["transport"],
                pipeline=case.pipeline,
                forward_start_ns=passage.started_ns,
                forward_done_ns=passage.forward_done_ns,
                success_ns=passage.success_ns,
                parts=_parts(finished.lap, names),
            )
        )
    return lives


def ring_timelines(
    laps: Mapping[Case, Sequence[Finished]], names: Mapping[str, PlannedRank], ready: Mapping[str, Ready]
) -> list[RingTimeline]:
    """Every decode rank's ring during a typical lap of each path and pipeline that used it."""
    return [
        RingTimeline(agent=name, path=case.path, size_bytes=ready[name]["ring_bytes"], points=report["ring_samples"])
        for case in _worth_showing(laps)
        if (finished := typical(laps[case])) is not None
        for name, report in finished.lap.reports.items()
        if names[name]["role"] == "decode" and name in ready and any(used for _, used in report["ring_samples"])
    ]


def typical(laps: Sequence[Finished]) -> Finished | None:
    """The lap whose shown room took a middling time; None where none of the shown rooms succeeded."""
    shown = [finished for finished in laps if finished.lap.shown in finished.passages]
    if not shown:
        return None
    latencies = [finished.passages[finished.lap.shown].latency_ns for finished in shown]
    middle = median(latencies)
    return min(zip(latencies, shown, strict=True), key=lambda pair: abs(pair[0] - middle))[1]


def _worth_showing(laps: Mapping[Case, Sequence[Finished]]) -> list[Case]:
    """Of the loads and paces of each path and pipeline the one in the middle: all of them would be a picture book."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in laps:
        groups.setdefault((case.path, case.pipeline), []).append(case)
    return [cases[len(cases) // 2] for cases in groups.values()]


def _parts(lap: Trial, names: Mapping[str, PlannedRank]) -> list[PartTimeline]:
    """The shown room's parts in the order in which they came into being, both ends of each joined."""
    parts: dict[_Key, PartTimeline] = {}
    for name, report in lap.reports.items():
        for part in report["waterfall"]:
            if part["chunk"] is None or part["writer"] is None:
                continue
            ends = (name, part["peer"]) if names[name]["role"] == "prefill" else (part["peer"], name)
            life = parts.setdefault(
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
            life["moments"] = {**life["moments"], **part["moments"]}
    return sorted(parts.values(), key=lambda life: min(life["moments"].values(), default=0))
