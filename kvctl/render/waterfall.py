"""Draws the time of each stage of a layer group's parts, and the share that compute hid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvctl.render import units
from kvctl.render.bars import EXPOSED, HIDDEN, STAGE_GLYPHS, legend, segments, split
from kvctl.render.kinds import Kind
from kvctl.render.layers import hidden_share
from kvctl.render.report import Line, Span
from kvctl.render.view import Row
from kvctl_agent.contract.states import STAGES

_MOST_BARS = 32
_SHARE = 8  # cells of the bar that shows what was hidden
_TAIL = 2 + _SHARE + 1 + 6
_ROOMY = 52  # with fewer cells for the bars, only the percentage is printed after them


def draw(rows: Sequence[Row], width: int) -> list[Line]:
    """Draws one bar per row on a common axis: consecutive median durations, or the actual times if the rows have them.

    A bar begins at the time at which its layer group was ready, and is followed by hidden and exposed transfer time.
    """
    shown = _most_used(rows)
    labels = [_label(row, max(8, width // 2)) for row in shown]
    margin = max(map(len, labels)) + 2
    shares = [hidden_share(row) for row in shown]
    any_share = any(share is not None for share in shares)
    roomy = width - margin >= _ROOMY
    cells = max(10, width - margin - (_TAIL if roomy else 8) * any_share)
    moments = [_moments(row) for row in shown]
    known = [at for parts in moments for part in parts for at in part.values()]
    start = min(known, default=0)
    bars = [_real(parts, start) if parts else _stacked(row) for row, parts in zip(shown, moments, strict=True)]
    end = max((stop for bar in bars for _, stop, _ in bar), default=0.0)
    axis = units.duration(end)
    lines: list[Line] = [[(f"{'':<{margin}}0{axis:>{cells - 1}}", "dim")]]
    for label, bar, share in zip(labels, bars, shares, strict=True):
        lines.append([(f"{label:<{margin}}", ""), *segments(bar, end, cells), *_exposure(share, roomy)])
    if len(rows) > len(shown):
        lines.append([(f"{len(rows) - len(shown)} more layer groups in the table only", "dim")])
    lines.append(legend())
    if any_share:
        hidden = [(HIDDEN, "green"), (" hidden behind the forward  ", "dim"), (EXPOSED, "yellow"), (" exposed", "dim")]
        lines.append(hidden if roomy else [("% of the way hidden behind the forward", "dim")])
    return lines


def _most_used(rows: Sequence[Row]) -> Sequence[Row]:
    """Selects the rows with the most parts, prefill ranks first; keeps their order."""
    places = sorted(range(len(rows)), key=lambda place: (hidden_share(rows[place]) is None, -rows[place]["parts"]))
    places = places[:_MOST_BARS]
    return [rows[place] for place in sorted(places)]


def _label(row: Row, most: int) -> str:
    text = f"{row['agent']} {Kind.LAYERS.value.human(row['layers'])} {row['path']}"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _exposure(share: float | None, roomy: bool) -> list[Span]:
    if share is None:
        return []
    bar = [("  ", ""), *split(share, _SHARE)] if roomy else []
    return [*bar, (f" {units.percent(share):>6}", "green" if share >= 0.5 else "")]


def _moments(row: Row) -> list[dict[str, int]]:
    return [{stage: at for stage, at in part.items() if at is not None} for part in row.get("moments") or ()]


def _stacked(row: Row) -> list[tuple[float, float, Span]]:
    pieces, at = [], float((row["stages"].get("ready") or {}).get("p50_ns") or 0)
    for stage, glyph in STAGE_GLYPHS.items():
        took = (row["stages"].get(stage) or {}).get("p50_ns")
        if took:
            pieces.append((at, at + took, glyph))
            at += took
    return pieces


def _real(parts: Sequence[Mapping[str, Any]], start: int) -> list[tuple[float, float, Span]]:
    return [piece for part in parts for piece in life(part, start)]


def life(moments: Mapping[str, int], start: int) -> list[tuple[float, float, Span]]:
    """Returns one interval per stage of a part, from the end of the previous stage to its own."""
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
