"""Holds what was predicted against what the bench measures, path by path in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from kvctl.lab.bench.fleet import Fleet
from kvctl.lab.bench.program import SideBySide
from kvctl.lab.bench.progress import Steps
from kvctl.lab.bench.session import Session, laps_of, measure
from kvctl.lab.ranks.plan import Plan
from kvctl.lab.ranks.request import PlanRequest
from kvctl.lab.tune.model import Prediction

FAR = 0.3
"""A prediction that is further off than this is said to be."""


def confirm(
    plan: Plan, request: PlanRequest, predicted: Mapping[str, Prediction], repeat: int, steps: Steps
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the paths of `plan` in turns; a row for each that was predicted, and what went wrong.

    Raises:
        CliError, FleetError: the fleet cannot be started, or a rank died.
    """
    with ExitStack() as stack:
        fleet = stack.enter_context(Fleet(plan, request))
        session = Session(fleet, plan, SideBySide(request.layer_ms, repeat), "full", 0.0, "", steps)
        steps.laps(laps_of(session.program, plan))
        measure([session], steps)
        fleet.stop()
    rows = [compared(row, predicted[row["path"]]) for row in session.results.rows() if row["path"] in predicted]
    return rows, session.results.trouble


def compared(row: Mapping[str, Any], said: Prediction) -> dict[str, Any]:
    """One path: what was said, what was measured, and how far that is off."""
    measured_us = row["latency_ms"]["p50"] * 1e3
    return {
        "path": row["path"],
        "predicted_rooms_per_s": said.rooms_per_s,
        "measured_rooms_per_s": row["rooms_per_s"],
        "rooms_off_ratio": said.rooms_per_s / row["rooms_per_s"] - 1 if row["rooms_per_s"] else None,
        "predicted_p50_ns": round(said.p50_us * 1e3),
        "measured_p50_ns": round(measured_us * 1e3),
        "p50_off_ratio": said.p50_us / measured_us - 1,
        "bound": said.bound,
    }


def remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What should be said of predictions that are far off, and whether the order of the paths was right."""
    lines = []
    for row in rows:
        off = row["rooms_off_ratio"]
        if off is not None and abs(off) > FAR:
            much = "more" if off > 0 else "fewer"
            limit = "the latency of lone rooms" if row["bound"] == "latency" else f"the {row['bound']}"
            lines.append(
                f"{row['path']}: the model says {abs(off):.0%} {much} rooms a second than were measured; it took "
                f"{limit} for the limit"
            )
    said = [row["path"] for row in sorted(rows, key=lambda row: -row["predicted_rooms_per_s"])]
    seen = [row["path"] for row in sorted(rows, key=lambda row: -(row["measured_rooms_per_s"] or 0))]
    if len(rows) > 1:
        lines.append(
            f"the best path is {seen[0]}, as predicted"
            if said[0] == seen[0]
            else f"the model prefers {said[0]}, the bench {seen[0]}"
        )
    return lines
