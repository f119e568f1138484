"""Draws where the time of a layer group's parts goes, stage after stage, and how much of it compute hid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvctl.views import units
from kvctl.views.bars import STAGE_GLYPHS, legend, segments
from kvctl.views.kinds import Kind
from kvctl.views.layers import hidden_share
from kvctl.views.report import Line, Span
from kvctl.views.view import Row
from kvctl_agent.contract.states import STAGES


def draw(rows: Sequence[Row], width: int) -> list[Line]:
    """One bar per row on a common axis: medians end to end, or the real moments where the rows have them."""
    labels = [f"{row['agent']} {Kind.LAYERS.value.human(row['layers'])} {row['path']}" for row in rows]
    margin = max(map(len, labels)) + 2
    cells = max(10, width - margin - 22)
    moments = [_moments(row) for row in rows]
    known = [at for parts in moments for part in parts for at in part.values()]
    start = min(known, default=0)
    bars = [_real(parts, start) if parts else _stacked(row) for row, parts in zip(rows, moments, strict=True)]
    end = max((stop for bar in bars for _, stop, _ in bar), default=0.0)
    axis = units.duration(end)
    lines: list[Line] = [[(f"{'':<{margin}}0{axis:>{cells - 1}}", "dim")]]
    for label, bar, row in zip(labels, bars, rows, strict=True):
        lines.append([(f"{label:<{margin}}", ""), *segments(bar, end, cells), *_exposure(row)])
    return [*lines, legend()]


def _exposure(row: Row) -> list[Span]:
    share = hidden_share(row)
    if share is None:
        exposed = row.get("exposed_ns")
        return [] if exposed is None else [(f"  exposed {units.duration(exposed)}", "dim")]
    return [(f"  {units.percent(share):>6} hidden", "green" if share >= 0.5 else "")]


def _moments(row: Row) -> list[dict[str, int]]:
    return [{stage: at for stage, at in part.items() if at is not None} for part in row.get("moments") or ()]


def _stacked(row: Row) -> list[tuple[float, float, Span]]:
    pieces, at = [], 0.0
    for stage, glyph in STAGE_GLYPHS.items():
        took = (row["stages"].get(stage) or {}).get("p50_ns")
        if took:
            pieces.append((at, at + took, glyph))
            at += took
    return pieces


def _real(parts: Sequence[Mapping[str, Any]], start: int) -> list[tuple[float, float, Span]]:
    return [piece for part in parts for piece in life(part, start)]


def life(moments: Mapping[str, int], start: int) -> list[tuple[float, float, Span]]:
    """Intervals of one part: each stage lasts from the moment before it to its own."""
    pieces: list[tuple[float, float, Span]] = []
    before: int | None = None
    for stage in STAGES:
        at = moments.get(stage)
        if at is None:
            continue
        if before is not None and stage in STAGE_GLYPHS:
            pieces.append((float(before - start), float(at - start), STAGE_GLYPHS[stage]))
        before = at if before is None else max(before, at)
    return pieces
