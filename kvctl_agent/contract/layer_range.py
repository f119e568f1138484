"""How a range of layers is written: one form in every table, text and error."""

from __future__ import annotations


def layer_range(lo: int, hi: int) -> str:
    """Layers [lo, hi) with both ends included: `0-3`, `3` for one layer, `[5, 5)` for none."""
    return f"{lo}-{hi - 1}" if hi > lo + 1 else str(lo) if hi > lo else f"[{lo}, {hi})"
