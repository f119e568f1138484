"""Kinds of column values: how each is formatted for people and programs, compared and parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvctl.render import palette, units
from kvctl_agent.contract.values import layer_range


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
    """Formats a verdict as a glyph and a word, distinguishable without colour."""
    return units.UNKNOWN if not value else f"{palette.VERDICT_GLYPHS.get(value, '?')} {value}"


def _number_text(value: Any) -> str:
    return units.UNKNOWN if value is None else units.three_digits(value)


def _rate(value: Any) -> str:
    """Formats a rate with a constant number of digits, so that successive lines can be compared."""
    if value is None:
        return units.UNKNOWN
    if 0 < value < 0.005:
        return "<0.01"  # 0.00 means no transfer at all
    return f"{value:.2f}" if value < 99.995 else f"{value:,.0f}"


def _number(text: str) -> float:
    return float(text.replace("_", "").replace(",", ""))


@dataclass(frozen=True, slots=True)
class KindRules:
    """Formatting rules of one kind.

    Attributes:
        human: formats a value for tables.
        raw: formats a value for TSV and CSV.
        suffix: unit suffix of the column's name in machine-readable output.
        parse: parses a filter value with a unit; None if values are compared as text.
        unit: example of a value with a unit, if a bare number would be ambiguous.
    """

    human: Callable[[Any], str]
    raw: Callable[[Any], str] = field(default=lambda value: raw(value))
    suffix: str = ""
    parse: Callable[[str], float] | None = None
    unit: str = ""

    @property
    def numeric(self) -> bool:
        return self.parse is not None


class Kind(Enum):
    """Kind of a column's values."""

    TEXT = KindRules(_text)
    ID = KindRules(lambda value: _text(value))  # a number too large for JSON, kept as text, ordered as a number
    FLAG = KindRules(_flag)
    LIST = KindRules(_list)
    MAP = KindRules(_mapping)
    LAYERS = KindRules(_layers, lambda value: _layers(value) if value else "")
    VERDICT = KindRules(_verdict)  # ok, info, warning, critical, unknown
    COUNT = KindRules(units.count, parse=_number)
    NUMBER = KindRules(_number_text, parse=_number)
    RATE = KindRules(_rate, parse=_number)
    RATIO = KindRules(units.percent, suffix="_ratio", parse=lambda text: _ratio(text))
    DURATION = KindRules(units.duration, suffix="_ns", parse=units.parse_duration, unit="5s")
    MILLISECONDS = KindRules(units.milliseconds, suffix="_ns", parse=units.parse_duration, unit="5ms")
    SECOND = KindRules(units.clock_seconds, suffix="_ns", parse=_number)
    TIME = KindRules(units.clock_time, suffix="_ns", parse=_number)
    BYTES = KindRules(units.size, suffix="_bytes", parse=units.parse_size, unit="64MiB")


def _ratio(text: str) -> float:
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


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
