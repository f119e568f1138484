"""A table of a declared view that formats only the rows on screen, however many there are.

Rows are known by key: the cursor stays on its row while values change, rows come and go, and the order turns. Columns
grow with their values and do not shrink again, so that the eye finds a number where it was a second ago.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message

from kvctl.render import units
from kvctl.render.report import Line, Span
from kvctl.render.sanitize import one_line
from kvctl.render.terminal import GAP, fitted, natural, table_header, table_row
from kvctl.render.view import Column, Row, Width
from kvctl.tui.table_specs import Listing, TableSpec
from kvctl.tui.widgets.canvas import Canvas

_GUTTER = 2
_AGENT = "agent"
_MARKS = {False: " ▲", True: " ▼"}


class Table(Canvas):
    """Rows of one sheet under a title.

    Args:
        tail: the cursor follows the last row while it is on it, as for events.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
        Binding("enter", "open", show=False),
    ]

    class Moved(Message):
        """The cursor is on another row."""

        def __init__(self, table: Table) -> None:
            super().__init__()
            self.table = table

        @property
        def control(self) -> Table:
            return self.table

    class Opened(Message):
        """Enter on a row."""

        def __init__(self, table: Table, row: Row) -> None:
            super().__init__()
            self.table = table
            self.row = row

        @property
        def control(self) -> Table:
            return self.table

    def __init__(self, title: str, *, tail: bool = False, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.name_of = title
        self.listing: Listing | None = None
        self.empty: Line | None = None
        self.cursor = 0
        self._tail = tail
        self._key: Hashable = None
        self._stale: Callable[[str], int | None] = lambda agent: None
        self._natural: dict[Column, int] = {}
        self._rows_high = 1

    def show(
        self,
        listing: Listing,
        stale: Callable[[str], int | None],
        note: str = "",
        empty: Line | None = None,
    ) -> None:
        """Other rows.

        Args:
            stale: how long an agent has been silent, ns; None while it answers.
            note: what is to be said of the rows, in the title.
            empty: what stands there without any; the view's own words unless given.
        """
        following = self._tail and (self.listing is None or self.cursor >= len(self.listing.rows) - 1)
        if self.listing is None or listing.sheet.view is not self.listing.sheet.view:
            self._natural = {}
        self.listing, self._stale, self.empty = listing, stale, empty
        self.cursor = self._found(listing, following)
        self._remember()
        self.heading = (self._left(listing), [(note, "dim")] if note else [])
        self.changed()

    def fit(self) -> None:
        """Takes as many lines as there are rows, within what its style allows."""
        rows = len(self.listing.rows) if self.listing else 0
        wanted = 2 + rows if rows else 2
        if self.styles.height is None or self.styles.height.value != wanted:
            self.styles.height = wanted

    @property
    def row(self) -> Row | None:
        """The row under the cursor."""
        rows = self.listing.rows if self.listing else ()
        return rows[self.cursor] if self.cursor < len(rows) else None

    @property
    def sheet(self) -> TableSpec | None:
        return self.listing.sheet if self.listing else None

    def draw(self, width: int, height: int) -> Sequence[Line]:
        if self.listing is None:
            return [[("  not read yet", "dim")]]
        if not self.listing.rows:
            return [[("  ", ""), *self._without_rows(self.listing)]]
        self._rows_high = max(1, height - 1)
        self.top = max(0, min(self.top, len(self.listing.rows) - self._rows_high))
        self.top = min(max(self.top, self.cursor - self._rows_high + 1), self.cursor)
        shown = self.listing.rows[self.top : self.top + self._rows_high]
        marks = self._marks(self.listing)
        widths, _ = fitted(self._worth(self._grown(shown, marks), width - _GUTTER), shown, width - _GUTTER)
        lines: list[Line] = [[(" " * _GUTTER, ""), *table_header(widths, marks)]]
        lines += [self._line(self.top + number, row, widths) for number, row in enumerate(shown)]
        return lines

    def _line(self, number: int, row: Row, widths: dict[Column, int]) -> Line:
        stale = self._stale_ns(row)
        said = {column: self._agent_text(column, row, stale) for column in widths if column.name == _AGENT}
        spans = table_row(row, widths, said)
        if stale is not None:
            spans = [(text, "dim") for text, _ in spans]
        if number == self.cursor:
            mark = "▸ " if self.has_focus else "  "
            style = " cursor" if self.has_focus else " bar"
            return [(text, name + style) for text, name in [(mark, "bold accent"), *spans]]
        return [("○ " if stale is not None else "  ", "dim"), *spans]

    def _grown(self, shown: Sequence[Row], marks: dict[Column, str]) -> dict[Column, int]:
        """Natural widths, as large as they have been."""
        assert self.listing is not None
        for column, size in natural(self.listing.sheet.view.columns, shown).items():
            size = max(size, cell_len(column.title) + len(marks.get(column, "")))
            if column.name == _AGENT:
                size = max([size, *(cell_len(self._agent_text(column, row, self._stale_ns(row))) for row in shown)])
            self._natural[column] = max(size, self._natural.get(column, 0))
        return self._natural

    def _worth(self, grown: dict[Column, int], width: int) -> dict[Column, int]:
        """The view's usual columns, and of the wide ones those for which nothing else has to be shortened."""
        taken = sum(size + GAP for column, size in grown.items() if column.width is not Width.WIDE)
        chosen = {column for column in grown if column.width is not Width.WIDE}
        for column, size in grown.items():
            if column not in chosen and taken + size <= width:
                chosen.add(column)
                taken += size + GAP
        return {column: size for column, size in grown.items() if column in chosen}

    def _agent_text(self, column: Column, row: Row, stale: int | None) -> str:
        text = one_line(column.human(row))
        return text if stale is None else f"{text} {units.duration(stale // 1_000_000_000 * 1_000_000_000)}"

    def _stale_ns(self, row: Row) -> int | None:
        assert self.listing is not None
        return self._stale(self.listing.sheet.agent(row))

    def _marks(self, listing: Listing) -> dict[Column, str]:
        order = listing.wish.selection(listing.sheet.view).order
        return {column: _MARKS[descending] for column, descending in order[:1]}

    def _left(self, listing: Listing) -> Line:
        shown, of = len(listing.rows), listing.of
        spans: list[Span] = [(self.name_of, "")]
        spans.append((f"  {shown:,}" if shown == of else f"  {shown:,} of {of:,}", "dim"))
        if listing.wish.faults_only:
            spans.append(("  faults only", "yellow"))
        if listing.wish.filters:
            spans.append((f"  filter {listing.wish.filters}", "yellow"))
        return spans

    def _without_rows(self, listing: Listing) -> Line:
        if listing.of:
            why = "faults only" if listing.wish.faults_only else f"filter {listing.wish.filters}"
            return [(f"none of {listing.of:,} rows passes: {why} (Esc shows all)", "yellow")]
        return self.empty or [(listing.sheet.view.empty, "dim")]

    def _found(self, listing: Listing, following: bool) -> int:
        last = max(0, len(listing.rows) - 1)
        if following:
            return last
        if self._key is not None:
            for number, row in enumerate(listing.rows):
                if listing.sheet.key(row) == self._key:
                    return number
        return min(self.cursor, last)

    def _remember(self) -> None:
        row = self.row
        self._key = self.listing.sheet.key(row) if self.listing and row is not None else None

    def action_move(self, rows: int) -> None:
        if self.listing is None or not self.listing.rows:
            return
        self.cursor = min(max(self.cursor + rows, 0), len(self.listing.rows) - 1)
        self._remember()
        self.changed()
        self.post_message(self.Moved(self))

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self._rows_high - 1))

    def action_open(self) -> None:
        row = self.row
        if row is not None:
            self.post_message(self.Opened(self, row))

    def scrolled(self, lines: int) -> None:
        self.action_move(lines)

    def on_click(self, event: events.Click) -> None:
        number = self.top + event.y - 2
        if self.listing is not None and event.y >= 2 and number < len(self.listing.rows):
            self.action_move(number - self.cursor)
            if event.chain == 2:
                self.action_open()
