"""The comparison with SGLang: rows and goals, medians of interleaved runs, runs that fail or have no time left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import side_by_side
from benchmarks.side_by_side import ROWS, Goal, RunFailed, Work
from kvctl.commands.bench import bench
from tests.support.process_end import wait_for_end

OURS = {"gb_per_s": 3.0, "rooms_per_s": 20.0, "p50_ms": 1.0, "cpu_ms": 0.5, "observer_cost": 0.01}
DOCUMENT = {
    "env": {"kvctl": "1", "python": "3", "torch": "2", "nixl": "1", "cpu": "a processor"},
    "floors": {**dict.fromkeys(side_by_side.FLOORS), "memcpy_gb_per_s": 10.0},
}


def test_every_row_has_a_name_and_a_command_that_can_be_understood() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert len({row.work for row in ROWS}) == len({row.work.name for row in ROWS})
    for work in {row.work for row in ROWS}:
        with bench.make_context("bench", work.our_options("0", "1")) as ctx:
            assert isinstance(ctx, click.Context)


def test_goals_compare_with_the_peer_with_a_copy_or_with_nothing() -> None:
    assert Goal("≥", 1.5).met(3.0, 2.0, None) is True
    assert Goal("≤", 0.5).met(1.1, 2.0, None) is False
    assert Goal("≥", 1.5).met(3.0, None, None) is None
    assert Goal("≥", 0.85, "copy").met(330.0, None, 388.0) is True
    assert Goal("≤", 0.4, "value").met(0.41, 9.0, None) is False


class TestRounds:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
        """The runs in order; our side is faster in every round than in the one before, the peer as fast."""
        calls: list[str] = []

        def ours(work: Work, options: Any, limit_s: float) -> Any:
            calls.append(f"ours {work.name}")
            return {**OURS, "gb_per_s": float(calls.count(calls[-1]))}, DOCUMENT

        def peer(work: Work, options: Any, limit_s: float) -> Any:
            calls.append(f"peer {work.name}")
            return {**OURS, "gb_per_s": 0.5}

        monkeypatch.setattr(side_by_side, "ours", ours)
        monkeypatch.setattr(side_by_side, "peer", peer)
        monkeypatch.setattr(side_by_side, "peer_versions", lambda folder: {"sglang": "9", "torch": "2", "nixl": "1"})
        (tmp_path / "sglang_pd.py").touch()
        return calls

    def measure(self, tmp_path: Path, *options: str) -> tuple[int, dict[str, Any], str]:
        out = tmp_path / "out"
        status = side_by_side.main(["--peer", str(tmp_path), "--out", str(out), *options])
        return status, json.loads((out / "side_by_side.json").read_text()), (out / "side_by_side.md").read_text()

    def test_sides_take_turns_and_medians_are_compared(self, calls: list[str], tmp_path: Path) -> None:
        status, document, text = self.measure(tmp_path, "--rows", "tp4-tp4,tp1-tp1")
        assert status == 0
        assert calls == ["peer tp4-tp4", "ours tp4-tp4", "peer tp1-tp1", "ours tp1-tp1"] * 3
        assert [run["gb_per_s"] for run in document["works"]["tp4-tp4"]["ours"]] == [1, 2, 3]
        figures = "| 0.5 GB/s (0.5 to 0.5) | 2 GB/s (1 to 3) | 4.00 x |"
        assert f"| TP4 → TP4, 1,024 tokens, 4 in flight {figures} ≥ 3 x | in some runs |" in text
        assert f"| TP1 → TP1, 1,024 tokens, 4 in flight {figures} ≥ 2 x | yes |" in text
        assert "SGLang 9" in text
        assert "Medians of 3 interleaved runs" in text
        assert "memcpy on one thread 10 GB/s" in text

    def test_a_failed_run_is_no_figure_and_is_noted(
        self, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(work: Work, options: Any, limit_s: float) -> Any:
            raise RunFailed("7 of 9 compared elements are wrong")

        monkeypatch.setattr(side_by_side, "peer", fail)
        status, document, text = self.measure(tmp_path, "--rows", "tp4-tp4", "--rounds", "1")
        assert status == 1
        assert document["works"]["tp4-tp4"]["peer"] == []
        assert "| - | 1 GB/s | - | " in text
        assert "Left out: tp4-tp4, SGLang, round 1: 7 of 9 compared elements are wrong" in text


class TestProcesses:
    def test_one_that_does_not_end_is_killed_with_its_children(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(side_by_side, "_STOP_S", 0.2)
        script = f"trap '' INT; sleep 1000 & echo $! > {tmp_path}/child; wait"
        with pytest.raises(RunFailed, match="did not end within"):
            side_by_side._run(["sh", "-c", script], {}, 1)
        wait_for_end(int((tmp_path / "child").read_text()))

    def test_the_figures_of_the_peer_are_those_of_its_last_line(self, tmp_path: Path) -> None:
        run = {"GB_s": 1.5, "rooms_s": 11.0, "lat_ms_p50": 3.0, "cpu_P_s": 0.3, "cpu_D_s": 0.2, "rooms": 10}
        run |= {"bad": 0, "checked": 4}
        (tmp_path / "sglang_pd.py").write_text(f"print('starting')\nprint({json.dumps(json.dumps(run))})\n")
        options = side_by_side._options([])
        options.peer = tmp_path
        work = Work("any", tokens=16, in_flight=1, rooms=10)
        assert side_by_side.peer(work, options, 60) == pytest.approx(
            {"gb_per_s": 1.5, "rooms_per_s": 11, "p50_ms": 3, "cpu_ms": 10}
        )
        run["bad"] = 2
        (tmp_path / "sglang_pd.py").write_text(f"print({json.dumps(json.dumps(run))})\n")
        with pytest.raises(RunFailed, match="2 of 4 compared elements"):
            side_by_side.peer(work, options, 60)
