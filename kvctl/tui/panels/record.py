"""One row in full: every column of it, a line each; of a finding, what to make of it."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult

from kvctl.tui.panels.panel import STATUS, Panel
from kvctl.tui.readings import Question
from kvctl.tui.sheets import Sheet, Wish
from kvctl.tui.store import Store
from kvctl.tui.widgets.picture import Picture
from kvctl.views.findings import HEALTH, labelled, paragraph
from kvctl.views.report import Line, Span
from kvctl.views.terminal import one_line, style_of
from kvctl.views.view import Row

_LABEL = 18
_GAP: Line = []


class RecordPanel(Panel):
    """The way down from a row that is about no room: the row as it was when it was opened."""

    DEFAULT_CSS = "RecordPanel Picture { height: 1fr; }"

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.title = ""
        self.sheet: Sheet | None = None
        self.rows: Sequence[Row] = ()

    def compose(self) -> ComposeResult:
        yield Picture(id="record-picture")

    def question(self, store: Store) -> Question:
        return Question("record", (STATUS,))

    def render_store(self, store: Store, wish: Wish) -> None:
        stale = [age for row in self.rows if self.sheet and (age := store.stale_ns(self.sheet.agent(row))) is not None]
        note: Line = [("no longer answering", "yellow")] if stale else [("as it was when you opened it", "dim")]
        self.query_one("#record-picture", Picture).show(self.lines, ([(self.title, "")], note))

    def lines(self, width: int) -> list[Line]:
        """The rows, one below the other."""
        lines: list[Line] = []
        for row in self.rows:
            if lines:
                lines.append(_GAP)
            lines += self._record(row, width)
        return lines

    def _record(self, row: Row, width: int) -> list[Line]:
        assert self.sheet is not None
        if self.sheet.view is HEALTH:
            return [_GAP, *paragraph(row, width)]
        lines: list[Line] = []
        for column in self.sheet.view.columns:
            text = one_line(column.human(row))
            style = style_of(column, row)
            first: Span = (f"  {column.name.replace('_', ' '):<{_LABEL}}", "dim")
            if len(text) + _LABEL + 2 <= width:
                lines.append([first, (text, style)])
            else:
                lines += labelled(column.name.replace("_", " "), text, width)
        return lines

    def begin(self) -> None:
        self.query_one("#record-picture", Picture).focus()
