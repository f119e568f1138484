"""What a panel is: what it needs to know, and how it shows what the store knows."""

from __future__ import annotations

from collections.abc import Sequence

from textual.containers import Vertical

from kvctl.client.calls import Call
from kvctl.render.report import Line
from kvctl.render.view import Row
from kvctl.tui import export
from kvctl.tui.readings import Question
from kvctl.tui.store import Store
from kvctl.tui.table_specs import TableQuery, TableSpec, listing
from kvctl.tui.widgets.table import Table

STATUS = Call("status")


class Panel(Vertical):
    """One view or drill-down; the app asks its question and shows it the store after every reading."""

    DEFAULT_CSS = "Panel { height: 1fr; }"

    def question(self, store: Store) -> Question:
        """What has to be asked while this panel is on screen, of a fleet as large as the store knows it."""
        raise NotImplementedError

    def render_store(self, store: Store, wish: TableQuery) -> None:
        """Shows what is known now, as the operator wishes it."""
        raise NotImplementedError

    @property
    def main(self) -> Table | None:
        """The table that filter and order are for; None where there is none."""
        return None

    @property
    def table(self) -> Table | None:
        """The table that keys act on: the one with the focus, else the main one."""
        focused = self.screen.focused
        return focused if isinstance(focused, Table) else self.main

    def copied(self) -> tuple[str, str]:
        """What goes to the clipboard, and what it is; "" where there is nothing."""
        table = self.table
        if table is None or table.listing is None or table.row is None:
            return "", ""
        return export.line(table.listing, table.row), f"one row of {table.name_of} with its header"

    def begin(self) -> None:
        """The panel comes on screen."""
        if self.main is not None:
            self.main.focus()

    def size_changed(self, width: int, height: int) -> None:
        """Arranges itself for a panel of that size."""


def show(
    table: Table,
    sheet: TableSpec,
    rows: Sequence[Row],
    store: Store,
    wish: TableQuery,
    note: str = "",
    empty: Line | None = None,
) -> None:
    """Puts rows of the store into a table."""
    table.show(listing(sheet, rows, wish), store.stale_ns, note, empty)
