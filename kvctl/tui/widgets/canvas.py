"""What all widgets here are: lines under a title, drawn anew only when something has changed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from textual import events
from textual.strip import Strip
from textual.widget import Widget

from kvctl.render.report import Line
from kvctl.render.sanitize import printable
from kvctl.tui.palette import BY_NAME, DARK, Palette
from kvctl.tui.pictures.compose import rule, spread

_WHEEL = 3


class Canvas(Widget, can_focus=True):
    """A title line, where `heading` says so, and what `draw` makes below it.

    Attributes:
        heading: spans at the left and the right end of the title line; None for no title.
        top: first line of the drawing on screen.
        paper: style whose background lies under everything; "" for the screen's.
    """

    DEFAULT_CSS = "Canvas { height: 1fr; }"

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.heading: tuple[Line, Line] | None = None
        self.top = 0
        self.paper = ""
        self._strips: list[Strip] = []
        self._drawn_for: object = None

    @property
    def palette(self) -> Palette:
        return BY_NAME.get(self.app.theme, DARK)

    def draw(self, width: int, height: int) -> Sequence[Line]:
        """Lines below the title; no more than `height` are shown."""
        raise NotImplementedError

    def changed(self) -> None:
        """What `draw` shows is another now."""
        self._drawn_for = None
        self.refresh()

    def title(self, width: int) -> list[Line]:
        """The title line; asked for after `draw`."""
        return [] if self.heading is None else self.ruled(*self.heading, width)

    def ruled(self, left: Line, right: Line, width: int) -> list[Line]:
        """A title line with these ends, brighter where keys go."""
        focused = self.has_focus
        lit = [(text, style or ("bold accent" if focused else "bold")) for text, style in left]
        return [rule(lit, right, width, "accent" if focused else "rule")]

    def render_line(self, y: int) -> Strip:
        size = self.size
        wanted = (size, self.app.theme, self.has_focus)
        if self._drawn_for != wanted:
            drawn = self.draw(size.width, max(0, size.height - (self.heading is not None)))
            lines = [*self.title(size.width), *drawn]
            self._strips = [self._strip(line, size.width) for line in lines[: size.height]]
            self._drawn_for = wanted
        return self._strips[y] if y < len(self._strips) else self._strip([], size.width)

    def _strip(self, line: Line, width: int) -> Strip:
        style = self.palette.style
        strip = Strip(
            [Segment(printable(text), style(f"{name} {self.paper}" if self.paper else name)) for text, name in line]
        )
        # What a row is marked with goes on to its end.
        marked = "cursor" if line and "cursor" in line[-1][1].split() else ""
        return strip.adjust_cell_length(width, style(marked or self.paper))

    def on_focus(self) -> None:
        self.changed()

    def on_blur(self) -> None:
        self.changed()

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.scrolled(_WHEEL)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.scrolled(-_WHEEL)

    def scrolled(self, lines: int) -> None:
        """The wheel was turned."""


class Bar(Canvas, can_focus=False):
    """One line, or as many as it was given, with something at either end."""

    DEFAULT_CSS = "Bar { height: 1; }"

    def __init__(self, *, id: str, style: str = "") -> None:
        super().__init__(id=id)
        self.paper = style
        self._lines: Sequence[tuple[Line, Line]] = ()
        self.display = False

    def show(self, *lines: tuple[Line, Line]) -> None:
        """Left and right end of each line; a bar without lines takes no room."""
        if len(lines) != len(self._lines):
            self.styles.height = len(lines)
            self.display = bool(lines)
        self._lines = lines
        self.changed()

    def draw(self, width: int, height: int) -> Sequence[Line]:
        return [spread([(" ", ""), *left], [*right, (" ", "")], width) for left, right in self._lines]
