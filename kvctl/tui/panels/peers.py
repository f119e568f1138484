"""View 5: who reaches whom, as a matrix and as a table; Enter shows what both ends say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message

from kvctl.client.calls import Call
from kvctl.render.report import Line
from kvctl.render.view import Row
from kvctl.tui.panels.panel import STATUS, Panel, show
from kvctl.tui.pictures.matrix import Matrix, draw, legend, matrix
from kvctl.tui.readings import Question
from kvctl.tui.store import Store
from kvctl.tui.table_specs import PEERS_SHEET, TableQuery
from kvctl.tui.widgets.canvas import Canvas
from kvctl.tui.widgets.table import Table


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


class PeersPanel(Panel):
    """The matrix chooses a pair; Tab goes on to the table."""

    DEFAULT_CSS = "PeersPanel #peers-matrix { max-height: 60%; }"

    class PairOpened(Message):
        """Both ends of a pair are to be shown in full."""

        def __init__(self, pair: tuple[str, str], rows: Sequence[Row]) -> None:
            super().__init__()
            self.pair = pair
            self.rows = rows

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._matrix = Matrix((), (), {})

    def compose(self) -> ComposeResult:
        yield PairGrid(id="peers-matrix")
        yield Table("peers", id="peers-table")

    @property
    def main(self) -> Table:
        return self.query_one("#peers-table", Table)

    def question(self, store: Store) -> Question:
        return Question("peers", (STATUS, Call("peers")))

    def render_store(self, store: Store, wish: TableQuery) -> None:
        rows = store.rows("peers")
        show(self.main, PEERS_SHEET, rows, store, wish)
        self._matrix = matrix(rows, {agent.name: agent.role for agent in store.agents.values()})
        self._title()

    def _title(self) -> None:
        grid = self.query_one("#peers-matrix", PairGrid)
        size = f"  {len(self._matrix.prefill)} prefill by {len(self._matrix.decode)} decode"
        grid.show(self._matrix, ([("reachability", ""), (size, "dim")], self._said(grid.pair)))

    def _said(self, pair: tuple[str, str] | None) -> Line:
        """The chosen pair in words; why it is not direct is in its record, which has room for it."""
        if pair is None:
            return []
        rows = self._matrix.pairs.get(pair, ())
        states = " / ".join(sorted({row["state"] for row in rows})) or "never met"
        direct = "  direct" if any(row.get("lane_direct") for row in rows) else ""
        return [(f"{pair[0]} → {pair[1]}  ", ""), (states, self._matrix.glyph(*pair)[1]), (direct, "dim")]

    def on_pair_grid_chosen(self, message: PairGrid.Chosen) -> None:
        message.stop()
        self._title()

    def on_pair_grid_opened(self, message: PairGrid.Opened) -> None:
        message.stop()
        self.post_message(self.PairOpened(message.pair, self._matrix.pairs.get(message.pair, ())))

    def on_table_opened(self, message: Table.Opened) -> None:
        message.stop()
        row = message.row
        ends = (row["agent"], row["peer"])
        pair = ends if row["role"] == "decode" else ends[::-1]
        self.post_message(self.PairOpened(pair, self._matrix.pairs.get(pair, (row,))))

    def begin(self) -> None:
        self.query_one("#peers-matrix", PairGrid).focus()
