"""View 3: staging rings with their watermarks, the allocations of one ring, and the gated parts of all writers."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Container

from kvctl.render.staging import ALLOCATIONS, GATED, STAGING, allocation_legend, draw_ring
from kvctl.render.view import Row
from kvctl.tui.listings import TableQuery
from kvctl.tui.panels.panel import Panel, show
from kvctl.tui.store import Store
from kvctl.tui.widgets import Picture, Table

_WIDE = 150
_LINES_PER_RING = 6


class StagingPanel(Panel):
    """Table of agents, with the ring map and the allocations of the agent under the cursor, and all gated parts."""

    DEFAULT_CSS = """
    StagingPanel #staging-table { height: auto; max-height: 34%; min-height: 4; }
    StagingPanel #staging-map { max-height: 50%; }
    StagingPanel #staging-below { height: 1fr; layout: vertical; }
    StagingPanel #staging-below.wide { layout: horizontal; }
    """
    COMMAND = "staging"
    MAIN_TABLE = "staging-table"

    def compose(self) -> ComposeResult:
        yield Table("staging", id="staging-table")
        yield Picture(id="staging-map")
        with Container(id="staging-below"):
            yield Table("allocations", id="staging-allocations")
            yield Table("gated parts", id="staging-gated")

    def size_changed(self, width: int, height: int) -> None:
        self.query_one("#staging-below").set_class(width >= _WIDE, "wide")

    def render_store(self, store: Store, query: TableQuery) -> None:
        answers = store.rows("staging")
        show(self.main, STAGING, answers, store, query)
        self.main.fit_height()
        rings = [answer for answer in answers if answer["ring"] is not None]
        selected = self.main.row
        on_writer = selected is not None and selected["ring"] is None
        # The ring of the agent under the cursor; if it has none, the first ring.
        chosen = [selected] if selected is not None and not on_writer else rings[:1]
        picture = self.query_one("#staging-map", Picture)
        if rings:
            all_fit = len(rings) * _LINES_PER_RING <= self.size.height // 2
            drawn = rings if all_fit else chosen
            picture.show(
                lambda width: [*(line for ring in drawn for line in draw_ring(ring, width)), allocation_legend()],
                ([("ring" if len(drawn) == 1 else "rings", "")], []),
            )
        else:
            text = "no decode rank has a staging ring" if answers else "not read yet"
            picture.show(lambda width: [[(text, "dim")]], ([("ring", "")], []))
        rows = [
            {"agent": answer["agent"], **allocation}
            for answer in (rings if on_writer else chosen)
            for allocation in answer["ring"]["allocations"]
        ]
        show(self.query_one("#staging-allocations", Table), ALLOCATIONS, rows, store, query)
        gated: list[Row] = [{"agent": answer["agent"], **part} for answer in answers for part in answer["gated"]]
        show(self.query_one("#staging-gated", Table), GATED, gated, store, query, note=_reasons(gated))


def _reasons(gated: Sequence[Row]) -> str:
    """Returns the number of gated parts for each reason, as text such as `2 for grant, 5 for watermark`."""
    reasons = [str(row["waiting_for"]).split()[0] for row in gated]
    return ", ".join(f"{reasons.count(reason)} for {reason}" for reason in sorted(set(reasons)))
