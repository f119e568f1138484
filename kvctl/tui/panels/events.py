"""View 6: the flight recorders of all agents as they are written."""

from __future__ import annotations

from textual.app import ComposeResult

from kvctl.client.calls import Call
from kvctl.tui.panels.panel import STATUS, Panel, show
from kvctl.tui.readings import Question
from kvctl.tui.store import Store
from kvctl.tui.table_specs import EVENTS_SHEET, TableQuery
from kvctl.tui.widgets.table import Table

# Each agent's latest, each time: asking for what follows a place would need a place for each agent.
_FIRST = 200
_ALL = 3_200
_LEAST = 30


class EventsPanel(Panel):
    """A live tail; the cursor follows the end until it is moved away from it."""

    def compose(self) -> ComposeResult:
        yield Table("events", tail=True, id="events-table")

    @property
    def main(self) -> Table:
        return self.query_one("#events-table", Table)

    def question(self, store: Store) -> Question:
        limit = max(_LEAST, min(_FIRST, _ALL // len(store.agents))) if store.agents else _LEAST
        return Question("events", (STATUS, Call("events", {"limit": limit})))

    def render_store(self, store: Store, wish: TableQuery) -> None:
        note = f"{store.events_missed:,} came too fast to be shown" if store.events_missed else ""
        show(self.main, EVENTS_SHEET, list(store.events), store, wish, note)
