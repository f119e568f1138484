"""View 7: rooms that failed, each once, with the first cause; Enter leads into the room."""

from __future__ import annotations

from textual.app import ComposeResult

from kvctl.client.calls import Call
from kvctl.render.failed_rooms import causes
from kvctl.tui.panels.panel import STATUS, Panel, show
from kvctl.tui.readings import Question
from kvctl.tui.store import Store
from kvctl.tui.table_specs import FAILED_SHEET, TableQuery
from kvctl.tui.widgets.picture import Picture
from kvctl.tui.widgets.table import Table

# Rows over all agents, each second; every rank of a room tells of it.
_ROWS = 1_000
_LEAST = 50


class FailedPanel(Panel):
    """How many failed of what, and which."""

    def compose(self) -> ComposeResult:
        yield Picture(id="failed-causes")
        yield Table("failed rooms", id="failed-table")

    @property
    def main(self) -> Table:
        return self.query_one("#failed-table", Table)

    def question(self, store: Store) -> Question:
        limit = max(_LEAST, _ROWS // len(store.agents)) if store.agents else _LEAST
        return Question("failed", (STATUS, Call("failed", {"limit": limit})))

    def render_store(self, store: Store, wish: TableQuery) -> None:
        rows = store.failed_rooms()
        dropped = sum(answer["dropped_total"] for answer in store.rows("failed"))
        self.query_one("#failed-causes", Picture).show(lambda width: [causes(rows)])
        note = f"{dropped:,} records no longer kept (failed_rooms)" if dropped else ""
        show(self.main, FAILED_SHEET, rows, store, wish, note)
