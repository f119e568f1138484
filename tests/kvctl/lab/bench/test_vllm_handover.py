"""The comparison of connectors inside vLLM: its table and what it computes from the times of an engine's steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import vllm_handover
from benchmarks.vllm_handover import SIDES, Call, Comparison, Side

OURS, NIXL, BOTH = Side("kvctl", False), Side("nixl", False), Side("kvctl", True)


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    return Comparison(vllm_handover._options(["--lengths", "64", "--out", str(tmp_path)]))


def row(document: dict[str, Any], text: str) -> list[str]:
    line = next(line for line in vllm_handover.table(document).splitlines() if text in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_table_has_medians_of_the_rounds_and_ratios_to_nixl_of_each_order(comparison: Comparison) -> None:
    for side, values in ((OURS, (3.0, 1.0, 2.0)), (NIXL, (4.0, 4.0, 9.0)), (BOTH, (1.0, 1.0, 8.0))):
        for value in values:
            comparison._note(side, "handover_ms_64", value)
    assert row(comparison.document, "handover, 64 tokens")[1:] == [
        "2.00 ms",
        "4.00 ms",
        "1.00 ms",
        "0.50 x",
        "≈ 0.25 x",
    ]


def test_table_without_nixl_has_no_ratios_and_dashes_for_what_was_not_measured(comparison: Comparison) -> None:
    comparison._note(OURS, "handover_ms_64", 3.0)
    comparison._note(BOTH, "cpu_ms", 3.0)
    assert row(comparison.document, "handover, 64 tokens")[1:] == ["3.00 ms", "-"]
    assert row(comparison.document, "requests per second")[1:] == ["-", "-"]


def test_slowdown_compares_steps_beside_transfers_with_those_before_and_after(comparison: Comparison) -> None:
    stamps = [*range(0, 100, 10), *range(100, 200, 20), *range(200, 300, 10)]
    comparison._slowdown(NIXL, "decode", stamps, [(0, 100), (100, 200), (200, 300)])
    found = {name: values[NIXL.text][0] for name, values in comparison.document["figures"].items()}
    assert found["decode_slowdown"] == pytest.approx(2.0)
    assert found["decode_stall_ms"] == pytest.approx(20e-6)
    assert found["decode_stall_alone_ms"] == pytest.approx(10e-6)


def test_results_are_saved_as_json_and_markdown(comparison: Comparison, tmp_path: Path) -> None:
    comparison._note(OURS, "idle_percent", 1.0)
    comparison._save()
    assert json.loads((tmp_path / "vllm_handover.json").read_text())["schema"] == vllm_handover.SCHEMA
    assert "CPU of idle engines" in (tmp_path / "vllm_handover.md").read_text()


def test_an_answer_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_handover, "ANSWER_S", 0.01)
    with pytest.raises(TimeoutError, match="request r1"):
        Call("r1").wait()


def test_only_nixl_needs_the_answer_of_prefill() -> None:
    assert {side.connector for side in SIDES if not side.at_once} == {*vllm_handover.CONNECTORS}
    assert {side.connector for side in SIDES if side.at_once} == {"kvctl", "baseline", "push"}
