"""One measured case as a row: the names that scripts rely on (`kvctl.lab.bench/1`; names are added, never changed).

A room's latency is from the moment the last prefill rank had its forward done to the moment the last decode rank may
start: the part of the transfer that no compute hid. Rates are over the wall-clock union of all spans from forward start
to success, so that a pause between lots counts for nobody and waiting inside one for everybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvctl.lab.bench.costs import Costs
from kvctl.lab.bench.roofline import copy_floor
from kvctl.lab.bench.room_timing import Finished, RoomTiming, by_repeat, rate
from kvctl.lab.bench.statistics import median, stage_us, summary_ms
from kvctl.lab.bench.timelines import layer_groups
from kvctl.lab.ranks.messages import Mismatch, Ready
from kvctl.lab.ranks.plan import Plan, PlannedLoad, PlannedRank

STAGES = ("gather", "gate", "post", "wire", "scatter")


def row_of(
    laps: Sequence[Finished],
    plan: Plan,
    names: Mapping[str, PlannedRank],
    ready: Mapping[str, Ready],
    floors: Mapping[str, float | None],
    looked: bool,
) -> dict[str, Any]:
    """The row of one case.

    Args:
        laps: all of this one case, at least one.
        names, ready: the ranks of the fleet and what each said of itself.
        looked: whether what landed was compared.
    """
    case = laps[0].lap.case
    planned = plan["loads"][case.load]
    passages = [passage for finished in laps for passage in finished.passages.values()]
    failed = sum(len(finished.failures) for finished in laps)
    explained = Counter(kind for finished in laps for kind in finished.explained.values())
    costs = Costs(laps, names, ready)
    parts = sum(costs.by_label("kvctl_parts_total", "decode").values())
    verified = not failed and not any(mismatches(finished) for finished in laps) if looked else None
    return {
        "path": case.path,
        "transport": plan["transport"],
        "device": plan["device"],
        "compute": plan["compute"],
        "pipeline": case.pipeline,
        "cp_mode": plan["cp_mode"],
        "observed": case.observed,
        "concurrency": planned["concurrency"],
        "in_flight": planned["in_flight"],
        "tokens": _short(planned["tokens_mean"]),
        "tokens_drawn": planned["tokens"],
        "page_size": plan["page_size"],
        "page_order": plan["page_order"],
        "layer_ms": case.layer_ms,
        "arrivals": "open" if any(room["arrival_ms"] is not None for room in planned["rooms"]) else "closed",
        "rooms": len(passages) + failed + explained.total(),
        "planned_rooms": _planned_rooms(laps, planned),
        "ok": len(passages),
        "aborted": explained["aborted"],
        "failed_by_fault": explained["fault"],
        "failed": failed,
        "faults_struck": _struck(laps),
        "verified": verified,
        "verified_parts": parts if verified else None if verified is None else 0,
        **_rates(laps, planned, floors, sum(rank["role"] == "decode" for rank in names.values())),
        "bytes_per_room": sum(each.nbytes for each in passages) // max(1, len(passages)),
        "floor_ratio": _over_floor(passages, copy_floor(plan, floors)),
        "prefix_hit_ratio": _prefix_hit(planned),
        **_times(passages),
        "compute_slowdown_ratio": _slowdown(passages),
        "groups": _groups(laps, names, plan["shape"]["layers"]),
        "pipeline_decisions": costs.by_label("kvctl_pipeline_decisions_total", "prefill"),
        "descriptors_per_room": costs.per_room("kvctl_descriptors_total"),
        "writes_per_room": costs.per_room("kvctl_writes_total"),
        "engine_posts_per_room": costs.per_room("kvctl_engine_posts_total"),
        "paths_taken": costs.by_label("kvctl_parts_total", "prefill"),
        "fallbacks": costs.fallbacks,
        "peak_rss_bytes": costs.peak_rss_bytes,
        "rss_overhead_bytes": costs.rss_overhead_bytes,
        "cpu_seconds": costs.cpu_seconds,
        "stages_us": {stage: stage_us(costs.stage(stage)) for stage in STAGES},
        "ring_high_water_bytes": costs.ring_high_water_bytes,
    }


def mismatches(finished: Finished) -> list[Mismatch]:
    """What a lap's decode ranks found wrong."""
    return [mismatch for verdict in finished.lap.verdicts.values() for mismatch in verdict["mismatches"]]


