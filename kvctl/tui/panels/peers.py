"""View 5: what agents report about their peers, the worst first; Enter shows the reports of both ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import nsmallest

from textual.app import ComposeResult

from kvctl.render.peers import PEERS, gravity
from kvctl.render.view import Row
from kvctl.tui.listings import Listing, TableQuery
from kvctl.tui.panels.panel import Panel, show
from kvctl.tui.store import Store
from kvctl.tui.widgets import Table

_WORST = TableQuery(order="-state")
_MOST = 500  # rows without a filter: more than anybody reads, few enough to order them each second


class PeersPanel(Panel):
    """Table of the connections as each agent reports them."""

    COMMAND = "peers"
    MAIN_TABLE = "peers-table"

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._rows: Sequence[Row] = ()

    def compose(self) -> ComposeResult:
        yield Table("peers", id="peers-table")

    def render_store(self, store: Store, query: TableQuery) -> None:
        self._rows = store.rows("peers")
        if query != TableQuery():
            show(self.main, PEERS, self._rows, store, query)
            return
        worst = worst_first(self._rows)
        note = "the worst; / filters all" if len(worst) < len(self._rows) else ""
        self.main.show(Listing(PEERS, worst, len(self._rows), _WORST), store.stale_ns, note)

    def record(self, row: Row) -> Sequence[Row]:
        ends = {row["agent"], row["peer"]}
        return [each for each in self._rows if {each["agent"], each["peer"]} == ends]


def worst_first(rows: Sequence[Row], most: int = _MOST) -> list[Row]:
    """Returns the rows with the worst states and the most errors; of the others, as many as are needed for `most`."""
    odd = [row for row in rows if row["state"] != "ready" or row["differences"] or row["errors_total"]]
    found = nsmallest(most, odd, key=_order)
    return found if len(found) == most else found + nsmallest(most - len(found), _without(rows, odd), key=_order)


def _without(rows: Sequence[Row], left_out: Sequence[Row]) -> Iterable[Row]:
    known = {id(row) for row in left_out}
    return (row for row in rows if id(row) not in known)


def _order(row: Row) -> tuple[int, bool, int, str, str]:
    return gravity(row["state"]), not row["differences"], -(row["errors_total"] or 0), row["agent"], row["peer"]
