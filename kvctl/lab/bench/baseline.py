"""Compares a bench result with a saved one, so that scripts can detect a regression.

A lower rate is a regression (FAIL) if the spreads of the rounds of both results show that more than the allowed loss is
lost: the upper end of the spread now is below the lower end of the spread then by more than the allowance. A rate
within the allowance passes. Otherwise the comparison is undecided, which is no failure: noise explains the difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from kvctl.lab.bench.results import SCHEMA
from kvctl.lab.bench.statistics import MIN_ROUNDS, spread

PASS = "PASS"
FAIL = "FAIL"
UNDECIDED = "UNDECIDED"
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
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ValueError(f"{path} is not a result of kvctl bench: its schema is not {SCHEMA!r}; create one with --save")
    if not isinstance(document.get("runs"), list):
        raise ValueError(f"{path} has no list of runs")
    return document


def compare(
    rows: Sequence[dict[str, Any]], shape: Mapping[str, Any], baseline: Mapping[str, Any], max_regress: float
) -> list[dict[str, Any]]:
    """Returns the rows with a field `baseline` added: the saved rate, the change since, the verdict and its reason.

    The field is None if the saved result lacks the same measurement or has no rate for it.

    Args:
        rows: Rows of the new result.
        shape: The model's shape in the new result.
        baseline: The saved result, from `load_baseline`.
        max_regress: Allowed loss of GB/s against the saved result, as a ratio.

    Raises:
        ValueError: The shapes differ, or the results have no measurement in common.
    """
    before = baseline.get("shape")
    if before != shape:
        raise ValueError(f"the baseline was measured with another shape: {before}, now {dict(shape)}")
    pairs = [(row, next((run for run in baseline["runs"] if _same(run, row)), None)) for row in rows]
    if all(run is None for _, run in pairs):
        paths = ", ".join(sorted({str(run.get("path")) for run in baseline["runs"]}))
        raise ValueError(
            f"the baseline has no run with the same path, transport, layout, concurrency, tokens, page sizes "
            f"and pool layouts (its paths: {paths or 'none'})"
        )
    return [_compared(row, run, max_regress) for row, run in pairs]


def lines(rows: Sequence[Mapping[str, Any]], verdict: str) -> list[str]:
    """Returns a line of text for each row with a verdict: both rates, the change and the reason."""
    return [
        f"{verdict}: {row['path']} at concurrency {row['concurrency']}, {row['tokens']} tokens: {row['gb_per_s']:.3g} "
        f"GB/s, baseline {row['baseline']['gb_per_s']:.3g} ({row['baseline']['change_ratio']:+.1%}): "
        f"{row['baseline']['why']}"
        for row in rows
        if row.get("baseline") is not None and row["baseline"]["verdict"] == verdict
    ]


def _compared(row: dict[str, Any], before: Mapping[str, Any] | None, max_regress: float) -> dict[str, Any]:
    saved = _rate(before)
    if before is None or not saved:
        return {**row, "baseline": None}
    now = _rates(row["rounds"])
    then = _rates(before.get("rounds"))
    known = len(then) >= MIN_ROUNDS
    if not known:
        then = [rate * saved / row["gb_per_s"] for rate in now if row["gb_per_s"]]
    change = row["gb_per_s"] / saved - 1
    verdict, why = _verdict(now, then, change, max_regress)
    if not known:
        why += f"; the baseline has fewer than {MIN_ROUNDS} rounds, so its spread is taken to be that of this run"
    return {
        **row,
        "baseline": {"gb_per_s": saved, "change_ratio": change, "verdict": verdict, "why": why},
    }


def _verdict(now: Sequence[float], then: Sequence[float], change: float, max_regress: float) -> tuple[str, str]:
    """Returns the verdict and its reason.

    Args:
        now, then: GB/s of the rounds of both results.
        change: Relative change of the rate.
    """
    if change >= -max_regress:
        return PASS, f"within {max_regress:.0%}"
    if len(now) < MIN_ROUNDS:
        return UNDECIDED, f"it takes {MIN_ROUNDS} rounds to tell a regression from noise, and there are {len(now)}"
    (low, high), (old_low, old_high) = spread(now), spread(then)
    spreads = f"{low:.3g}-{high:.3g} in {len(now)} rounds, baseline {old_low:.3g}-{old_high:.3g}"
    if high < old_low * (1 - max_regress):
        return FAIL, f"the spreads ({spreads}) are more than {max_regress:.0%} apart"
    return UNDECIDED, f"the spreads ({spreads}) are not more than {max_regress:.0%} apart, so it may be noise"


def _rate(run: object) -> float | None:
    figure = run.get("gb_per_s") if isinstance(run, Mapping) else None
    return float(figure) if isinstance(figure, int | float) else None


def _rates(rounds: object) -> list[float]:
    """Returns the rates of a row's rounds; empty for a result that was saved before rows had rounds."""
    found = map(_rate, rounds if isinstance(rounds, list) else ())
    return [rate for rate in found if rate is not None]


def _same(saved: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Returns whether two runs are the same measurement."""
    return all(saved.get(name) == row.get(name) for name in _KEY)