def _rates(
    laps: Sequence[Finished], planned: PlannedLoad, floors: Mapping[str, float | None], readers: int
) -> dict[str, Any]:
    """Throughput of the repeat in the middle, and of the best one."""
    repeats = by_repeat(laps)
    rates = [rate(repeat) for repeat in repeats]
    middle = median([each.gb_per_s for each in rates])
    typical = min(rates, key=lambda each: abs(each.gb_per_s - middle))
    best = max(range(len(rates)), key=lambda at: rates[at].gb_per_s)
    return {
        "repeats": len(rates),
        **asdict(typical),
        "tokens_per_s": typical.rooms_per_s * planned["tokens_mean"],
        "gb_per_s_per_decode_rank": typical.gb_per_s / readers,
        "best": {
            **asdict(rates[best]),
            "tokens_per_s": rates[best].rooms_per_s * planned["tokens_mean"],
            "ttft_ms": _ttft([passage for finished in repeats[best] for passage in finished.passages.values()]),
        },
        **{
            f"{name}_ratio": typical.gb_per_s / floor if floor else None
            for name, floor in (
                ("memcpy", floors["memcpy"]),
                ("write", floors["write"]),
                ("device_copy", floors["device"]),
                ("p2p", floors["peer"]),
            )
        },
    }


def _times(passages: Sequence[RoomTiming]) -> dict[str, Any]:
    latency = summary_ms(each.latency_ns for each in passages)
    return {
        "latency_ms": latency,
        "exposed_ms": latency,  # what is not hidden behind a forward is what is waited for after it
        "hidden_ms": summary_ms(each.hidden_ns for each in passages if each.hidden_ns is not None),
        "compute_ms": summary_ms(each.compute_ns for each in passages),
        "total_ms": summary_ms(each.success_ns - each.started_ns for each in passages),
        "ttft_ms": _ttft(passages),
        "tpot_ms": summary_ms(each.token_ns for each in passages if each.token_ns is not None),
    }


def _over_floor(passages: Sequence[RoomTiming], gb_per_s: float | None) -> float | None:
    """Median over rooms of their latency against the time that one copy of as many bytes takes."""
    if not gb_per_s or not passages:
        return None
    return median([each.latency_ns * gb_per_s / max(1, each.nbytes) for each in passages])


def _slowdown(passages: Sequence[RoomTiming]) -> float | None:
    """Median over rooms of what transfers took from compute."""
    known = [each.slowdown_ratio for each in passages if each.slowdown_ratio is not None]
    return median(known) if known else None


def _planned_rooms(laps: Sequence[Finished], planned: PlannedLoad) -> int:
    """Rooms that would have run so far if every lot had run as a whole."""
    repeats = len({finished.lap.repeat for finished in laps})
    return repeats * sum(end - first for first, end in planned["lots"])


def _ttft(passages: Sequence[RoomTiming]) -> dict[str, float | None]:
    return summary_ms(each.first_token_ns - each.opened_ns for each in passages)


def _struck(laps: Sequence[Finished]) -> dict[str, int]:
    """How often each kind of fault struck, over all ranks."""
    struck: Counter[str] = Counter()
    for report in (report for finished in laps for report in finished.lap.reports.values()):
        struck.update(report["faults"]["struck"] if "faults" in report else {})
    return dict(sorted(struck.items()))


def _groups(laps: Sequence[Finished], names: Mapping[str, PlannedRank], layers: int) -> int | None:
    """Layer groups that a room's parts came in, over the rooms that were looked at; 1 where it was not pipelined."""
    counts = [count for finished in laps if (count := layer_groups(finished.lap, names, layers)) is not None]
    return round(median(counts)) if counts else None


def _prefix_hit(planned: PlannedLoad) -> float:
    """The part of all prompts that decode had cached."""
    rooms = planned["rooms"]
    return sum(room["prefix_tokens"] for room in rooms) / max(1, sum(room["tokens"] for room in rooms))


def _short(mean: float) -> float:
    return mean if mean % 1 else int(mean)
