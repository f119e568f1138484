"""One row in full: every column of it, a line each; of a finding, what to make of it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from textual.app import ComposeResult

from kvctl.render.findings import HEALTH, labelled, paragraph
from kvctl.render.report import Line, Span
from kvctl.render.sanitize import one_line
from kvctl.render.terminal import style_of
from kvctl.render.view import Row
from kvctl.tui.panels.panel import STATUS, Panel
from kvctl.tui.readings import Question
from kvctl.tui.store import Store
from kvctl.tui.table_specs import TableQuery, TableSpec
from kvctl.tui.widgets.picture import Picture
from kvctl.tui.widgets.table import Table

_LABEL = 18
_PAGE = 100  # columns of what is copied
_GAP: Line = []


class RecordPanel(Panel):
    """The way down from a row that is about no room; it is looked up by its key in the table that it came from."""

    DEFAULT_CSS = "RecordPanel Picture { height: 1fr; }"

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.title = ""
        self._below: Panel | None = None
        self._table: Table | None = None
        self._sheet: TableSpec | None = None
        self._rows: dict[Hashable, Row] = {}

    def open(self, title: str, below: Panel, table: Table, rows: Sequence[Row]) -> None:
        """These rows from now on.

        Args:
            below: the panel they come from, which knows what to ask.
        """
        assert table.sheet is not None
        self.title, self._below, self._table, self._sheet = title, below, table, table.sheet
        self._rows = {table.sheet.key(row): row for row in rows}

    def compose(self) -> ComposeResult:
        yield Picture(id="record-picture")

    def question(self, store: Store) -> Question:
        return self._below.question(store) if self._below else Question("record", (STATUS,))

    def render_store(self, store: Store, wish: TableQuery) -> None:
        if self._below is None or self._table is None or self._sheet is None:
            return
        self._below.render_store(store, TableQuery())
        rows = self._table.listing.rows if self._table.listing else ()
        fresh = {key: row for row in rows if (key := self._sheet.key(row)) in self._rows}
        self._rows |= fresh
        stale = any(store.stale_ns(self._sheet.agent(row)) is not None for row in self._rows.values())
        gone = len(fresh) < len(self._rows)
        note = "its agent is silent: this was known last" if stale else "gone: this was known last" if gone else ""
        self.query_one("#record-picture", Picture).show(self.lines, ([(self.title, "")], [(note, "yellow")]))

    def lines(self, width: int) -> list[Line]:
        """The rows, one below the other."""
        lines: list[Line] = []
        for row in self._rows.values():
            if lines:
                lines.append(_GAP)
            lines += self._record(row, width)
        return lines

    def _record(self, row: Row, width: int) -> list[Line]:
        assert self._sheet is not None
        if self._sheet.view is HEALTH:
            return [_GAP, *paragraph(row, width)]
        lines: list[Line] = []
        for column in self._sheet.view.columns:
            text = one_line(column.human(row))
            style = style_of(column, row)
            first: Span = (f"  {column.name.replace('_', ' '):<{_LABEL}}", "dim")
            if len(text) + _LABEL + 2 <= width:
                lines.append([first, (text, style)])
            else:
                lines += labelled(column.name.replace("_", " "), text, width)
        return lines

    def copied(self) -> tuple[str, str]:
        lines = self.lines(_PAGE)
        return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines), self.title

    def begin(self) -> None:
        self.query_one("#record-picture", Picture).focus()
