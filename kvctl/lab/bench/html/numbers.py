"""Numbers as a report prints them: three digits that mean something, a unit, and `-` for the unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvctl.render import units

# Average width of a character of the charts' font, as a share of its size; digits and capitals are wider than this.
_CHARACTER = 0.57
FONT_SIZE = 11.5


def number(value: object) -> float | None:
    """A finite number, None for everything else: documents come from files."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def lookup(run: Mapping[str, Any], *keys: str) -> float | None:
    """The number at `run[key][key]…`, None where there is none."""
    value: Any = run
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return number(value)


def significant(value: float | None) -> str:
    """`0.0042`, `0.34`, `2.99`, `12.3`, `1,234`."""
    if value is None:
        return units.UNKNOWN
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return units.three_digits(value) if value == 0 or abs(value) >= 0.0995 else f"{value:.2g}"


def grouped(value: float) -> str:
    """A count: `1,024`, or `1,024.5` for the mean of several."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def milliseconds(value: float | None) -> str:
    """Milliseconds with the unit that suits them: `78 µs`, `20.4 ms`, `1.2 s`."""
    return units.duration(None if value is None else value * 1e6)


def gb_per_s(value: float | None) -> str:
    """`2.99 GB/s`."""
    return units.UNKNOWN if value is None else f"{significant(value)} GB/s"


def times(value: float) -> str:
    """A factor: `5.2x`, `180x`, with the right sign."""
    return f"{value:.1f} \N{MULTIPLICATION SIGN}" if value < 9.95 else f"{value:,.0f} \N{MULTIPLICATION SIGN}"


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """About how wide a text is in a chart, in the chart's units; never too little for ordinary words."""
    return len(text) * size * _CHARACTER


def fitted(text: str, width: float, size: float = FONT_SIZE) -> str:
    """The text, cut with an ellipsis where it would be wider than `width`."""
    most = max(1, int(width / (size * _CHARACTER)))
    return text if len(text) <= most else text[: most - 1] + "…"
