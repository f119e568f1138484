"""Totals over a fleet.

Every rank that takes part in a room reports it, so rooms are counted on one rank per decode instance (tp, pp and cp 0),
and bytes on all decode ranks. If no decode rank answered, prefill ranks are used. Quantiles of different ranks cannot
be merged: p50 is the median of the ranks' p50, p99 the maximum of their p99.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

Status = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """Totals of one fleet at one moment; None is unknown.

    Attributes:
        prefill_active: rooms open on prefill ranks, including those that no decode rank has opened.
        counted: role of the ranks on which rooms, bytes and latency were counted: "decode" or "prefill".
        waiting: agents that wait for others, with the reason they report.
        draining: agents that accept no new rooms, with the time since their drain (ns).
        gb_per_s: sum of the ranks' rates, each over the wall-clock time of its own transfers.
    """

    agents: int
    counted: str
    roles: Mapping[str, int]
    active: Mapping[str, int]
    prefill_active: int
    succeeded_total: int
    failed_total: int
    bytes_total: int
    gb_per_s: float | None
    rooms_per_s: float | None
    ring_used_bytes: int
    ring_high_water_bytes: int
    ring_size_bytes: int
    p50_ns: int | None
    p99_ns: int | None
    latencies: int
    waiting: Sequence[tuple[str, str]]
    draining: Sequence[tuple[str, int | None]]

    @property
    def ring_ratio(self) -> float | None:
        return self.ring_used_bytes / self.ring_size_bytes if self.ring_size_bytes else None


def summarise(statuses: Iterable[Status]) -> FleetSummary:
    """Totals the answers to `status`."""
    ranks = list(statuses)
    decode = [rank for rank in ranks if rank["role"] == "decode"]
    counted = decode or ranks
    leads = _leads(counted)
    active: Counter[str] = Counter()
    finished: Counter[str] = Counter()
    for rank in leads:
        active.update(rank["rooms"])
        finished.update(rank["rooms_finished_total"])
    rings = [rank["ring"] for rank in ranks if rank["ring"]]
    p50s = [rank["latency"]["p50_ns"] for rank in counted if rank["latency"]["p50_ns"] is not None]
    p99s = [rank["latency"]["p99_ns"] for rank in counted if rank["latency"]["p99_ns"] is not None]
    return FleetSummary(
        agents=len(ranks),
        counted="decode" if decode else "prefill",
        roles=Counter(rank["role"] for rank in ranks),
        active=active,
        prefill_active=sum(
            number
            for rank in _leads([rank for rank in ranks if rank["role"] == "prefill"])
            for number in rank["rooms"].values()
        ),
        succeeded_total=finished["Success"],
        failed_total=finished["Failed"],
        bytes_total=sum(rank["bytes_total"] for rank in counted),
        gb_per_s=_sum(rank["rate"]["gb_per_s"] for rank in counted),
        rooms_per_s=_sum(rank["rate"]["rooms_per_s"] for rank in leads),
        ring_used_bytes=sum(ring["used_bytes"] for ring in rings),
        ring_high_water_bytes=sum(ring["high_water_bytes"] for ring in rings),
        ring_size_bytes=sum(ring["size_bytes"] for ring in rings),
        p50_ns=median_low(p50s) if p50s else None,
        p99_ns=max(p99s, default=None),
        latencies=sum(rank["latency"]["count"] for rank in counted),
        waiting=[(rank["name"], rank["waiting_for"]) for rank in ranks if rank["waiting_for"]],
        draining=[(rank["name"], rank.get("draining_age_ns")) for rank in ranks if rank.get("draining")],
    )


def _leads(ranks: Sequence[Status]) -> Sequence[Status]:
    """Returns one rank of each instance and dp group; all ranks if none of these answered."""
    return [rank for rank in ranks if not any(rank["rank"].get(axis) for axis in ("tp", "pp", "cp"))] or ranks


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class Rates:
    """Changes between two summaries per second of wall clock; None if the counters cannot tell."""

    gb_per_s: float | None = None
    succeeded_per_s: float | None = None
    failed_per_s: float | None = None


def rates(before: FleetSummary, after: FleetSummary, elapsed_ns: int) -> Rates:
    """Computes rates from the differences of counters; None if a counter decreased, because ranks joined or left."""
    moved = after.bytes_total - before.bytes_total
    succeeded = after.succeeded_total - before.succeeded_total
    failed = after.failed_total - before.failed_total
    if elapsed_ns <= 0 or min(moved, succeeded, failed) < 0 or before.agents != after.agents or not after.agents:
        return Rates()
    seconds = elapsed_ns / 1e9
    return Rates(moved / elapsed_ns, succeeded / seconds, failed / seconds)
