"""View 6: events from the flight recorders of all agents, shown as they occur."""

from __future__ import annotations

from textual.app import ComposeResult

from kvctl.client.calls import Call
from kvctl.render.events import EVENTS
from kvctl.tui.feed import Question
from kvctl.tui.listings import TableQuery
from kvctl.tui.panels.panel import STATUS_CALL, Panel, show
from kvctl.tui.store import Store
from kvctl.tui.widgets import Table

# Maximum number of events per agent and reading. The latest events are read, because the same call is sent to all
# agents and cannot contain the position from which to continue at each of them.
_MAX_EVENTS = 200
_MIN_EVENTS = 30
_MAX_TOTAL = 3_200


class EventsPanel(Panel):
    """Table of events; the cursor stays on the last event until the user moves it."""

    MAIN_TABLE = "events-table"

    def compose(self) -> ComposeResult:
        yield Table("events", follows=-1, id="events-table")

    def question(self, store: Store) -> Question:
        agents = max(1, len(store.agents))
        limit = max(_MIN_EVENTS, min(_MAX_EVENTS, _MAX_TOTAL // agents)) if store.agents else _MIN_EVENTS
        return Question("events", (STATUS_CALL, Call("events", {"limit": limit})))

    def render_store(self, store: Store, query: TableQuery) -> None:
        note = f"{store.events_missed:,} not shown: more than one reading can contain" if store.events_missed else ""
        show(self.main, EVENTS, list(store.events), store, query, note)
