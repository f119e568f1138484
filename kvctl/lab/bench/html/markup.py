"""Builds HTML elements with escaped text, and formats numbers for the report.

Names of models, agents and paths come from other machines and are untrusted. Text that is not `Markup` is escaped, and
control characters, bidirectional characters and lone surrogates, most of which HTML and XML cannot contain, are
replaced.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

from kvctl.render import units
from kvctl.render.sanitize import printable_lines

_VOID = frozenset({"meta"})

Child = str | None


class Markup(str):
    """Text that is already valid HTML and is not escaped again."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Escapes text for use between tags or inside a quoted attribute; returns `Markup` unchanged."""
    return text if isinstance(text, Markup) else Markup(html.escape(printable_lines(text)))


def tag(name: str, /, *children: Child, **attributes: str | None) -> Markup:
    """Returns one HTML element as well-formed XML.

    Args:
        name: Name of the element.
        children: Content of the element, text or markup; None is skipped.
        attributes: Attributes of the element, with `class_` for `class`; None is skipped.
    """
    written = "".join(f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items() if value is not None)
    return Markup(f"<{name}{written} />" if name in _VOID else f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Markup:
    """Concatenates text, which is escaped, and markup; None is skipped."""
    return Markup("".join(escape(child) for child in children if child is not None))


# ---- numbers --------------------------------------------------------------------------------------------------------


def number(value: object) -> float | None:
    """Returns the value as a float if it is a finite number, otherwise None."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def lookup(run: Mapping[str, Any], *keys: str) -> float | None:
    """Returns the number at `run[key][key]…`, or None."""
    value: Any = run
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return number(value)


def significant(value: float | None) -> str:
    """Formats a number with about three significant digits: `0.0042`, `0.34`, `2.99`, `12.3`, `1,234`."""
    if value is None:
        return units.UNKNOWN
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return units.three_digits(value) if value == 0 or abs(value) >= 0.0995 else f"{value:.2g}"


def milliseconds(value: float | None) -> str:
    """Formats a time given in milliseconds, in a suitable unit: `78 µs`, `20.4 ms`, `1.2 s`."""
    return units.duration(None if value is None else value * 1e6)


def time_unit(max_ms: float) -> tuple[str, float]:
    """Returns the unit for an axis that ends at `max_ms`, and the number of these units per millisecond."""
    if max_ms < 1:
        return "µs", 1e3
    return ("s", 1e-3) if max_ms >= 10_000 else ("ms", 1.0)
