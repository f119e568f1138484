"""Builds the row of each measured case in the saved result (`kvctl.bench/1`: fields may be added, never changed).

A room's latency is the time from the end of its forward on the last prefill rank to success on the last decode rank:
the part of the transfer that compute did not hide. Rates are over the union of all spans from forward start to success,
so that pauses between batches do not count, but waiting within a batch does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from kvctl.lab.bench.machine import copy_roofline
from kvctl.lab.bench.room_timing import RoomTiming, TimedTrial, asked_rooms_per_s, rate, served_rooms_per_s
from kvctl.lab.bench.statistics import median, stage_us, summary_ms, told_apart
from kvctl.lab.ranks.busy_loop import slowdown
from kvctl.lab.ranks.messages import Mismatch, Ready, RunReport
from kvctl.lab.ranks.plan import Plan, PlannedLoad, PlannedRank
from kvctl.lab.ranks.request import FloorKind
from kvctl_agent.contract.choices import HOST, STAGED

STAGES = ("gather", "gate", "post", "wire", "scatter")
# Fields of a row that each of its rounds has, too.
_ROUND_FIELDS = (
    *("rooms", "rooms_per_s", "gb_per_s", "tokens_per_s", "served_rooms_per_s", "floor_ratio", "cpu_seconds"),
    *("latency_ms", "ttft_ms", "tpot_ms"),
)
# Rows of one load that differ in these fields are different choices, whatever they sent.
_CONDITIONS = ("transport", "cp_mode", "busy_engine", "prefill", "decode")
_CHOICE = ("transport", "cp_mode", "path", "pipeline")


def row_of(
    trials: Sequence[TimedTrial],
    plan: Plan,
    names: Mapping[str, PlannedRank],
    ready: Mapping[str, Ready],
    roofline: Mapping[FloorKind, float | None],
    verified: bool,
) -> dict[str, Any]:
    """Returns the row of one case.

    Args:
        trials: All trials of the case, at least one.
        ready: Each rank's answer to the start command.
        roofline: GB/s of each kind in `machine.ROOFLINES`; None for kinds that were not measured.
    """
    case = trials[0].trial.case
    planned = plan["loads"][case.load]
    timings = [timing for trial in trials for timing in trial.timings.values()]
    failed = sum(len(trial.failures) for trial in trials)
    reports = _Reports(trials, names)
    parts = reports.by_label("kvctl_parts_total", "decode")
    correct = not failed and not any(mismatches(trial) for trial in trials) if verified else None
    counts = ([report["groups"] for report in each.trial.reports.values()] for each in trials)
    groups = [most for each in counts if (most := max(each, default=0))]
    sent = {
        f"{name}_per_room": sum(reports.by_label(f"kvctl_{name}_total", "prefill").values()) / len(timings)
        if timings
        else None
        for name in ("descriptors", "writes", "engine_posts")
    }
    prompts = planned["rooms"]
    mean = planned["tokens_mean"]
    return {
        "path": case.path,
        "transport": plan["transport"],
        "device": plan["device"],
        "pipeline": case.pipeline,
        "cp_mode": plan["cp_mode"],
        "busy_engine": case.busy_engine,
        "concurrency": planned["concurrency"],
        "in_flight": planned["in_flight"],
        "tokens": mean if mean % 1 else int(mean),
        "tokens_drawn": planned["tokens"],
        "page_size": plan["page_size"],
        "decode_page_size": plan["decode_page_size"],
        "transfer_page": plan["transfer_page"],
        "cp_interleave": plan["cp_interleave"],
        "kv_layouts": plan["kv_layouts"],
        "page_order": plan["page_order"],
        "layer_ms": case.layer_ms,
        "arrivals": "open" if any(room["arrival_ms"] is not None for room in prompts) else "closed",
        "asked_rooms_per_s": asked_rooms_per_s(trials),
        "served_rooms_per_s": served_rooms_per_s(trials),
        **_engine_loop(trials, reports),
        "rooms": len(timings) + failed,
        # Number of rooms that the repeats so far would have had if every batch had run completely.
        "planned_rooms": len({each.trial.repeat for each in trials}) * sum(end - at for at, end in planned["batches"]),
        "ok": len(timings),
        "failed": failed,
        "verified": correct,
        "verified_parts": sum(parts.values()) if correct else None if correct is None else 0,
        **_rates(trials, planned, roofline, sum(rank["role"] == "decode" for rank in names.values())),
        "bytes_per_room": sum(each.nbytes for each in timings) // max(1, len(timings)),
        "floor_ratio": _latency_over_copy(timings, copy_roofline(plan, roofline)),
        "prefix_hit_ratio": sum(each["prefix_tokens"] for each in prompts) / max(1, sum(e["tokens"] for e in prompts)),
        **_times(timings),
        "groups": round(median(groups)) if groups else None,
        "pipeline_decisions": reports.by_label("kvctl_pipeline_decisions_total", "prefill"),
        **sent,
        "paths_taken": reports.by_label("kvctl_parts_total", "prefill"),
        "fallbacks": sum(reports.by_label("kvctl_fallbacks_total", "prefill").values()),
        "peak_rss_bytes": max(report["peak_rss_bytes"] for _, report in reports),
        "rss_overhead_bytes": _rss_overhead(reports, names, ready),
        "cpu_seconds": sum(report["cpu_ns"] for _, report in reports) / 1e9,
        "stages_us": {stage: stage_us(ns for _, r in reports for ns in r["stages"].get(stage, [])) for stage in STAGES},
        "ring_high_water_bytes": max(report["ring_high_water_bytes"] for _, report in reports.of("decode"))
        if parts.get(STAGED)
        else 0,
    }


def mismatches(trial: TimedTrial) -> list[Mismatch]:
    """Returns the mismatches that the decode ranks found when they compared the bytes received in a trial."""
    return [mismatch for verdict in trial.trial.verdicts.values() for mismatch in verdict["mismatches"]]


class Delta(NamedTuple):
    """Relative change of a figure from one row to another.

    Attributes:
        significant: whether the rounds tell the rows apart (`told_apart`).
    """

    ratio: float | None
    significant: bool | None


def rounds_of(trials: Sequence[TimedTrial], row: Callable[[Sequence[TimedTrial]], Mapping[str, Any]]) -> list[Any]:
    """Returns the figures of each round of a case: of one batch, for which all compared cases take turns."""
    found = [row([trial]) for trial in trials if trial.timings]
    return [{name: each[name] for name in _ROUND_FIELDS} for each in found]


def in_rounds(row: Mapping[str, Any], value: Callable[[Mapping[str, Any]], float | None]) -> list[float]:
    """Returns a figure in each round of a row."""
    return [figure for each in row.get("rounds", ()) if (figure := value(each)) is not None]


def delta_of(
    first: Mapping[str, Any], row: Mapping[str, Any], value: Callable[[Mapping[str, Any]], float | None]
) -> Delta:
    """Compares a figure of a row with that of the first row."""
    before, after = value(first), value(row)
    ratio = after / before - 1 if before and after is not None else None
    return Delta(ratio, told_apart(in_rounds(first, value), in_rounds(row, value)))


def with_delta(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with the change against the first row of their load and `same_as` added.

    `delta_ratio` is the change of GB/s, `ttft_delta_ratio` that of the mean TTFT, and `…_significant` says whether the
    rounds tell the rows apart. All are None in the first row of a load. `same_as` has the settings (`_CHOICE`) of an
    earlier row that is the same choice (`same_choice`); None without such a row. Rows of one load are adjacent.
    """
    fields = ("concurrency", "tokens_drawn", "cp_size", "layer_ms")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(field) for field in fields), []).append(row)
    compared = []
    for group in groups.values():
        for number, row in enumerate(group):
            changes: dict[str, Any] = {}
            for name, value in (("delta", _gb_per_s), ("ttft_delta", _mean_ttft)):
                delta = Delta(None, None) if row is group[0] else delta_of(group[0], row, value)
                changes |= {f"{name}_ratio": delta.ratio, f"{name}_significant": delta.significant}
            same = next((other for other in group[:number] if same_choice(other, row)), None)
            changes["same_as"] = None if same is None else {name: same.get(name) for name in _CHOICE}
            compared.append({**row, **changes})
    return compared


