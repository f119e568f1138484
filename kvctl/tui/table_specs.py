"""The TUI's tables: which declared view each shows, what makes its rows the same from one reading to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvctl.render.events import EVENTS
from kvctl.render.findings import HEALTH
from kvctl.render.layers import LAYERS, hidden_share
from kvctl.render.peers import PEERS
from kvctl.render.rooms import FAILED, ROOMS, TIMELINE
from kvctl.render.selection import ExpressionError, Selection, contains, find_column, is_comparison, select
from kvctl.render.staging import ALLOCATIONS, GATED, STAGING, oldest
from kvctl.render.status import STATUS
from kvctl.render.view import Row, View

_AND = "&"
# Older than this, what should be on its way is not.
_STUCK_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table.

    Attributes:
        key: what stays the same while a row's values change.
        agent: whose answer a row is; "" where it is of no single agent.
        faulty: rows that `faults only` keeps.
        room: the room that a row is about, for the way down; None for none.
    """

    view: View
    key: Callable[[Row], Hashable]
    faulty: Callable[[Row], bool]
    agent: Callable[[Row], str] = lambda row: str(row["agent"])
    room: Callable[[Row], str | None] = lambda row: None


@dataclass(frozen=True, slots=True)
class TableQuery:
    """What the operator wants to see of a sheet.

    Attributes:
        filters: as typed, `age>5s & state=Failed & decode-0`: comparisons, and text that rows contain.
        order: a column's name, `-` in front for descending; "" for the view's own.
    """

    filters: str = ""
    order: str = ""
    faults_only: bool = False

    def selection(self, view: View) -> Selection:
        """The wish against a view.

        Raises:
            ExpressionError: a filter or the order does not fit.
        """
        texts = [piece for piece in self._pieces if is_comparison(piece)]
        order = ",".join([self.order, *view.sort]) if self.order else None
        return select(view, sort_by=order, filters=texts)

    @property
    def texts(self) -> list[str]:
        """What a row must contain, in whatever column."""
        return [piece for piece in self._pieces if not is_comparison(piece)]

    @property
    def _pieces(self) -> list[str]:
        return [piece.strip() for piece in self.filters.split(_AND) if piece.strip()]

    def fits(self, view: View) -> bool:
        try:
            self.selection(view)
        except ExpressionError:
            return False
        return True

    def sorted_by(self, view: View, column: str) -> TableQuery:
        """By that column; the other way round where it is so already."""
        current = self.order or (view.sort[0] if view.sort else "")
        find_column(view, column)
        return replace(self, order=f"-{column}" if current == column else column)


@dataclass(frozen=True, slots=True)
class Listing:
    """Rows as a table shows them; `of` is how many there were before filters."""

    sheet: TableSpec
    rows: Sequence[Row]
    of: int
    wish: TableQuery = field(default_factory=TableQuery)


def listing(sheet: TableSpec, rows: Sequence[Row], wish: TableQuery) -> Listing:
    """Filters and sorts; a wish that was made for another view counts for what fits this one."""
    fitting = wish if wish.fits(sheet.view) else replace(wish, filters="", order="")
    texts = fitting.texts
    kept = [
        row
        for row in fitting.selection(sheet.view).rows(rows)
        if all(contains(sheet.view, row, text) for text in texts)
    ]
    if fitting.faults_only:
        kept = [row for row in kept if sheet.faulty(row)]
    return Listing(sheet, kept, len(rows), fitting)


def _pinned(row: Row) -> bool:
    pin = oldest(row)
    return bool(row["gated"]) or (pin is not None and pin["age_ns"] > _STUCK_NS)


def _exposed(row: Row) -> bool:
    share = hidden_share(row)
    return share is not None and share < 0.5


AGENTS_SHEET = TableSpec(
    STATUS,
    key=lambda row: row["name"],
    agent=lambda row: str(row["name"]),
    faulty=lambda row: bool(row.get("health") or row["waiting_for"] or row.get("draining")),
)
HEALTH_SHEET = TableSpec(
    HEALTH, key=lambda row: (row["code"], row["subject"]), agent=lambda row: "", faulty=lambda row: True
)
ROOMS_SHEET = TableSpec(
    ROOMS,
    key=lambda row: (row["agent"], row["room"], row["nonce"]),
    faulty=lambda row: row["state"] == "Failed" or row["failure"] is not None or row["parked"] > 0,
    room=lambda row: str(row["room"]),
)
TIMELINE_SHEET = TableSpec(
    TIMELINE,
    key=lambda row: (row["agent"], row["at_ns"], row["stage"], row["writer"], row["chunk"], str(row["layers"])),
    faulty=lambda row: row["stage"] in {"fail", "abort"},
)
STAGING_SHEET = TableSpec(STAGING, key=lambda row: row["agent"], faulty=_pinned)
ALLOCATIONS_SHEET = TableSpec(
    ALLOCATIONS,
    key=lambda row: (row["agent"], row["serial"]),
    faulty=lambda row: row["age_ns"] > _STUCK_NS or row["state"] == "quarantined",
    room=lambda row: str(row["room"]),
)
GATED_SHEET = TableSpec(
    GATED,
    key=lambda row: (row["agent"], row["room"], row["peer"], row["chunk"], str(row["layers"])),
    faulty=lambda row: row["age_ns"] > _STUCK_NS,
    room=lambda row: str(row["room"]),
)
LAYERS_SHEET = TableSpec(LAYERS, key=lambda row: (row["agent"], str(row["layers"]), row["path"]), faulty=_exposed)
PEERS_SHEET = TableSpec(
    PEERS,
    key=lambda row: (row["agent"], row["peer"]),
    faulty=lambda row: row["state"] != "ready" or bool(row["differences"]) or row["errors_total"] > 0,
)
EVENTS_SHEET = TableSpec(
    EVENTS,
    key=lambda row: (row["agent"], row["sequence"], row["at_ns"]),
    faulty=lambda row: row["severity"] in {"warning", "error"},
    room=lambda row: row["room"],
)
FAILED_SHEET = TableSpec(
    FAILED,
    key=lambda row: (row["room"], row["nonce"], row["failed_at_ns"]),
    agent=lambda row: "",
    faulty=lambda row: True,
    room=lambda row: str(row["room"]),
)
VIEW_OF: Mapping[str, View] = {
    "overview": STATUS,
    "rooms": ROOMS,
    "staging": STAGING,
    "layers": LAYERS,
    "peers": PEERS,
    "events": EVENTS,
    "failed": FAILED,
}
"""What filter and order are for, by the TUI's view."""
