"""Views 2 and 7: active rooms, one row per room and rank; and rooms that failed, each once, with the first cause."""

from __future__ import annotations

from textual.app import ComposeResult

from kvctl.client.calls import Call
from kvctl.render.rooms import failure_counts
from kvctl.tui.panels.panel import STATUS, Panel, show
from kvctl.tui.readings import Question
from kvctl.tui.store import Store
from kvctl.tui.table_specs import FAILED_SHEET, ROOMS_SHEET, TableQuery
from kvctl.tui.widgets.picture import Picture
from kvctl.tui.widgets.table import Table

# Rows over all agents: as many as can be decoded and sorted each second for a few percent of a core. Agents answer
# with their oldest rooms first, so what is left out is what has only just begun.
_ROWS = 2_000
_LEAST = 20


class RoomsPanel(Panel):
    """All rooms of a small fleet, the oldest of a large one."""

    def compose(self) -> ComposeResult:
        yield Table("rooms", id="rooms-table")

    @property
    def main(self) -> Table:
        return self.query_one("#rooms-table", Table)

    def question(self, store: Store) -> Question:
        return Question("rooms", (STATUS, Call("rooms", {"limit": self._limit(store)})))

    def render_store(self, store: Store, wish: TableQuery) -> None:
        rows = store.rows("rooms")
        active = sum(sum(status["rooms"].values()) for status in store.rows("status"))
        limit = self._limit(store)
        cut = active > len(rows) and len(rows) >= limit
        note = f"the oldest {limit} of each agent, of {active:,}" if cut else ""
        show(self.main, ROOMS_SHEET, rows, store, wish, note)

    def _limit(self, store: Store) -> int:
        return max(_LEAST, _ROWS // len(store.agents)) if store.agents else _LEAST


# Rows over all agents, each second; every rank of a room tells of it.
_FAILED_ROWS = 1_000
_FAILED_LEAST = 50


class FailedPanel(Panel):
    """How many failed of what, and which."""

    def compose(self) -> ComposeResult:
        yield Picture(id="failed-causes")
        yield Table("failed rooms", id="failed-table")

    @property
    def main(self) -> Table:
        return self.query_one("#failed-table", Table)

    def question(self, store: Store) -> Question:
        limit = max(_FAILED_LEAST, _FAILED_ROWS // len(store.agents)) if store.agents else _FAILED_LEAST
        return Question("failed", (STATUS, Call("failed", {"limit": limit})))

    def render_store(self, store: Store, wish: TableQuery) -> None:
        rows = store.failed_rooms()
        dropped = sum(answer["dropped_total"] for answer in store.rows("failed"))
        self.query_one("#failed-causes", Picture).show(lambda width: [failure_counts(rows)])
        note = f"{dropped:,} records no longer kept (failed_rooms)" if dropped else ""
        show(self.main, FAILED_SHEET, rows, store, wish, note)
