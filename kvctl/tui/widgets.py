"""Widgets of styled lines: title and footer bars, scrollable pictures, and tables.

Widgets redraw only after a change, and tables format only the rows on screen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from kvctl.render import units
from kvctl.render.report import Line, Span
from kvctl.render.sanitize import one_line, printable
from kvctl.render.terminal import GAP, fit_widths, natural_widths, table_header, table_row
from kvctl.render.view import Column, Row, View, Width
from kvctl.tui.drawing import rule, spread
from kvctl.tui.listings import Listing, agent_of
from kvctl.tui.palette import style

_WHEEL_LINES = 3
_GUTTER = 2
_AGENT = "agent"
_MARKS = {False: " ▲", True: " ▼"}
Draw = Callable[[int], Sequence[Line]]
"""A function that draws lines for a width in cells."""


class Canvas(Widget, can_focus=True):
    """Base class of widgets that draw styled lines below an optional title line.

    Attributes:
        heading: spans at the left and right end of the title line; None for no title.
        top: index of the first line of the drawing on screen.
        background_style: style whose background colour the widget has; "" for the screen's background.
    """

    DEFAULT_CSS = "Canvas { height: 1fr; }"

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.heading: tuple[Line, Line] | None = None
        self.top = 0
        self.background_style = ""
        self._strip_lines: list[tuple[Span, ...]] = []
        self._strips: list[Strip] = []  # of the lines in `_strip_lines`
        self._drawn_for: object = None
        self._current = False

    def draw(self, width: int, height: int) -> Sequence[Line]:
        """Returns the lines below the title; at most `height` are shown."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Draws the widget again at the next refresh; lines that are the same as before keep their strips."""
        self._current = False
        self.refresh()

    def title_lines(self, width: int) -> list[Line]:
        """Returns the title line as a list, empty without a title; called after `draw`."""
        return [] if self.heading is None else [self.title_line(*self.heading, width)]

    def title_line(self, left: Line, right: Line, width: int) -> Line:
        """Draws a title line, brighter while the widget has the focus."""
        bright = "bold accent" if self.has_focus else "bold"
        return rule(
            [(text, style or bright) for text, style in left], right, width, "accent" if self.has_focus else "rule"
        )

    def render_line(self, y: int) -> Strip:
        size = self.size
        drawn_for = (size, self.has_focus)
        if not self._current or self._drawn_for != drawn_for:
            drawn = self.draw(size.width, max(0, size.height - (self.heading is not None)))
            lines = [tuple(line) for line in [*self.title_lines(size.width), *drawn][: size.height]]
            before = dict(zip(self._strip_lines, self._strips, strict=True)) if self._drawn_for == drawn_for else {}
            self._strips = [before.get(line) or self._strip(line, size.width) for line in lines]
            self._strip_lines, self._drawn_for, self._current = lines, drawn_for, True
        return self._strips[y] if y < len(self._strips) else self._strip([], size.width)

    def _strip(self, line: Sequence[Span], width: int) -> Strip:
        background = self.background_style
        strip = Strip(
            [Segment(printable(text), style(f"{name} {background}" if background else name)) for text, name in line]
        )
        # The highlight of the cursor row extends to the right edge.
        cursor = "cursor" if line and "cursor" in line[-1][1].split() else ""
        return strip.adjust_cell_length(width, style(cursor or background))

    def on_focus(self) -> None:
        self.redraw()

    def on_blur(self) -> None:
        self.redraw()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.scroll_lines(_WHEEL_LINES)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.scroll_lines(-_WHEEL_LINES)

    def scroll_lines(self, lines: int) -> None:
        """Scrolls down by a number of lines, up if it is negative; called for the mouse wheel."""


class Bar(Canvas, can_focus=False):
    """Lines with a text at each end; the widget is as high as its number of lines, and hidden without lines."""

    DEFAULT_CSS = "Bar { height: 1; }"

    def __init__(self, *, id: str, style: str = "") -> None:
        super().__init__(id=id)
        self.background_style = style
        self._lines: Sequence[tuple[Line, Line]] = ()
        self.display = False

    def show(self, *lines: tuple[Line, Line]) -> None:
        """Replaces the lines, which are pairs of left and right text."""
        if lines == self._lines:
            return
        if len(lines) != len(self._lines):
            self.styles.height = len(lines)
            self.display = bool(lines)
        self._lines = lines
        self.redraw()

    def draw(self, width: int, height: int) -> Sequence[Line]:
        return [spread([(" ", ""), *left], [*right, (" ", "")], width) for left, right in self._lines]


