"""Holds a result against a saved one: for scripts that must notice when a change made something slower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from kvctl.bench.results import SCHEMA

PASS = "PASS"
FAIL = "FAIL"
# Two runs are the same measurement when they agree on these.
_KEY = ("path", "transport", "device", "pipeline", "cp_mode", "concurrency", "tokens", "page_size")


def load_baseline(path: Path) -> dict[str, Any]:
    """A document written by `--save`.

    Raises:
        ValueError: the file cannot be read, or is something else.
    """
    try:
        document = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or not isinstance(document.get("runs"), list):
        raise ValueError(f"{path} is no result of kvctl bench: its schema is not {SCHEMA!r}; write one with --save")
    return document


def compare(
    rows: Sequence[dict[str, Any]], shape: Mapping[str, Any], baseline: Mapping[str, Any], max_regress: float
) -> list[dict[str, Any]]:
    """The rows, each with a `baseline` where the saved result has the same measurement.

    Args:
        max_regress: how much of the saved GB/s may be missing, as a ratio.

    Raises:
        ValueError: nothing can be compared: another shape, or no run in common.
    """
    if baseline.get("shape") != shape:
        raise ValueError(f"the baseline was measured with another shape: {baseline.get('shape')}, now {dict(shape)}")
    saved = {_key(run): run for run in baseline["runs"]}
    if not any(_key(row) in saved for row in rows):
        paths = ", ".join(sorted({str(run.get("path")) for run in baseline["runs"]}))
        raise ValueError(
            f"the baseline has no run with the same path, transport, concurrency, tokens and page size "
            f"(its paths: {paths or 'none'})"
        )
    return [_compared(row, saved.get(_key(row)), max_regress) for row in rows]


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each run that regressed."""
    return [
        f"{row['path']} at concurrency {row['concurrency']}, {row['tokens']} tokens: {row['gb_per_s']:.3g} GB/s, "
        f"baseline {row['baseline']['gb_per_s']:.3g} ({row['baseline']['change_ratio']:+.1%})"
        for row in rows
        if row.get("baseline") is not None and row["baseline"]["verdict"] == FAIL
    ]


def _compared(row: dict[str, Any], before: Mapping[str, Any] | None, max_regress: float) -> dict[str, Any]:
    if before is None or not before["gb_per_s"]:
        return {**row, "baseline": None}
    change = row["gb_per_s"] / before["gb_per_s"] - 1
    verdict = FAIL if change < -max_regress else PASS
    return {**row, "baseline": {"gb_per_s": before["gb_per_s"], "change_ratio": change, "verdict": verdict}}


def _key(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(run.get(name) for name in _KEY)
