"""How full each decode rank's ring is, as many to a line as there is room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvctl.render import units
from kvctl.render.report import Line, Span
from kvctl.render.view import Row
from kvctl.tui.pictures.compose import padded
from kvctl.tui.pictures.sparkline import sparkline
from kvctl.tui.trends import Series

_FULL_CELL, _FREE_CELL = "━", "─"
_GAUGE = 10
_USE = 16  # ` 100 % of 64 MiB`
_GAP = 3
_SHORTEST = 6  # curve that is worth its cells
_FULL = 0.8  # above it, writers soon wait


def gauges(
    statuses: Sequence[Row], past: Mapping[str, Series], stale: Sequence[str], width: int, most: int
) -> tuple[list[Line], int]:
    """Gauges of all ranks that have a ring.

    Args:
        stale: agents that do not answer at present.
        most: lines at most; the fullest rings are shown where not all have room.

    Returns:
        The lines, and how many rings are not in them.
    """
    ranks = [row for row in statuses if row.get("ring") and row["ring"]["size_bytes"]]
    if not ranks:
        return [[("no decode rank has a staging ring" if statuses else "not read yet", "dim")]], 0
    names = max(len(row["name"]) for row in ranks)
    narrowest = names + 1 + _GAUGE + _USE + _GAP
    across = max(1, min(width // narrowest, -(-len(ranks) // most)))
    left_out = max(0, len(ranks) - across * most)
    if left_out:
        fullest = sorted(ranks, key=_ratio, reverse=True)[: across * most]
        ranks = [row for row in ranks if row in fullest]
    cell = width // across
    drawn = [_gauge(row, past.get(row["name"]), names, cell - _GAP, row["name"] in stale) for row in ranks]
    lines: list[Line] = [
        [span for each in drawn[first : first + across] for span in padded(each, cell)]
        for first in range(0, len(drawn), across)
    ]
    return lines, left_out


def _ratio(row: Row) -> float:
    return float(row["ring"]["used_bytes"] / row["ring"]["size_bytes"])


def _gauge(row: Row, past: Series | None, names: int, width: int, stale: bool) -> list[Span]:
    ring, ratio = row["ring"], _ratio(row)
    style = "dim" if stale else "bold yellow" if ratio > _FULL else "cyan"
    high = f"  high {units.percent(round(ring['high_water_bytes'] / ring['size_bytes'], 2)):<6}"
    use = f"{units.percent(round(ratio, 2)):>6} of {units.size(ring['size_bytes'])}"
    full = round(max(0.0, min(1.0, ratio)) * _GAUGE)
    spans: list[Span] = [
        (f"{row['name']:<{names}} ", "dim" if stale else ""),
        (_FULL_CELL * full, style),
        (_FREE_CELL * (_GAUGE - full), "dim"),
        (use, "dim" if stale else "bold"),
    ]
    left = width - names - 1 - _GAUGE - len(use)
    if left >= len(high):
        spans.append((high, "dim"))
        left -= len(high)
    if past is not None and left > _SHORTEST:
        spans.append((sparkline(past, left, top=1.0)[0], style))
    return spans
