"""A heat map: layer groups down, stages across, the darker the longer; what was hidden of the way at the end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from kvctl.views import units
from kvctl.views.bars import split
from kvctl.views.kinds import Kind
from kvctl.views.layers import hidden_share
from kvctl.views.report import Line, Span
from kvctl.views.view import Row
from kvctl_agent.contract.states import STAGES

_SHADES = ("  ", "░░", "▒▒", "▓▓", "██")
_STYLES = ("dim", "cyan", "cyan", "yellow", "bold red")
_VALUE = 8
_SHARE = 6


def heat_map(rows: Sequence[Row], width: int) -> list[Line]:
    """Medians over the agents of each layer group and path; shades are relative to the longest stage of all."""
    groups = _grouped(rows)
    if not groups:
        return []
    label = max(len(name) for name in groups) + 2
    cell = len(_SHADES[0]) + 1 + _VALUE + 1
    values = label + cell * len(STAGES) + _SHARE + 8 <= width
    if not values:
        cell = max(6, (width - label - 7) // len(STAGES))
    highest = max((took for group in groups.values() for took in group["took"].values()), default=0)
    lines: list[Line] = [
        [(f"{'':<{label}}", ""), *((f"{stage[: cell - 1]:<{cell}}", "bold") for stage in STAGES), ("hidden", "bold")]
    ]
    for name, group in groups.items():
        spans: list[Span] = [(f"{name:<{label}}", "")]
        for stage in STAGES:
            spans += _cell(group["took"].get(stage), highest, cell, values)
        share = group["hidden"]
        if share is None:
            spans.append((units.UNKNOWN, "dim"))
        else:
            spans += [*(split(share, _SHARE) if values else []), (f" {units.percent(round(share, 2))}", "")]
        lines.append(spans)
    legend: list[Span] = [("longest ", "dim"), (units.duration(highest), ""), ("   ", "")]
    for shade, style, text in zip(_SHADES[1:], _STYLES[1:], ("< ¼", "< ½", "< ¾", "≥ ¾"), strict=True):
        legend += [(shade, style), (f" {text}  ", "dim")]
    return [*lines, legend]


def _grouped(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Layer groups of one path and one end of it, over all agents."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (hidden_share(row) is None, row["path"], row["layers"])):
        end = "in " if hidden_share(row) is None else "out"
        found.setdefault(f"{end} {Kind.LAYERS.value.human(row['layers'])} {row['path']}", []).append(row)
    return {name: _medians(group) for name, group in found.items()}


def _medians(rows: Sequence[Row]) -> dict[str, Any]:
    took = {}
    for stage in STAGES:
        known = [at for row in rows if (at := (row["stages"].get(stage) or {}).get("p50_ns")) is not None]
        if known:
            took[stage] = median(known)
    shares = [share for row in rows if (share := hidden_share(row)) is not None]
    return {"took": took, "hidden": median(shares) if shares else None}


def _cell(took: float | None, highest: float, cell: int, values: bool) -> list[Span]:
    if took is None:
        return [(f"{'·':<{cell}}", "dim")]
    level = min(4, 1 + int(took / highest * 4)) if highest and took > 0 else 0
    if values:
        return [(f"{_SHADES[level]} ", _STYLES[level]), (f"{units.duration(round(took)):>{_VALUE}} ", "")]
    glyph = _SHADES[level][0] * (cell - 1)
    return [(f"{glyph} ", _STYLES[level])]
