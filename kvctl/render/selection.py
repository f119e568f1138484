"""Selects and orders the rows and columns of a view: `--filter`, `--sort-by`, `--columns`.

A filter is a comparison `column operator value`, not code or a regular expression. A column is given by its name, its
header or its JSON name. Examples: `age>5s`, `bytes>=64MiB`, `state=Failed`, `peers=decode-0` (one element of a list),
`text~timeout` (contains), `error=-` (unknown). A comparison with an unknown value is false, except with `!=` and `!~`.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvctl.render.units import UNKNOWN
from kvctl.render.view import Column, Kind, Row, View, Width, folded, raw

_GRAMMAR = re.compile(r"\s*([^=!<>~]+?)\s*(<=|>=|!=|!~|==|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_COMPARISON_START = re.compile(r"[^=!<>~]*[^=!<>~\s][^=!<>~]*(?:[<>=~]|!=|!~)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_EQUAL = frozenset({"=", "=="})


class ExpressionError(ValueError):
    """Error for an invalid filter, column or sort order; the message names valid ones."""


@dataclass(frozen=True, slots=True)
class Filter:
    """One parsed comparison of `--filter`.

    Attributes:
        number: value in the unit of the column; None if values are compared as text.
    """

    column: Column
    operator: str
    text: str
    number: float | None

    def matches(self, row: Row) -> bool:
        """Returns whether the row passes the filter."""
        value = self.column.value(row)
        unknown = value is None or value == ""
        if self.text == UNKNOWN and self.operator in _EQUAL | {"!="}:
            return unknown == (self.operator != "!=")
        if unknown:
            return self.operator in {"!=", "!~"}
        if self.operator in {"~", "!~"}:
            return (self.text.casefold() in self.column.kind.value.raw(value).casefold()) == (self.operator == "~")
        if self.operator in _ORDER:
            return _ORDER[self.operator](*_comparable(self.column, value, self))
        return self._equal(value) == (self.operator in _EQUAL)

    def _equal(self, value: Any) -> bool:
        if self.number is not None:
            return bool(value == self.number)
        if isinstance(value, Mapping):
            wanted, _, amount = self.text.partition("=")
            return wanted in value and (not amount or raw(value[wanted]) == amount)
        if isinstance(value, list | tuple) and self.column.kind is Kind.LIST:
            return any(raw(item).casefold() == self.text.casefold() for item in value)
        rules = self.column.kind.value
        return self.text.casefold() in {rules.raw(value).casefold(), rules.human(value).casefold()}


def _comparable(column: Column, value: Any, against: Filter) -> tuple[Any, Any]:
    if against.number is not None:
        return value, against.number
    return sort_key(column, value), sort_key(column, against.text)


_NUMBER = (int, float)  # `int | float` builds a union at each call


def sort_key(column: Column, value: Any) -> tuple[int, Any]:
    """Returns a sort key for values of a column: numbers and numeric ids by size, others by text, unknown ones last."""
    if value is None or value == "":
        return (2, 0)
    if isinstance(value, _NUMBER):
        return (0, value)
    if column.kind is Kind.LAYERS and (span := _span(value)) is not None:
        return (0, span)
    text = value if isinstance(value, str) else raw(value)
    if column.kind is Kind.ID and text.isdecimal():
        return (0, int(text))
    return (1, text.casefold())


def _span(value: Any) -> tuple[int, int] | None:
    """Parses a range of layers, a pair [lo, hi) or text such as `0-3`, to (lo, hi); returns None for other text."""
    if not isinstance(value, str):
        return (value[0], value[1])
    found = _RANGE.fullmatch(value)
    return (int(found[1]), int(found[2] or found[1]) + 1) if found else None


def parse_filter(view: View, text: str) -> Filter:
    """Parses one filter for the rows of `view`.

    Raises:
        ExpressionError: the text is not a comparison, the column is unknown, or the value does not fit the column.
    """
    found = _GRAMMAR.fullmatch(text)
    if found is None or not found[3]:
        raise ExpressionError(
            f"filter {text!r} is not COLUMN OPERATOR VALUE, such as age>5s; operators: = != < <= > >= ~ !~"
        )
    name, op, value = found.groups()
    column = find_column(view, name)
    return Filter(column, op, value, _number(column, name, op, value))


def _number(column: Column, name: str, op: str, value: str) -> float | None:
    rules = column.kind.value
    if rules.parse is None or op in {"~", "!~"} or value == UNKNOWN:
        return None
    # `age_ns>5000` has a unit in the column's name; `age>5` has none and is rejected.
    bare = re.fullmatch(r"-?\d+(\.\d+)?", value)
    if bare and (not rules.unit or _names_unit(column, name) or float(value) == 0):
        return float(value)
    if bare:
        raise ExpressionError(f"{name} needs a unit: {name}{op}{rules.unit}, or {column.machine}{op}{value}")
    try:
        return rules.parse(value)
    except ValueError as error:
        text = str(error) if rules.unit else f"{value!r} is not a number"
        raise ExpressionError(f"filter {name}{op}{value}: {text}") from error


def _names_unit(column: Column, name: str) -> bool:
    suffix = column.kind.value.suffix
    return bool(suffix) and folded(name).endswith(suffix) and folded(name) != column.name


def is_comparison(text: str) -> bool:
    """Returns whether the text is meant as a filter, that is, contains an operator after some text."""
    return _COMPARISON_START.match(text) is not None


def contains(view: View, row: Row, text: str) -> bool:
    """Returns whether a column of the row contains the text, as printed in tables or in TSV; ignores case."""
    wanted = text.casefold()
    for column in view.columns:
        value = column.value(row)
        if value not in (None, "") and (wanted in raw(value).casefold() or wanted in column.human(row).casefold()):
            return True
    return False


def find_column(view: View, name: str) -> Column:
    """Returns the column with this name.

    Raises:
        ExpressionError: no column has this name; the message lists similar names and all columns.
    """
    column = view.column(name)
    if column is None:
        spellings = {spelling: each.name for each in view.columns for spelling in each.spellings}
        found = difflib.get_close_matches(folded(name), spellings, n=6)
        near = list(dict.fromkeys(spellings[spelling] for spelling in found))[:3]
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ExpressionError(f"no column {name!r} here; {hint}columns: {', '.join(view.names())}")
    return column


@dataclass(frozen=True, slots=True)
class Selection:
    """Parsed selection options for a view.

    Attributes:
        columns: selected columns in order; None means the columns of the view.
        order: (column, descending), most significant first.
        filters: comparisons that a row must all pass.
    """

    columns: tuple[Column, ...] | None
    order: tuple[tuple[Column, bool], ...]
    filters: tuple[Filter, ...]

    def passes(self, row: Row) -> bool:
        """Returns whether a row passes all filters."""
        return all(each.matches(row) for each in self.filters)

    def rows(self, rows: Iterable[Row]) -> list[Row]:
        """Returns the rows that pass all filters, in the selected order; rows with unknown values come last."""
        kept = [row for row in rows if self.passes(row)] if self.filters else list(rows)
        for column, descending in reversed(self.order):
            values = [(column.value(row), row) for row in kept]
            known = [(sort_key(column, value), row) for value, row in values if value is not None]
            known.sort(key=operator.itemgetter(0), reverse=descending)
            kept = [row for _, row in known] + [row for value, row in values if value is None]
        return kept


def select(
    view: View, columns: str | None = None, sort_by: str | None = None, filters: Sequence[str] = ()
) -> Selection:
    """Parses the values of `--columns`, `--sort-by` and `--filter` for a view.

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
    """Returns the columns of a table, before columns are hidden to fit the terminal."""
    if selection.columns is not None:
        return selection.columns
    return tuple(column for column in view.columns if wide or column.width is not Width.WIDE)


def data_columns(view: View, selection: Selection) -> tuple[Column, ...]:
    """Returns the columns of TSV and CSV: the selected ones or all, because scripts have no terminal width."""
    return selection.columns or view.columns
