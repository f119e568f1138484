"""Rows held against the first one of their load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def with_delta(rows: Sequence[dict[str, Any]], within: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rows, each with its GB/s and its TTFT against the first of the same load (None for that one itself).

    Those that are compared come together.

    Args:
        within: fields that they must have in common besides.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((*load_of(row), *(row[name] for name in within)), []).append(row)
    compared = []
    for base, row in ((group[0], row) for group in groups.values() for row in group):
        deltas = {"delta_ratio": _change(base["gb_per_s"], row["gb_per_s"])}
        deltas["ttft_delta_ratio"] = _change(_ttft(base), _ttft(row))
        compared.append({**row, **(dict.fromkeys(deltas) if base is row else deltas)})
    return compared


def load_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What rows must have in common to be compared."""
    return row["concurrency"], row["tokens_drawn"], row.get("cp_size"), row.get("layer_ms")


def _change(before: float | None, after: float | None) -> float | None:
    return after / before - 1 if before and after is not None else None


def _ttft(row: Mapping[str, Any]) -> float | None:
    mean: float | None = (row.get("ttft_ms") or {}).get("mean")
    return mean
