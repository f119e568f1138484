"""A picture: lines that someone else draws for the width there is; scrolled where they are more than fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.geometry import Size

from kvctl.render.report import Line
from kvctl.tui.widgets.canvas import Canvas

_INDENT = "  "
Draw = Callable[[int], Sequence[Line]]


def _nothing(_: int) -> Sequence[Line]:
    return []


class Picture(Canvas):
    """Takes as many lines as its drawing has, unless its style gives it a height."""

    DEFAULT_CSS = "Picture { height: auto; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "turn(1)", show=False),
        Binding("up,k", "turn(-1)", show=False),
        Binding("pagedown", "turn(10)", show=False),
        Binding("pageup", "turn(-10)", show=False),
        Binding("home,g", "turn(-100000)", show=False),
        Binding("end,G", "turn(100000)", show=False),
    ]

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._draw: Draw = _nothing
        self._lines = 0
        self._height = 0
        self.can_focus = False

    def show(self, draw: Draw, heading: tuple[Line, Line] | None = None) -> None:
        """Another drawing; the layout is made anew only where it has another number of lines."""
        self._draw, self.heading = draw, heading
        lines = len(self._drawn(self.size.width)) if self.size.width else 0
        self.changed()
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
        """Under the title's words, as the cells of tables are."""
        return [[(_INDENT, ""), *line] for line in self._draw(width - len(_INDENT))]

    def title(self, width: int) -> list[Line]:
        below = self._lines - self.top - self._height
        if self.heading is None or below <= 0:
            return super().title(width)
        return self.ruled(self.heading[0], [(f"{below} more below (Tab, ↓)", "dim")], width)

    def action_turn(self, lines: int) -> None:
        self.scrolled(lines)

    def scrolled(self, lines: int) -> None:
        self.top = max(0, self.top + lines)
        self.changed()
