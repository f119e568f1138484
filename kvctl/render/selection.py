"""Selects and orders the rows and columns of a view: `--filter`, `--sort-by`, `--columns`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvctl.render.expressions import Filter, find_column, parse_filter, sort_key
from kvctl.render.view import Column, Row, View, Width


@dataclass(frozen=True, slots=True)
class Selection:
    """Parsed selection options for a view.

    Attributes:
        columns: selected columns in order; None means the columns of the view.
        order: (column, descending), most significant first.
    """

    columns: tuple[Column, ...] | None
    order: tuple[tuple[Column, bool], ...]
    filters: tuple[Filter, ...]

    def passes(self, row: Row) -> bool:
        """Whether a row passes all filters."""
        return all(each.matches(row) for each in self.filters)

    def rows(self, rows: Iterable[Row]) -> list[Row]:
        """Returns the rows that pass, in order."""
        kept = [row for row in rows if self.passes(row)]
        for column, descending in reversed(self.order):
            known = [row for row in kept if column.value(row) is not None]
            unknown = [row for row in kept if column.value(row) is None]
            known.sort(key=lambda row, column=column: sort_key(column, column.value(row)), reverse=descending)  # type: ignore[misc]
            kept = known + unknown
        return kept


def select(
    view: View, columns: str | None = None, sort_by: str | None = None, filters: Sequence[str] = ()
) -> Selection:
    """Parses the three options for a view.

    Raises:
        ExpressionError: an option is invalid or names an unknown column.
    """
    wanted = None if columns is None else tuple(find_column(view, name) for name in _names(columns))
    order = view.sort if sort_by is None else tuple(_names(sort_by))
    return Selection(
        columns=wanted or None,
        order=tuple((find_column(view, name.removeprefix("-")), name.startswith("-")) for name in order),
        filters=tuple(parse_filter(view, text) for text in filters),
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def table_columns(view: View, selection: Selection, wide: bool) -> tuple[Column, ...]:
    """Returns the columns of a table, before it is fitted to the terminal."""
    if selection.columns is not None:
        return selection.columns
    return tuple(column for column in view.columns if wide or column.width is not Width.WIDE)


def data_columns(view: View, selection: Selection) -> tuple[Column, ...]:
    """Returns the columns of TSV and CSV: all of them, because scripts have no terminal width."""
    return selection.columns or view.columns
