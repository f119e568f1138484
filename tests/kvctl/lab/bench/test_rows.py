"""Deltas of rows against the first row of their load."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.lab.bench.rows import with_delta


def row(path: str, gb_per_s: float, concurrency: int = 4, **more: Any) -> dict[str, Any]:
    ttft = {"mean": 1000.0 / gb_per_s if gb_per_s else None}
    return {
        "path": path,
        "gb_per_s": gb_per_s,
        "concurrency": concurrency,
        "tokens_drawn": "64",
        "ttft_ms": ttft,
        **more,
    }


def deltas(*rows: dict[str, Any]) -> list[tuple[str, int, Any]]:
    return [(each["path"], each["concurrency"], each["delta_ratio"]) for each in with_delta(rows)]


def test_the_first_of_a_load_is_what_the_others_are_held_against():
    assert deltas(row("slice", 2), row("slice", 4, 8), row("staged", 3), row("staged", 2, 8)) == [
        ("slice", 4, None),
        ("staged", 4, 0.5),
        ("slice", 8, None),
        ("staged", 8, -0.5),
    ]


def test_other_compute_is_another_load():
    assert deltas(row("staged", 2, layer_ms=0.0), row("staged", 1, layer_ms=5.0)) == [("staged", 4, None)] * 2


def test_the_time_to_the_first_token_is_compared_too():
    _, after = with_delta([row("slice", 1), row("staged", 4)])
    assert after["ttft_delta_ratio"] == pytest.approx(-0.75)


def test_nothing_is_made_of_nothing():
    assert deltas(row("slice", 0), row("staged", 3)) == [("slice", 4, None), ("staged", 4, None)]
    (only,) = with_delta([{**row("slice", 1), "ttft_ms": None}])
    assert only["ttft_delta_ratio"] is None
