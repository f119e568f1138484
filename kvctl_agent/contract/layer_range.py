"""Formats a range of layers in the same way for tables, texts and errors."""

from __future__ import annotations


def layer_range(lo: int, hi: int) -> str:
    """Formats layers [lo, hi) with inclusive ends: `0-3`, `3` for one layer, `[5, 5)` for none."""
    return f"{lo}-{hi - 1}" if hi > lo + 1 else str(lo) if hi > lo else f"[{lo}, {hi})"
