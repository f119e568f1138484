"""Declares views: the columns of one kind of data, and the kinds of values that determine their format and order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from functools import cache
from typing import Any

from kvctl.render import palette, units
from kvctl_agent.contract.values import layer_range

Row = Mapping[str, Any]


def raw(value: Any) -> str:
    """Formats a value for TSV and CSV: unrounded numbers, and an empty text for None."""
    match value:
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case Mapping():
            return ",".join(f"{key}={raw(item)}" for key, item in value.items())
        case list() | tuple():
            return ",".join(raw(item) for item in value)
    return str(value)


def _text(value: Any) -> str:
    return units.UNKNOWN if value is None or value == "" else str(value)


def _flag(value: Any) -> str:
    return units.UNKNOWN if value is None else "yes" if value else "no"


def _list(value: Any) -> str:
    return units.UNKNOWN if not value else ",".join(str(item) for item in value)


def _mapping(value: Any) -> str:
    return units.UNKNOWN if not value else " ".join(f"{key}={item}" for key, item in value.items())


def _layers(value: Any) -> str:
    return units.UNKNOWN if not value else layer_range(value[0], value[1])


def _verdict(value: Any) -> str:
    """Formats a verdict as a glyph and a word, so that it is readable without colour."""
    return units.UNKNOWN if not value else f"{palette.VERDICT_GLYPHS.get(value, '?')} {value}"


def _rate(value: Any) -> str:
    """Formats a rate with a constant number of digits, so that successive lines can be compared."""
    if value is None:
        return units.UNKNOWN
    if 0 < value < 0.005:
        return "<0.01"  # 0.00 means no transfer at all
    return f"{value:.2f}" if value < 99.995 else f"{value:,.0f}"


def _parse_number(text: str) -> float:
    return float(text.replace("_", "").replace(",", ""))


def _parse_ratio(text: str) -> float:
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


@dataclass(frozen=True, slots=True)
class KindRules:
    """Rules to format and parse values of one kind.

    Attributes:
        suffix: unit suffix of the column's name in machine-readable output.
        parse: parses a filter value with a unit; None if values are compared as text.
        unit: example of a value with a unit, if a bare number would be ambiguous.
    """

    human: Callable[[Any], str]
    raw: Callable[[Any], str] = raw
    suffix: str = ""
    parse: Callable[[str], float] | None = None
    unit: str = ""

    @property
    def numeric(self) -> bool:
        return self.parse is not None


class Kind(Enum):
    """Kind of a column's values, with the rules to format them."""

    TEXT = KindRules(_text)
    SENTENCE = KindRules(lambda value: _text(value))  # continues on further lines where other texts are shortened
    ID = KindRules(lambda value: _text(value))  # a number too large for JSON, kept as text, ordered as a number
    FLAG = KindRules(_flag)
    LIST = KindRules(_list)
    MAP = KindRules(_mapping)
    LAYERS = KindRules(_layers, lambda value: _layers(value) if value else "")
    VERDICT = KindRules(_verdict)  # ok, info, warning, critical, unknown
    COUNT = KindRules(units.count, parse=_parse_number)
    NUMBER = KindRules(units.three_digits, parse=_parse_number)
    RATE = KindRules(_rate, parse=_parse_number)
    RATIO = KindRules(units.percent, suffix="_ratio", parse=_parse_ratio)
    DURATION = KindRules(units.duration, suffix="_ns", parse=units.parse_duration, unit="5s")
    MILLISECONDS = KindRules(units.milliseconds, suffix="_ns", parse=units.parse_duration, unit="5ms")
    SECOND = KindRules(units.clock_seconds, suffix="_ns", parse=_parse_number)
    TIME = KindRules(units.clock_time, suffix="_ns", parse=_parse_number)
    BYTES = KindRules(units.size, suffix="_bytes", parse=units.parse_size, unit="64MiB")


class Width(Enum):
    """Condition under which a column is shown: always, if the terminal is wide enough, or with `-o wide` only.

    On a narrow terminal NORMAL columns are hidden from right to left, so that the least important is the last.

    TSV and CSV contain all columns.
    """

    CORE = "core"
    NORMAL = "normal"
    WIDE = "wide"


def folded(name: str) -> str:
    """Normalises a column name for comparison: `Waits-For` becomes `waits_for`."""
    return "_".join(name.casefold().replace("-", " ").split())


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """Column of a view.

    Attributes:
        name: name in `--columns`, `--sort-by` and `--filter`, which also accept the other `spellings`.
        help: description; by default that of `glossary.COMMON`, for names with the same meaning in all views.
        path: keys into the row joined by dots (`coverage.landed`), or a function of the row.
        header: table header; the name in capitals by default.
        fixed: width in streams of lines; 0 for no padding.
    """

    name: str
    kind: Kind = Kind.TEXT
    width: Width = Width.CORE
    help: str = ""
    _: KW_ONLY
    path: str | Callable[[Row], Any] = ""
    header: str = ""
    styles: Mapping[str, str] | None = None
    fixed: int = 0

    @property
    def title(self) -> str:
        return self.header or self.name.replace("_", " ").upper()

    @property
    def machine(self) -> str:
        """Name in machine-readable output; ends in the unit, such as `age_ns`."""
        suffix = self.kind.value.suffix
        return self.name if self.name.endswith(suffix) or self.name == suffix[1:] else self.name + suffix

    @property
    def spellings(self) -> frozenset[str]:
        """Accepted names: name, header and JSON path, each with and without the unit."""
        names = {folded(name) for name in (self.name, self.title, self.path) if isinstance(name, str) and name}
        suffix = self.kind.value.suffix
        return frozenset(names | {self.machine} | {name if name.endswith(suffix) else name + suffix for name in names})

    def value(self, row: Row) -> Any:
        """Returns the unformatted value of the column in a row; None if the row lacks it."""
        if callable(self.path):
            return self.path(row)
        value: Any = row
        for key in _keys(self):
            if not isinstance(value, _OBJECT):
                return None
            value = value.get(key)
        return value

    def raw(self, row: Row) -> str:
        """Formats the value for TSV and CSV."""
        return self.kind.value.raw(self.value(row))

    def human(self, row: Row) -> str:
        return self.kind.value.human(self.value(row))


_OBJECT = (dict, Mapping)  # a dict is recognised several times faster than another Mapping


@cache
def _keys(column: Column) -> list[str]:
    return (column.machine if callable(column.path) else column.path or column.machine).split(".")


@dataclass(frozen=True, slots=True)
class View:
    """Columns of one kind of data, with their sort order.

    Attributes:
        name: name of the JSON schema, `kvctl.<name>/1`.
        sort: column names, with a leading `-` for descending order.
        identity: names of the fields of a row that identify it in every reading.
        also: (heading, view) of each further table that the same command prints.
    """

    name: str
    columns: tuple[Column, ...]
    sort: tuple[str, ...] = ()
    identity: tuple[str, ...] = ()
    empty: str = "nothing to show"
    also: tuple[tuple[str, View], ...] = ()

    @property
    def schema(self) -> str:
        return f"kvctl.{self.name}/1"

    def column(self, name: str) -> Column | None:
        """Returns the column with this name in any spelling and case; `waits-for` also matches `WAITS FOR`."""
        wanted = folded(name)
        return next((column for column in self.columns if wanted in column.spellings), None)

    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    def key(self, row: Row) -> tuple[str, ...]:
        """Returns the values that identify a row."""
        return tuple([str(row.get(name, "")) for name in self.identity])
