"""View 4: time of each stage by layer group, and the share of the transfer hidden behind compute."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from textual.app import ComposeResult

from kvctl.render.layers import LAYERS, draw_waterfall, hidden_share
from kvctl.render.report import Line
from kvctl.render.view import Row
from kvctl.tui.listings import TableQuery
from kvctl.tui.panels.panel import Panel, show
from kvctl.tui.store import Store
from kvctl.tui.widgets import Picture, Table
from kvctl_agent.contract.states import STAGES

_MEDIANS: Line = [("medians over the agents", "dim")]


def over_agents(rows: Sequence[Row]) -> list[Row]:
    """Combines rows of agents into one row of medians for each layer group and path, writers first, then readers."""
    found: dict[tuple[bool, str, int, int], list[Row]] = {}
    for row in rows:
        reads = hidden_share(row) is None and "arrive" in row["stages"]
        found.setdefault((reads, row["path"], row["layers"][0], row["layers"][1]), []).append(row)
    return [_median_row(key[0], group) for key, group in sorted(found.items())]


def _median_row(reads: bool, rows: Sequence[Row]) -> Row:
    times = [row["stages"] for row in rows]
    stages = {
        stage: {"p50_ns": _median([found["p50_ns"] for each in times if (found := each.get(stage))])}
        for stage in STAGES
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


class LayersPanel(Panel):
    """Waterfall of layer groups, and a table of the values; a filter applies to both."""

    DEFAULT_CSS = "LayersPanel #layers-waterfall { max-height: 60%; }"
    COMMAND = "layers"
    MAIN_TABLE = "layers-table"

    def compose(self) -> ComposeResult:
        yield Picture(id="layers-waterfall")
        yield Table("layer groups", id="layers-table")

    def render_store(self, store: Store, query: TableQuery) -> None:
        show(self.main, LAYERS, store.rows("layers"), store, query)
        shown = over_agents(self.main.shown)
        waterfall = self.query_one("#layers-waterfall", Picture)
        waterfall.show(lambda width: draw_waterfall(shown, width) if shown else [], ([("waterfall", "")], _MEDIANS))
