"""View 3: rings with their watermarks, what lies in the chosen one, and which writers wait for what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from textual.app import ComposeResult
from textual.containers import Container

from kvctl.client.calls import Call
from kvctl.render.report import Line
from kvctl.render.staging import allocation_legend, draw_ring
from kvctl.render.view import Row
from kvctl.tui.panels.panel import STATUS, Panel, show
from kvctl.tui.readings import Question
from kvctl.tui.store import Store
from kvctl.tui.table_specs import ALLOCATIONS_SHEET, GATED_SHEET, STAGING_SHEET, TableQuery
from kvctl.tui.widgets.picture import Picture
from kvctl.tui.widgets.table import Table

_WIDE = 150
_ALL_MAPS = 6  # rows of the panel for each map, where all are drawn


class StagingPanel(Panel):
    """The table chooses an agent; its ring is drawn, and its allocations are listed."""

    DEFAULT_CSS = """
    StagingPanel #staging-table { height: auto; max-height: 34%; min-height: 4; }
    StagingPanel #staging-map { max-height: 50%; }
    StagingPanel #staging-below { height: 1fr; layout: vertical; }
    StagingPanel #staging-below.wide { layout: horizontal; }
    """

    def compose(self) -> ComposeResult:
        yield Table("staging", id="staging-table")
        yield Picture(id="staging-map")
        with Container(id="staging-below"):
            yield Table("allocations", id="staging-allocations")
            yield Table("gated parts", id="staging-gated")

    @property
    def main(self) -> Table:
        return self.query_one("#staging-table", Table)

    def question(self, store: Store) -> Question:
        return Question("staging", (STATUS, Call("staging")))

    def size_changed(self, width: int, height: int) -> None:
        self.query_one("#staging-below").set_class(width >= _WIDE, "wide")

    def render_store(self, store: Store, wish: TableQuery) -> None:
        answers = store.rows("staging")
        show(self.main, STAGING_SHEET, answers, store, wish)
        self.main.fit()
        rings = [answer for answer in answers if answer["ring"] is not None]
        chosen = self._chosen(rings)
        picture = self.query_one("#staging-map", Picture)
        if not rings:
            words = "no decode rank has a staging ring" if answers else "not read yet"
            picture.show(lambda width: [[(words, "dim")]], ([("ring", "")], []))
        else:
            few = len(rings) * _ALL_MAPS <= self.size.height // 2
            drawn = rings if few else [chosen]
            picture.show(lambda width: _maps(drawn, width), ([("ring" if len(drawn) == 1 else "rings", "")], []))
        shown = rings if not answers or self._on_writer() else [chosen] if chosen else []
        rows = [{"agent": ring["agent"], **each} for ring in shown if ring for each in ring["ring"]["allocations"]]
        show(self.query_one("#staging-allocations", Table), ALLOCATIONS_SHEET, rows, store, wish)
        gated: list[Row] = [{"agent": answer["agent"], **part} for answer in answers for part in answer["gated"]]
        show(self.query_one("#staging-gated", Table), GATED_SHEET, gated, store, wish, note=_why(gated))

    def _on_writer(self) -> bool:
        return self.main.row is not None and self.main.row["ring"] is None

    def _chosen(self, rings: Sequence[Row]) -> Row | None:
        """The ring under the cursor, else the first one."""
        row = self.main.row
        if row is not None and row["ring"] is not None:
            return row
        return rings[0] if rings else None


def _maps(rings: Sequence[Mapping[str, Any] | None], width: int) -> list[Line]:
    lines = [line for ring in rings if ring is not None for line in draw_ring(ring, width)]
    return [*lines, allocation_legend()]


def _why(gated: Sequence[Row]) -> str:
    """What most writers wait for."""
    reasons = [str(row["waiting_for"]).split()[0] for row in gated]
    return ", ".join(f"{reasons.count(reason)} for {reason}" for reason in sorted(set(reasons)))