class Picture(Canvas):
    """A drawing that scrolls if it is higher than the widget.

    The widget is as high as the drawing unless its style sets or limits the height.
    """

    DEFAULT_CSS = "Picture { height: auto; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "scroll_by(1)", show=False),
        Binding("up,k", "scroll_by(-1)", show=False),
        Binding("pagedown", "scroll_by(10)", show=False),
        Binding("pageup", "scroll_by(-10)", show=False),
        Binding("home,g", "scroll_by(-100000)", show=False),
        Binding("end,G", "scroll_by(100000)", show=False),
    ]

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._draw: Draw = lambda width: []
        self._lines = 0
        self._height = 0
        self.can_focus = False

    def show(self, draw: Draw, heading: tuple[Line, Line] | None = None) -> None:
        """Replaces the drawing and its title; updates the layout only if the number of lines changes."""
        self._draw, self.heading = cache(draw), heading  # it is asked for twice: for the height, and to draw
        lines = len(self._drawn(self.size.width)) if self.size.width else 0
        self.redraw()
        if lines != self._lines:
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._drawn(width)) + (self.heading is not None)

    def draw(self, width: int, height: int) -> Sequence[Line]:
        lines = self._drawn(width)
        self._lines, self._height = len(lines), height
        self.can_focus = len(lines) > height
        self.top = max(0, min(self.top, len(lines) - height))
        return lines[self.top : self.top + height]

    def _drawn(self, width: int) -> list[Line]:
        """Returns the lines of the drawing, indented like the cells of tables."""
        return [[(" " * _GUTTER, ""), *line] for line in self._draw(width - _GUTTER)]

    def title_lines(self, width: int) -> list[Line]:
        below = self._lines - self.top - self._height
        if self.heading is None or below <= 0:
            return super().title_lines(width)
        return [self.title_line(self.heading[0], [(f"{below} more below (Tab, ↓)", "dim")], width)]

    def action_scroll_by(self, lines: int) -> None:
        self.scroll_lines(lines)

    def scroll_lines(self, lines: int) -> None:
        self.top = max(0, self.top + lines)
        self.redraw()


