"""Base class of panels: the data a panel needs, and how it shows the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.containers import Vertical

from kvctl.client.calls import Call
from kvctl.render.report import Line
from kvctl.render.view import Row
from kvctl.tui import export
from kvctl.tui.feed import Question
from kvctl.tui.store import Store
from kvctl.tui.table_specs import TableQuery, TableSpec, listing
from kvctl.tui.widgets import Table

STATUS = Call("status")


class Panel(Vertical):
    """One view, or one panel that Enter opens; the app asks its question and shows it the store after every reading."""

    DEFAULT_CSS = "Panel { height: 1fr; }"
    MAIN_TABLE: ClassVar[str] = ""
    """Id of the table to which filters and order apply; "" if there is none."""

    def question(self, store: Store) -> Question:
        """Returns the calls to make while this panel is on screen; limits depend on the size of the fleet."""
        raise NotImplementedError

    def render_store(self, store: Store, query: TableQuery) -> None:
        """Shows the current data of the store, filtered and sorted by the query."""
        raise NotImplementedError

    @property
    def main(self) -> Table:
        """The table to which filters and order apply."""
        return self.query_one(f"#{self.MAIN_TABLE}", Table)

    @property
    def table(self) -> Table | None:
        """The table that keys act on: the focused one, otherwise the main one."""
        focused = self.screen.focused
        return focused if isinstance(focused, Table) else self.main if self.MAIN_TABLE else None

    def clipboard(self) -> tuple[str, str]:
        """Returns the text to copy and its description; "" if there is nothing to copy."""
        table = self.table
        if table is None or table.listing is None or table.row is None:
            return "", ""
        return export.row_with_header(table.listing, table.row), f"one row of {table.label} with its header"

    def enter(self) -> None:
        """Sets the focus when the panel comes on screen."""
        self.main.focus()

    def size_changed(self, width: int, height: int) -> None:
        """Adapts the layout to the size of the panel."""


def show(
    table: Table,
    spec: TableSpec,
    rows: Sequence[Row],
    store: Store,
    query: TableQuery,
    note: str = "",
    empty: Line | None = None,
) -> None:
    """Shows rows of the store in a table; for `note` and `empty` see `Table.show`."""
    table.show(listing(spec, rows, query), store.stale_ns, note, empty)
