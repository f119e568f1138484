"""View 5: connection states of all pairs of agents, as a matrix and as a table; Enter shows both agents' reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message

from kvctl.render.peers import MATRIX, NO_LINK, Pairs, pair_glyph, pair_legend
from kvctl.render.report import Line, Span
from kvctl.render.view import Row
from kvctl.tui.panels.panel import Panel, show
from kvctl.tui.store import Store
from kvctl.tui.table_specs import PEERS_TABLE, TableQuery
from kvctl.tui.widgets import Canvas, Table

Pair = tuple[str, str]
"""Names of a prefill rank and a decode rank."""

_CELL = 3  # width of a pair


def draw_matrix(pairs: Pairs, chosen: Pair | None, top: int, height: int, width: int) -> list[Line]:
    """Draws a matrix of pair states with prefill ranks as rows and decode ranks as columns.

    The row and the column of the chosen pair are highlighted.

    Args:
        top: index of the first prefill rank that is drawn.
        height, width: size in cells; columns beyond the width are not drawn.
    """
    if chosen is None:
        return [[(MATRIX.empty, "dim")]]
    margin = max(map(len, pairs.prefill)) + 2
    shown = max(0, width - margin) // _CELL + 1
    headings, decode = _vertical_names(pairs.decode), pairs.decode[:shown]
    lines: list[Line] = []
    for row in range(max(map(len, headings))):
        spans: list[Span] = [(" " * margin, "")]
        for name, letters in zip(decode, headings, strict=False):
            style = "bold accent" if name == chosen[1] else "dim"
            spans.append((f" {letters[row] if row < len(letters) else ' '} ", style))
        lines.append(spans)
    for name in pairs.prefill[top : top + height - len(lines)]:
        spans = [(f"{name:<{margin}}", "bold accent" if name == chosen[0] else "")]
        for other in decode:
            glyph, style = pair_glyph(pairs.row(name, other)["state"])
            spans.append((f"[{glyph}]", f"{style} cursor") if (name, other) == chosen else (f" {glyph} ", style))
        lines.append(spans)
    return lines


def _vertical_names(names: Sequence[str]) -> list[str]:
    """Shortens names for column headings to the first letter and the part after the common prefix.

    A single name is not shortened.
    """
    common = 0
    while len(set(names)) > 1 and len({name[: common + 1] for name in names}) == 1:
        common += 1
    return [f"{name[0]}{name[common:]}" if common > 1 else name for name in names]


class PairGrid(Canvas):
    """Matrix of pair states with a cursor, which is on `pair`."""

    DEFAULT_CSS = "PairGrid { height: auto; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1, 0)", show=False),
        Binding("up,k", "move(-1, 0)", show=False),
        Binding("right,l", "move(0, 1)", show=False),
        Binding("left,h", "move(0, -1)", show=False),
        Binding("enter", "open", show=False),
    ]

    class Chosen(Message):
        """Message: the cursor has moved to another pair."""

    class Opened(Message):
        """Message: Enter was pressed on a pair."""

        def __init__(self, pair: Pair) -> None:
            super().__init__()
            self.pair = pair

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._pairs = Pairs({}, ())
        self.pair: Pair | None = None

    def show(self, pairs: Pairs, heading: tuple[Line, Line]) -> None:
        resized = (pairs.prefill, pairs.decode) != (self._pairs.prefill, self._pairs.decode)
        self._pairs, self.heading = pairs, heading
        if not pairs.prefill or not pairs.decode:
            self.pair = None
        elif self.pair is None or self.pair[0] not in pairs.prefill or self.pair[1] not in pairs.decode:
            self.pair = (pairs.prefill[0], pairs.decode[0])
        self.redraw()
        if resized:
            self.refresh(layout=True)

    @property
    def _heads(self) -> int:
        """Number of lines above those of the prefill ranks."""
        return max(map(len, _vertical_names(self._pairs.decode))) if self.pair is not None else 1

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self._heads + (len(self._pairs.prefill) if self.pair is not None else 0) + 2

    def draw(self, width: int, height: int) -> Sequence[Line]:
        rows = max(1, height - self._heads - 1)
        if self.pair is not None:
            cursor = self._pairs.prefill.index(self.pair[0])
            self.top = max(0, min(self.top, len(self._pairs.prefill) - rows))
            self.top = min(max(self.top, cursor - rows + 1), cursor)
        shown = draw_matrix(self._pairs, self.pair, self.top, self._heads + rows, width)
        return [[("  ", ""), *line] for line in (*shown, pair_legend())]

    def action_move(self, down: int, right: int) -> None:
        if self.pair is None:
            return
        prefill, decode = self._pairs.prefill, self._pairs.decode
        self.pair = _neighbour(prefill, self.pair[0], down), _neighbour(decode, self.pair[1], right)
        self.redraw()
        self.post_message(self.Chosen())

    def action_open(self) -> None:
        if self.pair is not None:
            self.post_message(self.Opened(self.pair))


def _neighbour(names: Sequence[str], name: str, step: int) -> str:
    return names[min(max(names.index(name) + step, 0), len(names) - 1)]


class PeersPanel(Panel):
    """Matrix of pair states, and below it the table of peers as reported by each agent."""

    DEFAULT_CSS = "PeersPanel #peers-matrix { max-height: 60%; }"
    COMMAND = "peers"
    MAIN_TABLE = "peers-table"

    class PairOpened(Message):
        """Message: the app should open a panel with all details of a pair; `rows` has the reports of both agents."""

        def __init__(self, pair: Pair, rows: Sequence[Row]) -> None:
            super().__init__()
            self.pair = pair
            self.rows = rows

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._pairs = Pairs({}, ())
        self._rows: Sequence[Row] = ()

    def compose(self) -> ComposeResult:
        yield PairGrid(id="peers-matrix")
        yield Table("peers", id="peers-table")

    def render_store(self, store: Store, query: TableQuery) -> None:
        self._rows = store.rows("peers")
        show(self.main, PEERS_TABLE, self._rows, store, query)
        roles = {agent.name: agent.role for agent in store.agents.values()}
        self._pairs = Pairs(roles, self._rows)
        self._show_grid()

    def _show_grid(self) -> None:
        grid = self.query_one("#peers-matrix", PairGrid)
        prefill, decode = len(self._pairs.prefill), len(self._pairs.decode)
        size = f"  {prefill} prefill by {decode} decode" if prefill and decode else ""
        grid.show(self._pairs, ([("reachability", ""), (size, "dim")], self._describe(grid.pair)))

    def _describe(self, pair: Pair | None) -> Line:
        """Returns the title's description of the chosen pair: names, states, and whether its lane is direct.

        The reason why a lane is not direct is shown in the panel that Enter opens, which has more space.
        """
        if pair is None:
            return []
        row = self._pairs.row(*pair)
        states = {row["prefill_sees"], row["decode_sees"]} - {None}
        words = " / ".join(sorted(states)) or ("no link" if row["state"] == NO_LINK else row["state"])
        direct = "  direct" if row["lane_direct"] else ""
        return [(f"{pair[0]} → {pair[1]}  ", ""), (words, pair_glyph(row["state"])[1]), (direct, "dim")]

    def _open(self, pair: Pair) -> None:
        rows = [row for row in self._rows if {row["agent"], row["peer"]} == set(pair)]
        self.post_message(self.PairOpened(pair, rows))

    def on_pair_grid_chosen(self, message: PairGrid.Chosen) -> None:
        message.stop()
        self._show_grid()

    def on_pair_grid_opened(self, message: PairGrid.Opened) -> None:
        message.stop()
        self._open(message.pair)

    def on_table_opened(self, message: Table.Opened) -> None:
        message.stop()
        ends = (message.row["agent"], message.row["peer"])
        self._open(ends if message.row["role"] == "decode" else ends[::-1])

    def enter(self) -> None:
        self.query_one("#peers-matrix", PairGrid).focus()