def _gb_per_s(row: Mapping[str, Any]) -> float | None:
    figure: float | None = row["gb_per_s"]
    return figure


def _mean_ttft(row: Mapping[str, Any]) -> float | None:
    mean: float | None = (row.get("ttft_ms") or {}).get("mean")
    return mean


def p50_ms(row: Mapping[str, Any]) -> float | None:
    """Returns the median latency of a row or a round."""
    figure: float | None = (row.get("latency_ms") or {}).get("p50")
    return figure


def same_choice(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two rows of one load sent the same parts of each room on the same paths, as auto and its choice.

    Rows that differ in their conditions, or that the rounds tell apart in spite of it, are not the same choice.
    """
    sent = [
        sorted((path, count / max(1, row["ok"])) for path, count in row.get("paths_taken", {}).items())
        for row in (one, other)
    ]
    alike = sent[0] == sent[1] != [] and all(one.get(name) == other.get(name) for name in _CONDITIONS)
    return alike and not any(delta_of(one, other, value).significant for value in (_gb_per_s, p50_ms))


class _Reports:
    """The reports of all ranks in all trials of a case; iterates over pairs of rank name and report."""

    def __init__(self, trials: Sequence[TimedTrial], names: Mapping[str, PlannedRank]) -> None:
        self._all = [each for trial in trials for each in trial.trial.reports.items()]
        self._names = names

    def __iter__(self) -> Iterator[tuple[str, RunReport]]:
        return iter(self._all)

    def of(self, role: str) -> Iterator[tuple[str, RunReport]]:
        return ((name, report) for name, report in self._all if self._names[name]["role"] == role)

    def by_label(self, metric: str, role: str) -> dict[str, int]:
        """Returns the growth of a counter during the trials, summed over all ranks of a role, by label value."""
        sums: Counter[str] = Counter()
        for _, report in self.of(role):
            for label, value in report["counters"].get(metric, {}).items():
                sums[label] += round(value)
        return dict(sums)


def _rates(
    trials: Sequence[TimedTrial], planned: PlannedLoad, roofline: Mapping[FloorKind, float | None], decode_ranks: int
) -> dict[str, Any]:
    """Returns the fields on throughput: of the median repeat, and relative to the roofline."""
    repeats: dict[int, list[TimedTrial]] = {}
    for each in trials:
        repeats.setdefault(each.trial.repeat, []).append(each)
    rates = [rate(repeat) for repeat in repeats.values()]
    middle = median([each.gb_per_s for each in rates])
    typical = min(rates, key=lambda each: abs(each.gb_per_s - middle))
    names: dict[str, FloorKind] = {"memcpy": "memcpy", "write": "write", "device_copy": "device", "p2p": "peer"}
    return {
        "repeats": len(rates),
        **asdict(typical),
        "tokens_per_s": typical.rooms_per_s * planned["tokens_mean"],
        "gb_per_s_per_decode_rank": typical.gb_per_s / decode_ranks,
        **{
            f"{name}_ratio": typical.gb_per_s / most if (most := roofline[kind]) else None
            for name, kind in names.items()
        },
    }


def _engine_loop(trials: Sequence[TimedTrial], reports: _Reports) -> dict[str, float | None]:
    """Returns the fields on the loops of busy engines: how much slower they ran than with an idle agent, and stalls."""
    busy = [report["loop"] for _, report in reports if "loop" in report]
    idle = [times for trial in trials for measured in trial.trial.idle_loops for times in measured.values()]
    if not busy or not idle:
        return dict.fromkeys(("engine_slowdown_ratio", "engine_stall_ms", "engine_idle_stall_ms", "engine_call_ms"))
    return {
        "engine_slowdown_ratio": slowdown(busy, idle),
        "engine_stall_ms": max(each["longest_ns"] for each in busy) / 1e6,
        # The median: on a host that runs other work, one of many short measurements has a long stall of its own.
        "engine_idle_stall_ms": median([each["longest_ns"] / 1e6 for each in idle]),
        "engine_call_ms": max(each["longest_call_ns"] for each in busy) / 1e6,
    }


def _times(timings: Sequence[RoomTiming]) -> dict[str, Any]:
    latency = summary_ms(each.latency_ns for each in timings)
    return {
        "latency_ms": latency,
        "exposed_ms": latency,  # the transfer that is not hidden by a forward is the latency after it
        "hidden_ms": summary_ms(each.hidden_ns for each in timings if each.hidden_ns is not None),
        "compute_ms": summary_ms(each.compute_ns for each in timings),
        "total_ms": summary_ms(each.success_ns - each.started_ns for each in timings),
        "done_ms": summary_ms(max(0, each.done_ns - each.success_ns) for each in timings),
        "ttft_ms": summary_ms(each.first_token_ns - each.opened_ns for each in timings),
        "tpot_ms": summary_ms(each.token_ns for each in timings if each.token_ns is not None),
    }


def _latency_over_copy(timings: Sequence[RoomTiming], gb_per_s: float | None) -> float | None:
    """Returns the median over rooms of the latency divided by the time of one copy of the same bytes."""
    if not gb_per_s or not timings:
        return None
    return median([each.latency_ns * gb_per_s / max(1, each.nbytes) for each in timings])


def _rss_overhead(reports: _Reports, names: Mapping[str, PlannedRank], ready: Mapping[str, Ready]) -> int | None:
    """Returns the largest peak RSS of a rank, less its pool, ring and staging buffers, in bytes; None on GPUs."""
    beyond = [
        report["peak_rss_bytes"] - start["pool_bytes"] - start["ring_bytes"] - start["staging_bytes"]
        for name, report in reports
        if (start := ready.get(name)) is not None and names[name]["device"] == HOST
    ]
    return max(beyond, default=None)
