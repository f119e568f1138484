"""Specifications of the TUI's tables (view, row key), and the user's filters and order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvctl.render.events import EVENTS
from kvctl.render.findings import HEALTH
from kvctl.render.layers import LAYERS
from kvctl.render.peers import PEERS
from kvctl.render.rooms import CAUSES, FAILED, HISTORY, ROOMS, TIMELINE
from kvctl.render.selection import ExpressionError, Selection, contains, find_column, is_comparison, select
from kvctl.render.staging import ALLOCATIONS, GATED, STAGING
from kvctl.render.status import GROUPS, STATUS
from kvctl.render.view import Row, View

_AND = "&"


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Specification of one table.

    Attributes:
        fields: names of the fields of a row that identify it in every reading.
        opens_room: whether Enter on a row opens its room, if it has one.
    """

    view: View
    fields: tuple[str, ...]
    opens_room: bool = True

    def key(self, row: Row) -> tuple[str, ...]:
        """Returns the values that identify a row."""
        return tuple([str(row.get(name, "")) for name in self.fields])

    def agent(self, row: Row) -> str:
        """Returns the name of the agent that reported a row; "" if it comes from several agents."""
        return str(row.get("agent") or row.get("name") or "")

    def room(self, row: Row) -> str | None:
        """Returns the number of the room that Enter opens; None if there is none."""
        room = row.get("room") if self.opens_room else None
        return None if room is None else str(room)


@dataclass(frozen=True, slots=True)
class TableQuery:
    """Filters and order of a table, as chosen by the user.

    Attributes:
        filters: filters as typed, such as `age>5s & state=Failed & decode-0`: comparisons, and texts that rows must
            contain.
        order: name of a column, with `-` for descending order; "" for the view's default.
    """

    filters: str = ""
    order: str = ""

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
    return Listing(spec, kept, len(rows), query)


AGENTS_TABLE = TableSpec(STATUS, ("name",))
GROUPS_TABLE = TableSpec(GROUPS, ("fold", "group"))
HEALTH_TABLE = TableSpec(HEALTH, ("code", "subject"))
ROOMS_TABLE = TableSpec(ROOMS, ("agent", "room", "nonce"))
TIMELINE_TABLE = TableSpec(TIMELINE, ("agent", "at_ns", "stage", "writer", "chunk", "layers"), opens_room=False)
STAGING_TABLE = TableSpec(STAGING, ("agent",))
ALLOCATIONS_TABLE = TableSpec(ALLOCATIONS, ("agent", "serial"))
GATED_TABLE = TableSpec(GATED, ("agent", "room", "peer", "chunk", "layers"))
LAYERS_TABLE = TableSpec(LAYERS, ("agent", "layers", "path"))
PEERS_TABLE = TableSpec(PEERS, ("agent", "peer"))
EVENTS_TABLE = TableSpec(EVENTS, ("agent", "sequence", "at_ns"))
FAILED_TABLE = TableSpec(FAILED, ("room", "nonce", "failed_at_ns"))
CAUSES_TABLE = TableSpec(CAUSES, ("code", "first_at_ns"))
HISTORY_TABLE = TableSpec(HISTORY, ("agent", "room", "nonce"))
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
