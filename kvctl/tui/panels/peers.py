"""View 5: connection states of all pairs of agents, as a matrix and as a table; Enter shows both agents' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message

from kvctl.client.names import natural_key
from kvctl.render.peers import MATRIX, NO_LINK, pair_glyph, pair_legend, pairs
from kvctl.render.report import Line, Span
from kvctl.render.view import Row
from kvctl.tui.panels.panel import Panel, show
from kvctl.tui.store import Store
from kvctl.tui.table_specs import PEERS_TABLE, TableQuery
from kvctl.tui.widgets import Canvas, Table

Pair = tuple[str, str]
"""Names of a prefill rank and a decode rank."""


def draw_matrix(pair_rows: Mapping[Pair, Row], chosen: Pair | None) -> list[Line]:
    """Draws a matrix of pair states with prefill ranks as rows and decode ranks as columns.

    The row and the column of the chosen pair are highlighted.
    """
    if not pair_rows:
        return [[(MATRIX.empty, "dim")]]
    prefill, decode = _names(pair_rows)
    margin = max(map(len, prefill)) + 2
    headings = _vertical_names(decode)
    lines: list[Line] = []
    for row in range(max(map(len, headings))):
        spans: list[Span] = [(" " * margin, "")]
        for name, letters in zip(decode, headings, strict=True):
            style = "bold accent" if chosen and name == chosen[1] else "dim"
            spans.append((f" {letters[row] if row < len(letters) else ' '} ", style))
        lines.append(spans)
    for name in prefill:
        in_row = chosen is not None and name == chosen[0]
        spans = [(f"{name:<{margin}}", "bold accent" if in_row else "")]
        for other in decode:
            glyph, style = pair_glyph(pair_rows[name, other]["state"])
            spans.append((f"[{glyph}]", f"{style} cursor") if (name, other) == chosen else (f" {glyph} ", style))
        lines.append(spans)
    return lines


def _names(pair_rows: Mapping[Pair, Row]) -> tuple[list[str], list[str]]:
    prefill, decode = (sorted({pair[side] for pair in pair_rows}, key=natural_key) for side in (0, 1))
    return prefill, decode


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
        self._pairs: Mapping[Pair, Row] = {}
        self.pair: Pair | None = None

    def show(self, pair_rows: Mapping[Pair, Row], heading: tuple[Line, Line]) -> None:
        resized = pair_rows.keys() != self._pairs.keys()
        self._pairs, self.heading = pair_rows, heading
        if self.pair not in pair_rows and pair_rows:
            prefill, decode = _names(pair_rows)
            self.pair = (prefill[0], decode[0])
        self.redraw()
        if resized:
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(draw_matrix(self._pairs, self.pair)) + 2

    def draw(self, width: int, height: int) -> Sequence[Line]:
        lines = draw_matrix(self._pairs, self.pair)
        prefill, _ = _names(self._pairs)
        heads = len(lines) - len(prefill)
        rows = max(1, height - heads - 1)
        if self.pair in self._pairs and self.pair is not None:
            cursor = prefill.index(self.pair[0])
            self.top = min(max(self.top, cursor - rows + 1), cursor)
        shown = [*lines[:heads], *lines[heads + self.top : heads + self.top + rows], pair_legend()]
        return [[("  ", ""), *line] for line in shown]

    def action_move(self, down: int, right: int) -> None:
        if self.pair not in self._pairs or self.pair is None:
            return
        prefill, decode = _names(self._pairs)
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
        self._pairs: dict[Pair, Row] = {}
        self._rows: Sequence[Row] = ()

    def compose(self) -> ComposeResult:
        yield PairGrid(id="peers-matrix")
        yield Table("peers", id="peers-table")

    def render_store(self, store: Store, query: TableQuery) -> None:
        self._rows = store.rows("peers")
        show(self.main, PEERS_TABLE, self._rows, store, query)
        roles = {agent.name: agent.role for agent in store.agents.values()}
        self._pairs = {(row["prefill"], row["decode"]): row for row in pairs(roles, self._rows)}
        self._show_grid()

    def _show_grid(self) -> None:
        grid = self.query_one("#peers-matrix", PairGrid)
        size = "" if not self._pairs else "  {} prefill by {} decode".format(*map(len, _names(self._pairs)))
        grid.show(self._pairs, ([("reachability", ""), (size, "dim")], self._describe(grid.pair)))

    def _describe(self, pair: Pair | None) -> Line:
        """Returns the title's description of the chosen pair: names, states, and whether its lane is direct.

        The reason why a lane is not direct is shown in the panel that Enter opens, which has more space.
        """
        row = None if pair is None else self._pairs.get(pair)
        if pair is None or row is None:
            return []
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