class Table(Canvas):
    """A table with a cursor that shows a `Listing`.

    Rows are identified by key, so the cursor stays on its row while values, order or other rows change. Columns grow
    with their values and do not shrink again, so that values stay in place.

    Args:
        follows: row of the cursor that stays under it when rows are added before the user has moved it: -1 for the
            last, as for events, 0 for the first; None: the cursor stays on its row.
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
        """Message: the cursor has moved to another row."""

    class Opened(Message):
        """Message: Enter was pressed on a row, or the row was double-clicked."""

        def __init__(self, table: Table, row: Row) -> None:
            super().__init__()
            self.table = table
            self.row = row

    def __init__(
        self, label: str, *, follows: int | None = None, id: str | None = None, classes: str | None = None
    ) -> None:
        super().__init__(id=id, classes=classes)
        self.label = label
        self.listing: Listing | None = None
        self.empty: Line | None = None
        self.cursor = 0
        self._follows = follows
        self._key: Hashable = None
        self._stale_ns: Callable[[str], int | None] = lambda agent: None
        self._natural: dict[Column, int] = {}
        self._visible_rows = 1

    def show(
        self, listing: Listing, stale_ns: Callable[[str], int | None], note: str = "", empty: Line | None = None
    ) -> None:
        """Replaces the rows; the cursor stays on its row if that is still in the table.

        Args:
            stale_ns: returns the nanoseconds since an agent's last answer; None if the agent answers.
            empty: text shown if there are no rows; by default the text of the view.
        """
        end = self._end(self.listing) if self.listing is not None else self.cursor
        following = self._follows is not None and self.cursor == end
        if self.listing is None or listing.view is not self.listing.view:
            self._natural = {}
        self.listing, self._stale_ns, self.empty = listing, stale_ns, empty
        self.cursor = self._find_cursor(listing, following)
        self._remember_key()
        self.heading = (self._title(listing), [(note, "dim")] if note else [])
        self.redraw()

    def fit_height(self) -> None:
        """Sets the height so that all rows fit; a maximum height in the widget's style still applies."""
        height = 2 + (len(self.listing.rows) if self.listing else 0)
        if self.styles.height is None or self.styles.height.value != height:
            self.styles.height = height

    @property
    def shown(self) -> Sequence[Row]:
        """The filtered and sorted rows."""
        return self.listing.rows if self.listing else ()

    @property
    def row(self) -> Row | None:
        """The row under the cursor; None if the table has no rows."""
        rows = self.shown
        return rows[self.cursor] if self.cursor < len(rows) else None

    @property
    def view(self) -> View | None:
        return self.listing.view if self.listing else None

    def draw(self, width: int, height: int) -> Sequence[Line]:
        if self.listing is None:
            return [[("  not read yet", "dim")]]
        rows = self.listing.rows
        if not rows:
            return [[("  ", ""), *self._without_rows(self.listing)]]
        self._visible_rows = max(1, height - 1)
        self.top = max(0, min(self.top, len(rows) - self._visible_rows))
        self.top = min(max(self.top, self.cursor - self._visible_rows + 1), self.cursor)
        shown = rows[self.top : self.top + self._visible_rows]
        order = self.listing.query.selection(self.listing.view).order
        marks = {column: _MARKS[descending] for column, descending in order[:1]}
        self._grow(self.listing.view, shown, marks)
        widths, _ = fit_widths(self._chosen_columns(width - _GUTTER), shown, width - _GUTTER)
        lines: list[Line] = [[(" " * _GUTTER, ""), *table_header(widths, marks)]]
        lines += [self._line(self.top + number, row, widths) for number, row in enumerate(shown)]
        return lines

    def _line(self, number: int, row: Row, widths: dict[Column, int]) -> Line:
        stale = self._stale_ns(agent_of(row))
        agents = {column: _agent_text(column, row, stale) for column in widths if column.name == _AGENT}
        spans = table_row(row, widths, agents)
        if stale is not None:
            spans = [(text, "dim") for text, _ in spans]
        if number == self.cursor:
            style = " cursor" if self.has_focus else " bar"
            return [(text, name + style) for text, name in [("▸ " if self.has_focus else "  ", "bold accent"), *spans]]
        return [("○ " if stale is not None else "  ", "dim"), *spans]

    def _grow(self, view: View, shown: Sequence[Row], marks: dict[Column, str]) -> None:
        """Widens the columns so that the values of the rows on screen fit."""
        for column, size in natural_widths(view.columns, shown).items():
            size = max(size, cell_len(column.title) + len(marks.get(column, "")))
            if column.name == _AGENT:
                agents = (_agent_text(column, row, self._stale_ns(agent_of(row))) for row in shown)
                size = max([size, *map(cell_len, agents)])
            self._natural[column] = max(size, self._natural.get(column, 0))

    def _chosen_columns(self, width: int) -> dict[Column, int]:
        """Returns the columns to show with their widths: all but wide columns, and the wide columns that fit."""
        used = sum(size + GAP for column, size in self._natural.items() if column.width is not Width.WIDE)
        chosen = {column for column in self._natural if column.width is not Width.WIDE}
        for column, size in self._natural.items():
            if column not in chosen and used + size <= width:
                chosen.add(column)
                used += size + GAP
        return {column: size for column, size in self._natural.items() if column in chosen}

    def _title(self, listing: Listing) -> Line:
        shown, total = len(listing.rows), listing.total
        spans: list[Span] = [(self.label, "")]
        spans.append((f"  {shown:,}" if shown == total else f"  {shown:,} of {total:,}", "dim"))
        if listing.query.filters:
            spans.append((f"  filter {listing.query.filters}", "yellow"))
        return spans

    def _without_rows(self, listing: Listing) -> Line:
        if listing.total:
            text = f"no row of {listing.total:,} matches: filter {listing.query.filters} (Esc shows all)"
            return [(text, "yellow")]
        return self.empty or [(listing.view.empty, "dim")]

    def _end(self, listing: Listing) -> int:
        """Returns the number of the row that the cursor follows."""
        return max(0, len(listing.rows) - 1) if self._follows else 0

    def _find_cursor(self, listing: Listing, following: bool) -> int:
        last = max(0, len(listing.rows) - 1)
        if following:
            return self._end(listing)
        if self._key is not None:
            for number, row in enumerate(listing.rows):
                if listing.view.key(row) == self._key:
                    return number
        return min(self.cursor, last)

    def _remember_key(self) -> None:
        row = self.row
        self._key = self.listing.view.key(row) if self.listing and row is not None else None

    def action_move(self, rows: int) -> None:
        if self.listing is None or not self.listing.rows:
            return
        self.cursor = min(max(self.cursor + rows, 0), len(self.listing.rows) - 1)
        self._remember_key()
        self.redraw()
        self.post_message(self.Moved())

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self._visible_rows - 1))

    def action_open(self) -> None:
        row = self.row
        if row is not None:
            self.post_message(self.Opened(self, row))

    def scroll_lines(self, lines: int) -> None:
        self.action_move(lines)

    def on_click(self, event: events.Click) -> None:
        number = self.top + event.y - 2
        if self.listing is not None and event.y >= 2 and number < len(self.listing.rows):
            self.action_move(number - self.cursor)
            if event.chain == 2:
                self.action_open()


def _agent_text(column: Column, row: Row, stale_ns: int | None) -> str:
    """Returns the agent's name, with the time since its last answer if it is silent."""
    text = one_line(column.human(row))
    return text if stale_ns is None else f"{text} {units.duration(stale_ns // 1_000_000_000 * 1_000_000_000)}"
