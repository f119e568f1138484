"""How full each decode rank's ring is, as many to a line as there is room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvctl.tui.pictures.compose import cut, padded
from kvctl.tui.pictures.sparkline import sparkline
from kvctl.tui.trends import Series
from kvctl.views import units
from kvctl.views.bars import filled
from kvctl.views.report import Line, Span
from kvctl.views.view import Row

_NARROWEST = 56
_GAUGE = 12
_FULL = 0.8  # above it, writers soon wait


def gauges(
    statuses: Sequence[Row], past: Mapping[str, Series], stale: Sequence[str], width: int, most: int
) -> list[Line]:
    """Gauges of all ranks that have a ring.

    Args:
        stale: agents that do not answer at present.
        most: lines at most; the fullest rings come first where not all have room.
    """
    ranks = [row for row in statuses if row.get("ring") and row["ring"]["size_bytes"]]
    if not ranks:
        return [[("no decode rank has a staging ring", "dim")]]
    across = max(1, min(width // _NARROWEST, len(ranks)))
    left_out = max(0, len(ranks) - across * most)
    if left_out:
        fullest = sorted(ranks, key=_ratio, reverse=True)[: across * most]
        ranks = [row for row in ranks if row in fullest]
    cell = width // across
    names = max(len(row["name"]) for row in ranks)
    drawn = [_gauge(row, past.get(row["name"]), names, cell - 2, row["name"] in stale) for row in ranks]
    lines: list[Line] = [
        [span for each in drawn[first : first + across] for span in padded(each, cell)]
        for first in range(0, len(drawn), across)
    ]
    if left_out:
        lines[-1] = cut([*lines[-1], (f"and {left_out} less full", "dim")], width)
    return lines


def _ratio(row: Row) -> float:
    return float(row["ring"]["used_bytes"] / row["ring"]["size_bytes"])


def _gauge(row: Row, past: Series | None, names: int, width: int, stale: bool) -> list[Span]:
    ring, ratio = row["ring"], _ratio(row)
    style = "dim" if stale else "bold yellow" if ratio > _FULL else "cyan"
    high = units.percent(round(ring["high_water_bytes"] / ring["size_bytes"], 2))
    use = f"{units.percent(round(ratio, 2)):>6} of {units.size(ring['size_bytes'])}"
    spans: list[Span] = [
        (f"{row['name']:<{names}} ", "dim" if stale else ""),
        (filled(ratio, _GAUGE), style),
        (use, "dim" if stale else "bold"),
        (f"  high {high:<6}", "dim"),
    ]
    taken = names + 1 + _GAUGE + len(use) + 13
    if past is not None and width - taken > 5:
        spans.append((sparkline(past, width - taken, top=1.0)[0], style))
    return spans
