"""View 4: time of each stage by layer group, and the share of the transfer hidden behind compute."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from textual.app import ComposeResult

from kvctl.client.calls import Call
from kvctl.render import units
from kvctl.render.bars import STAGE_GLYPHS, split
from kvctl.render.layers import draw_waterfall, hidden_share
from kvctl.render.report import Line, Span
from kvctl.render.view import Kind, Row
from kvctl.tui.feed import Question
from kvctl.tui.panels.panel import STATUS, Panel, show
from kvctl.tui.store import Store
from kvctl.tui.table_specs import LAYERS_TABLE, TableQuery, listing
from kvctl.tui.widgets import Picture, Table
from kvctl_agent.contract.states import STAGES

_MEDIANS: Line = [("medians over the agents", "dim")]
_SHADES = ("  ", "░░", "▒▒", "▓▓", "██")
_STYLES = ("dim", "cyan", "cyan", "yellow", "bold red")
_VALUE_WIDTH = 7
_BAR_WIDTH = 6
_HIDDEN_WIDTH = 8
_MIN_CELL_WIDTH = 6


def over_agents(rows: Sequence[Row]) -> list[Row]:
    """Combines rows of agents into one row of medians for each layer group and path, writers first, then readers.

    Args:
        rows: rows of the agents' answers to `layers`.
    """
    found: dict[tuple[bool, str, int, int], list[Row]] = {}
    for row in rows:
        reads = hidden_share(row) is None and "arrive" in row["stages"]
        found.setdefault((reads, row["path"], row["layers"][0], row["layers"][1]), []).append(row)
    return [_median_row(key[0], group) for key, group in sorted(found.items())]


def _median_row(reads: bool, rows: Sequence[Row]) -> Row:
    stages = {
        stage: {"p50_ns": _median([(row["stages"].get(stage) or {}).get("p50_ns") for row in rows])} for stage in STAGES
    }
    return {
        "agent": "readers" if reads else "writers",
        "layers": rows[0]["layers"],
        "path": rows[0]["path"],
        "parts": sum(row["parts"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "stages": stages,
        "exposed_ns": _median([row["exposed_ns"] for row in rows]),
        "overlapped_ns": _median([row["overlapped_ns"] for row in rows]),
    }


def _median(values: Sequence[Any]) -> int | None:
    known = [value for value in values if value is not None]
    return round(median(known)) if known else None


def heat_map(rows: Sequence[Row], width: int) -> list[Line]:
    """Draws a heat map of stage times, with shades relative to the longest stage.

    Args:
        rows: rows from `over_agents`, one line each.
        width: width in cells; in narrow drawings the times are left out.
    """
    if not rows:
        return []
    names = [f"{row['agent']} {Kind.LAYERS.value.human(row['layers'])} {row['path']}" for row in rows]
    margin = max(map(len, names)) + 2
    stages = list(STAGE_GLYPHS)
    cell = len(_SHADES[0]) + 1 + _VALUE_WIDTH + 1
    values = margin + cell * len(stages) + _BAR_WIDTH + _HIDDEN_WIDTH <= width
    if not values:
        cell = max(_MIN_CELL_WIDTH, (width - margin - _HIDDEN_WIDTH) // len(stages))
    highest = max((_took(row, stage) or 0 for row in rows for stage in stages), default=0)
    lines: list[Line] = [
        [(" " * margin, ""), *((f"{stage[: cell - 1]:<{cell}}", "bold") for stage in stages), ("hidden", "bold")]
    ]
    for row, name in zip(rows, names, strict=True):
        spans: list[Span] = [(f"{name:<{margin}}", "")]
        for stage in stages:
            spans += _cell(_took(row, stage), highest, cell, values)
        lines.append([*spans, *_hidden(row, values)])
    legend: list[Span] = [("relative to the longest, ", "dim"), (units.duration(highest), ""), (":  ", "dim")]
    for shade, style, words in zip(_SHADES[1:], _STYLES[1:], ("< ¼", "< ½", "< ¾", "≥ ¾"), strict=True):
        legend += [(shade, style), (f" {words}  ", "dim")]
    return [*lines, legend]


def _took(row: Row, stage: str) -> int | None:
    took: int | None = row["stages"][stage]["p50_ns"]
    return took


def _hidden(row: Row, bar: bool) -> list[Span]:
    share = hidden_share(row)
    if share is None:
        return [(units.UNKNOWN, "dim")]
    return [*(split(share, _BAR_WIDTH) if bar else []), (f" {units.percent(round(share, 2))}", "")]


def _cell(took: int | None, highest: int, cell: int, values: bool) -> list[Span]:
    if took is None:
        return [(f"{'·':<{cell}}", "dim")]
    level = min(4, 1 + took * 4 // highest) if highest and took > 0 else 0
    if values:
        return [(f"{_SHADES[level]} ", _STYLES[level]), (f"{units.duration(took):<{_VALUE_WIDTH}} ", "")]
    return [(f"{_SHADES[level][0] * (cell - 1)} ", _STYLES[level])]


class LayersPanel(Panel):
    """Waterfall and heat map of layer groups, and a table of the values; a filter applies to all three."""

    DEFAULT_CSS = """
    LayersPanel #layers-waterfall { max-height: 36vh; }
    LayersPanel #layers-heat { max-height: 32vh; }
    """
    MAIN_TABLE = "layers-table"

    def compose(self) -> ComposeResult:
        yield Picture(id="layers-waterfall")
        yield Picture(id="layers-heat")
        yield Table("layer groups", id="layers-table")

    def question(self, store: Store) -> Question:
        return Question("layers", (STATUS, Call("layers")))

    def render_store(self, store: Store, query: TableQuery) -> None:
        rows = store.rows("layers")
        show(self.main, LAYERS_TABLE, rows, store, query)
        shown = over_agents(listing(LAYERS_TABLE, rows, query).rows)
        waterfall, heat = self.query_one("#layers-waterfall", Picture), self.query_one("#layers-heat", Picture)
        waterfall.show(lambda width: draw_waterfall(shown, width) if shown else [], ([("waterfall", "")], _MEDIANS))
        heat.show(lambda width: heat_map(shown, width), ([("layer groups by stage", "")], _MEDIANS))
