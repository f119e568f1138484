"""Rows of the TUI's tables as the user filters and orders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvctl.render.events import EVENTS
from kvctl.render.layers import LAYERS
from kvctl.render.peers import PEERS
from kvctl.render.rooms import FAILED, HISTORY, ROOMS
from kvctl.render.selection import ExpressionError, Selection, contains, find_column, is_comparison, select
from kvctl.render.staging import STAGING
from kvctl.render.status import STATUS
from kvctl.render.view import Row, View
from kvctl.tui import VIEWS

_AND = "&"


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

    view: View
    rows: Sequence[Row]
    total: int
    query: TableQuery = field(default_factory=TableQuery)


def agent_of(row: Row) -> str:
    """Returns the name of the agent that reported a row; "" if it comes from several agents."""
    return str(row.get("agent") or row.get("name") or "")


def listing(view: View, rows: Sequence[Row], query: TableQuery) -> Listing:
    """Filters and sorts rows; ignores filters and order that are invalid for this view, for example another view's."""
    if not query.is_valid_for(view):
        query = replace(query, filters="", order="")
    kept = query.selection(view).rows(rows)
    for text in query.texts:
        kept = [row for row in kept if contains(view, row, text)]
    return Listing(view, kept, len(rows), query)


VIEW_OF: Mapping[str, View] = dict(
    zip(VIEWS, (STATUS, ROOMS, STAGING, LAYERS, PEERS, EVENTS, FAILED, HISTORY), strict=True)
)
"""View of the main table of each screen, to which filters and order apply."""
