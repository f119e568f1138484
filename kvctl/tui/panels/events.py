"""View 6: events of the flight recorders of all agents, as they are written."""

from __future__ import annotations

from textual.app import ComposeResult

from kvctl.client.calls import Call
from kvctl.tui.feed import Question
from kvctl.tui.panels.panel import STATUS, Panel, show
from kvctl.tui.store import Store
from kvctl.tui.table_specs import EVENTS_TABLE, TableQuery
from kvctl.tui.widgets import Table

# Events per agent and reading: the latest, because one question for all agents cannot contain a position for each.
_MAX_EVENTS = 200
_MIN_EVENTS = 30
_MAX_TOTAL = 3_200


class EventsPanel(Panel):
    """Live tail; the cursor follows the end until the user moves it away."""

    MAIN_TABLE = "events-table"

    def compose(self) -> ComposeResult:
        yield Table("events", tail=True, id="events-table")

    def question(self, store: Store) -> Question:
        agents = max(1, len(store.agents))
        limit = max(_MIN_EVENTS, min(_MAX_EVENTS, _MAX_TOTAL // agents)) if store.agents else _MIN_EVENTS
        return Question("events", (STATUS, Call("events", {"limit": limit})))

    def render_store(self, store: Store, query: TableQuery) -> None:
        note = f"{store.events_missed:,} not shown: more than one reading can contain" if store.events_missed else ""
        show(self.main, EVENTS_TABLE, list(store.events), store, query, note)
