"""Computes the trend of a series of memory sizes: least-squares slope and sparkline."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Returns the least-squares slope of y over x; 0 for fewer than two points."""
    if len(xs) < 2:
        return 0.0
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Draws values as bars between their minimum and maximum; in long series, a bar is the mean of neighbours."""
    if not values:
        return ""
    per = max(1, -(-len(values) // width))
    means = [sum(values[at : at + per]) / len(values[at : at + per]) for at in range(0, len(values), per)]
    low, high = min(means), max(means)
    steps = len(_BARS) - 1
    return "".join(_BARS[round((mean - low) / (high - low) * steps) if high > low else 0] for mean in means)
