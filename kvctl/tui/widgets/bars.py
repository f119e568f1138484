"""The lines around a panel: what is looked at, the views, what the operator must know, the keys."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.render.report import Line
from kvctl.tui.pictures.compose import spread
from kvctl.tui.widgets.canvas import Canvas


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
