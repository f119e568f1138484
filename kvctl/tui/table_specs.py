"""Specifications of the TUI's tables (view, row key, faulty rows), and the user's filters and order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvctl.render.events import EVENTS
from kvctl.render.findings import HEALTH
from kvctl.render.layers import LAYERS, hidden_share
from kvctl.render.peers import PEERS
from kvctl.render.rooms import CAUSES, FAILED, HISTORY, ROOMS, TIMELINE
from kvctl.render.selection import ExpressionError, Selection, contains, find_column, is_comparison, select
from kvctl.render.staging import ALLOCATIONS, GATED, STAGING, oldest
from kvctl.render.status import GROUPS, STATUS
from kvctl.render.view import Row, View

_AND = "&"
# Parts and ring regions older than this count as faults.
_STUCK_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Specification of one table.

    Attributes:
        view: columns of the table.
        key: returns the values of a row that identify it in every reading.
        faulty: returns whether a row is shown under `faults only`.
        agent: returns the name of the agent that reported a row; "" if it comes from several agents.
        room: returns the number of the room that Enter opens; None if the row belongs to no room.
    """

    view: View
    key: Callable[[Row], Hashable]
    faulty: Callable[[Row], bool]
    agent: Callable[[Row], str] = lambda row: str(row["agent"])
    room: Callable[[Row], str | None] = lambda row: None


@dataclass(frozen=True, slots=True)
class TableQuery:
    """Filters and order of a table, as chosen by the user.

    Attributes:
        filters: filters as typed, such as `age>5s & state=Failed & decode-0`: comparisons, and texts that rows must
            contain.
        order: name of a column, with `-` for descending order; "" for the view's default.
        faults_only: whether only faulty rows are shown.
    """

    filters: str = ""
    order: str = ""
    faults_only: bool = False

    def selection(self, view: View) -> Selection:
        """Parses filters and order for a view.

        Raises:
            ExpressionError: a filter or the order is invalid for the view.
        """
        texts = [piece for piece in self._pieces if is_comparison(piece)]
        order = ",".join([self.order, *view.sort]) if self.order else None
        return select(view, sort_by=order, filters=texts)

    @property
    def texts(self) -> list[str]:
        """Filters that are not comparisons: texts that a row must contain, each in some column."""
        return [piece for piece in self._pieces if not is_comparison(piece)]

    @property
    def _pieces(self) -> list[str]:
        return [piece.strip() for piece in self.filters.split(_AND) if piece.strip()]

    def is_valid_for(self, view: View) -> bool:
        try:
            self.selection(view)
        except ExpressionError:
            return False
        return True

    def sorted_by(self, view: View, column: str) -> TableQuery:
        """Returns the query sorted by a column; in descending order if it is sorted by that column already."""
        current = self.order or (view.sort[0] if view.sort else "")
        find_column(view, column)
        return replace(self, order=f"-{column}" if current == column else column)


@dataclass(frozen=True, slots=True)
class Listing:
    """Filtered and sorted rows of a table; `total` is the number of rows before filtering."""

    spec: TableSpec
    rows: Sequence[Row]
    total: int
    query: TableQuery = field(default_factory=TableQuery)


def listing(spec: TableSpec, rows: Sequence[Row], query: TableQuery) -> Listing:
    """Filters and sorts rows; ignores filters and order that are invalid for this view, for example another view's."""
    if not query.is_valid_for(spec.view):
        query = replace(query, filters="", order="")
    kept = query.selection(spec.view).rows(rows)
    for text in query.texts:
        kept = [row for row in kept if contains(spec.view, row, text)]
    if query.faults_only:
        kept = [row for row in kept if spec.faulty(row)]
    return Listing(spec, kept, len(rows), query)


def _has_old_parts(row: Row) -> bool:
    pin = oldest(row)
    return bool(row["gated"]) or (pin is not None and pin["age_ns"] > _STUCK_NS)


def _mostly_exposed(row: Row) -> bool:
    share = hidden_share(row)
    return share is not None and share < 0.5


AGENTS_TABLE = TableSpec(
    STATUS,
    key=lambda row: row["name"],
    agent=lambda row: str(row["name"]),
    faulty=lambda row: bool(row.get("health") or row["waiting_for"] or row.get("draining")),
)
GROUPS_TABLE = TableSpec(
    GROUPS,
    key=lambda row: row.get("name") or (row["fold"], row["group"]),
    agent=lambda row: row.get("name", ""),
    faulty=lambda row: row["health"] != "ok",
)
HEALTH_TABLE = TableSpec(
    HEALTH, key=lambda row: (row["code"], row["subject"]), agent=lambda row: "", faulty=lambda row: True
)
ROOMS_TABLE = TableSpec(
    ROOMS,
    key=lambda row: (row["agent"], row["room"], row["nonce"]),
    faulty=lambda row: row["state"] == "Failed" or row["failure"] is not None or row["parked"] > 0,
    room=lambda row: str(row["room"]),
)
TIMELINE_TABLE = TableSpec(
    TIMELINE,
    key=lambda row: (row["agent"], row["at_ns"], row["stage"], row["writer"], row["chunk"], str(row["layers"])),
    faulty=lambda row: row["stage"] in {"fail", "abort"},
)
STAGING_TABLE = TableSpec(STAGING, key=lambda row: row["agent"], faulty=_has_old_parts)
ALLOCATIONS_TABLE = TableSpec(
    ALLOCATIONS,
    key=lambda row: (row["agent"], row["serial"]),
    faulty=lambda row: row["age_ns"] > _STUCK_NS or row["state"] == "quarantined",
    room=lambda row: str(row["room"]),
)
GATED_TABLE = TableSpec(
    GATED,
    key=lambda row: (row["agent"], row["room"], row["peer"], row["chunk"], str(row["layers"])),
    faulty=lambda row: row["age_ns"] > _STUCK_NS,
    room=lambda row: str(row["room"]),
)
LAYERS_TABLE = TableSpec(
    LAYERS, key=lambda row: (row["agent"], str(row["layers"]), row["path"]), faulty=_mostly_exposed
)
PEERS_TABLE = TableSpec(
    PEERS,
    key=lambda row: (row["agent"], row["peer"]),
    faulty=lambda row: row["state"] != "ready" or bool(row["differences"]) or bool(row["errors_total"]),
)
EVENTS_TABLE = TableSpec(
    EVENTS,
    key=lambda row: (row["agent"], row["sequence"], row["at_ns"]),
    faulty=lambda row: row["severity"] in {"warning", "error"},
    room=lambda row: row["room"],
)
FAILED_TABLE = TableSpec(
    FAILED,
    key=lambda row: (row["room"], row["nonce"], row["failed_at_ns"]),
    agent=lambda row: "",
    faulty=lambda row: True,
    room=lambda row: str(row["room"]),
)
CAUSES_TABLE = TableSpec(
    CAUSES,
    key=lambda row: (row["code"], row["first_at_ns"]),
    agent=lambda row: "",
    faulty=lambda row: True,
    room=lambda row: str(row["room"]),
)
HISTORY_TABLE = TableSpec(
    HISTORY,
    key=lambda row: (row["agent"], row["room"], row["nonce"]),
    faulty=lambda row: row["state"] == "Failed",
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
    "history": HISTORY,
}
"""View of the main table of each screen, to which filters and order apply."""
