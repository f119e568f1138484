"""Base class of the panels, and a function that shows rows of the store in a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.containers import Vertical
from textual.message import Message

from kvctl.client.calls import Call
from kvctl.render.data import tsv
from kvctl.render.report import Line
from kvctl.render.view import Row, View
from kvctl.tui.feed import Question
from kvctl.tui.listings import TableQuery, listing
from kvctl.tui.store import Store
from kvctl.tui.widgets import Table

STATUS_CALL = Call("status")


class Panel(Vertical):
    """Base class of views and of panels that Enter opens.

    While a panel is on screen, the app sends its `question` to the agents and calls `render_store` after each reading.
    """

    DEFAULT_CSS = "Panel { height: 1fr; }"
    COMMAND: ClassVar[str] = ""
    """Command whose answers the panel shows beside those to status; panels that ask otherwise override `question`."""
    MAIN_TABLE: ClassVar[str] = ""
    """Id of the table to which filters and order apply; "" if there is none."""

    class Filtered(Message):
        """Message: the panel asks for another filter."""

        def __init__(self, filters: str) -> None:
            super().__init__()
            self.filters = filters

    def question(self, store: Store) -> Question:
        """Returns the calls that read this panel's data; limits on rows depend on the number of agents in the store."""
        return Question(self.COMMAND, (STATUS_CALL, Call(self.COMMAND)))

    def render_store(self, store: Store, query: TableQuery) -> None:
        """Updates the panel with the current data of the store, filtered and sorted as in `query`."""
        raise NotImplementedError

    @property
    def main(self) -> Table:
        """The table to which filters and order apply."""
        return self.query_one(f"#{self.MAIN_TABLE}", Table)

    @property
    def table(self) -> Table | None:
        """The table that keys act on: the focused table, otherwise the main table; None if there is neither."""
        focused = self.screen.focused
        return focused if isinstance(focused, Table) else self.main if self.MAIN_TABLE else None

    def open_row(self, table: Table, row: Row) -> bool:
        """Handles Enter on a row; returns False to open the row in a panel of its own."""
        return False

    def record(self, row: Row) -> Sequence[Row]:
        """Returns the rows of the table to show in full, if Enter is pressed on a row that has no room."""
        return [row]

    def clipboard(self) -> tuple[str, str]:
        """Returns the text to copy and its description; both are "" if there is nothing to copy."""
        table = self.table
        if table is None or table.listing is None or table.row is None:
            return "", ""
        return tsv(table.listing.view.columns, [table.row]), f"one row of {table.label} with its header"

    def enter(self) -> None:
        """Focuses a widget of the panel; called when the panel is shown."""
        self.main.focus()

    def size_changed(self, width: int, height: int) -> None:
        """Adapts the layout to the panel's size in cells; called before each `render_store`."""


def show(
    table: Table,
    view: View,
    rows: Sequence[Row],
    store: Store,
    query: TableQuery,
    note: str = "",
    empty: Line | None = None,
) -> None:
    """Filters and sorts rows as in `query` and shows them in a table; for `note` and `empty` see `Table.show`."""
    table.show(listing(view, rows, query), store.stale_ns, note, empty)
