"""View 2: active rooms, one row per room and rank. View 7: failed rooms and their causes. View 8: rooms that ended."""

from __future__ import annotations

from textual.app import ComposeResult

from kvctl.client.calls import Call
from kvctl.render.rooms import CAUSES, FAILED, HISTORY, ROOMS, cause_rows
from kvctl.tui.feed import Question
from kvctl.tui.listings import TableQuery
from kvctl.tui.panels.panel import STATUS_CALL, Panel, show
from kvctl.tui.store import Store
from kvctl.tui.widgets import Table

# Maximum number of rows of all agents together: as many as can be decoded and sorted each second with a few percent of
# a core. Agents answer with their oldest rooms first, so that the youngest are left out.
_MAX_ROOMS = 2_000
_MIN_ROOMS = 2
# Maximum number of reports of all agents together; every rank of a failed room reports it, so there are fewer rooms.
_MAX_FAILED = 1_000
_MIN_FAILED = 2
_FIRST_LIMIT = 20  # before any agent is known


def _limit(store: Store, total: int, minimum: int) -> int:
    """Returns the maximum number of rows per agent.

    Args:
        total: limit for all agents together.
        minimum: lower bound of the result.
    """
    return max(minimum, total // len(store.agents)) if store.agents else _FIRST_LIMIT


class RoomsPanel(Panel):
    """Table of active rooms; in a large fleet only the oldest rooms of each agent."""

    MAIN_TABLE = "rooms-table"

    def compose(self) -> ComposeResult:
        yield Table("rooms", id="rooms-table")

    def question(self, store: Store) -> Question:
        return Question("rooms", (STATUS_CALL, Call("rooms", {"limit": _limit(store, _MAX_ROOMS, _MIN_ROOMS)})))

    def render_store(self, store: Store, query: TableQuery) -> None:
        rows = store.rows("rooms")
        active = sum(sum(status["rooms"].values()) for status in store.rows("status"))
        limit = _limit(store, _MAX_ROOMS, _MIN_ROOMS)
        cut = active > len(rows) and len(rows) >= limit
        note = f"the oldest {limit} of each agent, of {active:,}" if cut else ""
        show(self.main, ROOMS, rows, store, query, note)


class HistoryPanel(Panel):
    """Table of the rooms that ended last, one row per room and rank."""

    MAIN_TABLE = "history-table"

    def compose(self) -> ComposeResult:
        yield Table("ended rooms", follows=0, id="history-table")

    def question(self, store: Store) -> Question:
        return Question("history", (STATUS_CALL, Call("history", {"limit": _limit(store, _MAX_ROOMS, _MIN_ROOMS)})))

    def render_store(self, store: Store, query: TableQuery) -> None:
        show(self.main, HISTORY, store.finished_rooms(), store, query)


class FailedPanel(Panel):
    """Tables of the causes of failures and of failed rooms; a filter applies to the rooms, and counts only those."""

    DEFAULT_CSS = "FailedPanel #failed-causes { height: auto; max-height: 30%; }"
    MAIN_TABLE = "failed-table"

    def compose(self) -> ComposeResult:
        yield Table("causes of failed rooms", id="failed-causes")
        yield Table("failed rooms", follows=0, id="failed-table")

    def question(self, store: Store) -> Question:
        return Question("failed", (STATUS_CALL, Call("failed", {"limit": _limit(store, _MAX_FAILED, _MIN_FAILED)})))

    def render_store(self, store: Store, query: TableQuery) -> None:
        rows = store.failed_rooms()
        dropped = sum(answer["dropped_total"] for answer in store.rows("failed"))
        note = f"{dropped:,} records no longer kept (failed_rooms)" if dropped else ""
        show(self.main, FAILED, rows, store, query, note)
        causes = self.query_one("#failed-causes", Table)
        show(causes, CAUSES, cause_rows(self.main.shown), store, TableQuery())
        causes.fit_height()
