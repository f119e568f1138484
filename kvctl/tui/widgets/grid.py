"""The matrix of peers as something to walk about in: arrows choose a pair, Enter opens it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message

from kvctl.render.report import Line
from kvctl.tui.pictures.matrix import Matrix, draw, legend
from kvctl.tui.widgets.canvas import Canvas


class PairGrid(Canvas):
    """Prefill ranks down, decode ranks across."""

    DEFAULT_CSS = "PairGrid { height: auto; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "walk(1, 0)", show=False),
        Binding("up,k", "walk(-1, 0)", show=False),
        Binding("right,l", "walk(0, 1)", show=False),
        Binding("left,h", "walk(0, -1)", show=False),
        Binding("enter", "open", show=False),
    ]

    class Chosen(Message):
        """The cursor is on another pair."""

    class Opened(Message):
        """Enter on a pair."""

        def __init__(self, pair: tuple[str, str]) -> None:
            super().__init__()
            self.pair = pair

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._matrix = Matrix((), (), {})
        self.pair: tuple[str, str] | None = None

    def show(self, matrix: Matrix, heading: tuple[Line, Line]) -> None:
        grown = (len(matrix.prefill), len(matrix.decode)) != (len(self._matrix.prefill), len(self._matrix.decode))
        self._matrix, self.heading = matrix, heading
        if matrix.prefill and matrix.decode and (self.pair is None or not self._there(self.pair)):
            self.pair = (matrix.prefill[0], matrix.decode[0])
        self.changed()
        if grown:
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(draw(self._matrix, self.pair)) + 2

    def draw(self, width: int, height: int) -> Sequence[Line]:
        lines = draw(self._matrix, self.pair)
        heads = len(lines) - len(self._matrix.prefill)
        rows = max(1, height - heads - 1)
        if self.pair is not None:
            at = list(self._matrix.prefill).index(self.pair[0])
            self.top = min(max(self.top, at - rows + 1), at)
        shown = [*lines[:heads], *lines[heads + self.top : heads + self.top + rows], legend()]
        return [[("  ", ""), *line] for line in shown]

    def _there(self, pair: tuple[str, str]) -> bool:
        return pair[0] in self._matrix.prefill and pair[1] in self._matrix.decode

    def action_walk(self, down: int, across: int) -> None:
        if self.pair is None:
            return
        self.pair = (
            _step(self._matrix.prefill, self.pair[0], down),
            _step(self._matrix.decode, self.pair[1], across),
        )
        self.changed()
        self.post_message(self.Chosen())

    def action_open(self) -> None:
        if self.pair is not None:
            self.post_message(self.Opened(self.pair))


def _step(names: Sequence[str], name: str, by: int) -> str:
    return names[min(max(list(names).index(name) + by, 0), len(names) - 1)]
