"""Compares a bench result with a saved one, so that scripts can detect a regression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from kvctl.lab.bench.results import SCHEMA

# Schema of results saved in the weeks before the first release.
_OLD_SCHEMA = "kvctl.lab.bench/1"
PASS = "PASS"
FAIL = "FAIL"
# Runs with the same values of these fields are the same measurement.
_KEY = (
    "path",
    "transport",
    "device",
    "compute",
    "pipeline",
    "cp_mode",
    "concurrency",
    "tokens",
    "page_size",
    "decode_page_size",
    "cp_interleave",
    "kv_layouts",
    "prefill",
    "decode",
    "layer_ms",
)


def load_baseline(path: Path) -> dict[str, Any]:
    """Reads a file written by `kvctl bench --save`.

    Raises:
        ValueError: The file cannot be read, or is not a saved result.
    """
    try:
        document = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("schema") not in (SCHEMA, _OLD_SCHEMA):
        raise ValueError(f"{path} is not a result of kvctl bench: its schema is not {SCHEMA!r}; create one with --save")
    if not isinstance(document.get("runs"), list):
        raise ValueError(f"{path} has no list of runs")
    return document


def compare(
    rows: Sequence[dict[str, Any]], shape: Mapping[str, Any], baseline: Mapping[str, Any], max_regress: float
) -> list[dict[str, Any]]:
    """Returns the rows with a field `baseline` added: the saved rate, the change since and the verdict.

    The field is None if the saved result lacks the same measurement or has no rate for it.

    Args:
        rows: Rows of the new result.
        shape: The model's shape in the new result.
        baseline: The saved result, from `load_baseline`.
        max_regress: Allowed loss of GB/s against the saved result, as a ratio.

    Raises:
        ValueError: The shapes differ, or the results have no measurement in common.
    """
    # An older saved shape may have fewer fields; it has no KV groups.
    before = baseline.get("shape")
    if not isinstance(before, dict) or any(
        shape.get(name, []) != value for name, value in {"groups": [], **before}.items()
    ):
        raise ValueError(f"the baseline was measured with another shape: {before}, now {dict(shape)}")
    pairs = [(row, next((run for run in baseline["runs"] if _same(run, row)), None)) for row in rows]
    if all(run is None for _, run in pairs):
        paths = ", ".join(sorted({str(run.get("path")) for run in baseline["runs"]}))
        raise ValueError(
            f"the baseline has no run with the same path, transport, layout, concurrency, tokens, page sizes "
            f"and pool layouts (its paths: {paths or 'none'})"
        )
    return [_compared(row, run, max_regress) for row, run in pairs]


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns one line of text for each row whose verdict is FAIL."""
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


def _same(saved: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Returns whether two runs are the same measurement; key fields that the saved run lacks are ignored.

    Runs saved before pages and pools of the two sides could differ are of equal pages and contiguous pools.
    """
    saved = {"decode_page_size": saved.get("page_size"), "cp_interleave": None, "kv_layouts": ["nhd", "nhd"], **saved}
    return all(saved[name] == row.get(name) for name in _KEY if name in saved)
