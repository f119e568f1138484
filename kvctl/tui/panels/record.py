"""Panel with all columns of one or two rows, a line for each column; for a finding, its cause and remedy."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult

from kvctl.render.findings import HEALTH, labelled, paragraph
from kvctl.render.report import Line, Span
from kvctl.render.sanitize import one_line
from kvctl.render.terminal import style_of
from kvctl.render.view import Row, View
from kvctl.tui.feed import Question
from kvctl.tui.listings import TableQuery, agent_of
from kvctl.tui.panels.panel import STATUS_CALL, Panel
from kvctl.tui.store import Store
from kvctl.tui.widgets import Picture, Table

_LABEL_WIDTH = 18
_CLIPBOARD_WIDTH = 100
_EMPTY_LINE: Line = []


class RecordPanel(Panel):
    """Panel that Enter opens for a row that belongs to no room.

    The panel keeps the row up to date: it finds it by its key in the table in which Enter was pressed.
    """

    DEFAULT_CSS = "RecordPanel Picture { height: 1fr; }"

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.title = ""
        self._origin: Panel | None = None
        self._table: Table | None = None
        self._view: View | None = None
        self._rows: dict[tuple[str, ...], Row] = {}

    def open(self, title: str, origin: Panel, table: Table, rows: Sequence[Row]) -> None:
        """Sets the rows that the panel shows. `origin`: panel that contains the table; its question reads the rows."""
        assert table.view is not None
        self.title, self._origin, self._table, self._view = title, origin, table, table.view
        self._rows = {table.view.key(row): row for row in rows}

    def compose(self) -> ComposeResult:
        yield Picture(id="record-picture")

    def question(self, store: Store) -> Question:
        return self._origin.question(store) if self._origin else Question("record", (STATUS_CALL,))

    def render_store(self, store: Store, query: TableQuery) -> None:
        if self._origin is None or self._table is None or self._view is None:
            return
        # An explicit order lists all rows, also where the panel would fold them.
        self._origin.render_store(store, TableQuery(order=next(iter(self._view.sort), "")))
        rows = self._table.listing.rows if self._table.listing else ()
        current = {key: row for row in rows if (key := self._view.key(row)) in self._rows}
        self._rows |= current
        stale = any(store.stale_ns(agent_of(row)) is not None for row in self._rows.values())
        gone = len(current) < len(self._rows)
        note = "its agent is silent: last known data" if stale else "gone: last known data" if gone else ""
        self.query_one("#record-picture", Picture).show(self._lines, ([(self.title, "")], [(note, "yellow")]))

    def _lines(self, width: int) -> list[Line]:
        lines: list[Line] = []
        for row in self._rows.values():
            if lines:
                lines.append(_EMPTY_LINE)
            lines += self._draw_row(row, width)
        return lines

    def _draw_row(self, row: Row, width: int) -> list[Line]:
        assert self._view is not None
        if self._view is HEALTH:
            return [_EMPTY_LINE, *paragraph(row, width)]
        lines: list[Line] = []
        for column in self._view.columns:
            text, label = one_line(column.human(row)), column.name.replace("_", " ")
            name: Span = (f"  {label:<{_LABEL_WIDTH}}", "dim")
            if len(text) + _LABEL_WIDTH + 2 <= width:
                lines.append([name, (text, style_of(column, row))])
            else:
                lines += labelled(label, text, width)
        return lines

    def clipboard(self) -> tuple[str, str]:
        lines = self._lines(_CLIPBOARD_WIDTH)
        return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines), self.title

    def enter(self) -> None:
        self.query_one("#record-picture", Picture).focus()
