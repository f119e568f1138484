"""Builds HTML and SVG with escaped text, and formats numbers for it.

Names of models, agents and paths come from other machines. Text that is not `Markup` is escaped, and control
characters, bidirectional characters and lone surrogates, most of which HTML and XML cannot contain, are replaced.
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
    """Text that is already markup."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Escape text for use between tags or inside a quoted attribute."""
    return text if isinstance(text, Markup) else Markup(html.escape(printable_lines(text)))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Returns one element that is also well-formed XML.

    Args:
        children: Text or markup, in order; None is left out.
        attributes: `class_` and `stroke_width` become `class` and `stroke-width`; None is left out; numbers get at most
            two decimals.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written} />" if name in _VOID else f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Markup:
    """Concatenate text and markup; None is left out."""
    return Markup("".join(escape(child) for child in children if child is not None))


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return escape(value)
    return f"{value:.2f}".rstrip("0").rstrip(".")


# ---- numbers --------------------------------------------------------------------------------------------------------


def number(value: object) -> float | None:
    """Returns a finite number, or None for anything else."""
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
    """Formats up to three significant digits: `0.0042`, `0.34`, `2.99`, `12.3`, `1,234`."""
    if value is None:
        return units.UNKNOWN
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return units.three_digits(value) if value == 0 or abs(value) >= 0.0995 else f"{value:.2g}"


def grouped(value: float) -> str:
    """Formats a count `1,024`, or a mean `1,024.5`."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def milliseconds(value: float | None) -> str:
    """Formats milliseconds in a suitable unit: `78 µs`, `20.4 ms`, `1.2 s`."""
    return units.duration(None if value is None else value * 1e6)


def times(value: float) -> str:
    """Formats a factor: `5.2 x`, `180 x`, with a multiplication sign."""
    return f"{value:.1f} \N{MULTIPLICATION SIGN}" if value < 9.95 else f"{value:,.0f} \N{MULTIPLICATION SIGN}"


def time_unit(max_ms: float) -> tuple[str, float]:
    """Returns the unit of an axis up to `max_ms`, and its number per millisecond."""
    if max_ms < 1:
        return "µs", 1e3
    return ("s", 1e-3) if max_ms >= 10_000 else ("ms", 1.0)


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Estimates the width of a text in a chart's units; the estimate is not too small for ordinary words."""
    return len(text) * size * _CHARACTER


def fitted(text: str, width: float, size: float = FONT_SIZE) -> str:
    """Shorten a text with an ellipsis if it is wider than `width`."""
    most = max(1, int(width / (size * _CHARACTER)))
    return text if len(text) <= most else text[: most - 1] + "…"
