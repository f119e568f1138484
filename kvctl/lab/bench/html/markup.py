"""Builds HTML and SVG elements with escaped text, and formats numbers for the report.

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

FONT_SIZE = 11.5
# Average width of a character of the charts' font relative to its size. Digits and capitals are wider than average.
_CHARACTER = 0.57
_VOID = frozenset({"meta"})

Child = str | None
Attribute = str | float | None


class Markup(str):
    """Text that is already valid HTML or SVG and is not escaped again."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Escapes text for use between tags or inside a quoted attribute; returns `Markup` unchanged."""
    return text if isinstance(text, Markup) else Markup(html.escape(printable_lines(text)))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Returns one HTML or SVG element as well-formed XML.

    Args:
        name: Name of the element.
        children: Content of the element, text or markup; None is skipped.
        attributes: Attributes of the element, with `class_` for `class` and `stroke_width` for `stroke-width`; None is
            skipped; numbers are rounded to two decimals.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written} />" if name in _VOID else f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Markup:
    """Concatenates text, which is escaped, and markup; None is skipped."""
    return Markup("".join(escape(child) for child in children if child is not None))


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return escape(value)
    return f"{value:.2f}".rstrip("0").rstrip(".")


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


def grouped(value: float) -> str:
    """Formats a number with thousands separators: `1,024`, or `1,024.5` if it is not whole."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def milliseconds(value: float | None) -> str:
    """Formats a time given in milliseconds, in a suitable unit: `78 µs`, `20.4 ms`, `1.2 s`."""
    return units.duration(None if value is None else value * 1e6)


def times(value: float) -> str:
    """Formats a factor and a multiplication sign, such as "5.2 x" or "180 x"."""
    return f"{value:.1f} \N{MULTIPLICATION SIGN}" if value < 9.95 else f"{value:,.0f} \N{MULTIPLICATION SIGN}"


def time_unit(max_ms: float) -> tuple[str, float]:
    """Returns the unit for an axis that ends at `max_ms`, and the number of these units per millisecond."""
    if max_ms < 1:
        return "µs", 1e3
    return ("s", 1e-3) if max_ms >= 10_000 else ("ms", 1.0)


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Estimates the width of a text in a chart's units; ordinary words are not wider than the estimate."""
    return len(text) * size * _CHARACTER


def fitted(text: str, width: float, size: float = FONT_SIZE) -> str:
    """Shortens a text with an ellipsis if its estimated width exceeds `width`."""
    most = max(1, int(width / (size * _CHARACTER)))
    return text if len(text) <= most else text[: most - 1] + "…"
