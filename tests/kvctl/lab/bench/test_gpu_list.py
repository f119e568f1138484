"""The list of GPU measurements: how claims are measured, and commands that run out of time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest

from benchmarks import gpu_list
from benchmarks.gpu_claims import Bench, Claim, auto_of_best, benches, over, ttft_at, ttft_where_even
from benchmarks.gpu_claims import worst_ttft as worst
from kvctl.commands.bench import bench


def run(path: str, **changes: Any) -> dict[str, Any]:
    figures = {"pipeline": "off", "concurrency": 1, "tokens": 64, "gb_per_s": 1.0}
    return {"path": path, **figures, **changes}


def served(
    pipeline: str, tokens: int, ttft: float, compute: float = 10.0, exposed: float = 0.1, groups: int = 10
) -> dict[str, Any]:
    times: dict[str, Any] = {"groups": groups if pipeline == "on" else 1}
    times |= {"ttft_ms": {"mean": ttft}, "compute_ms": {"p50": compute}, "exposed_ms": {"p50": exposed}}
    return run("staged", pipeline=pipeline, tokens=tokens, **times)


@pytest.mark.parametrize("slow", ["mooncake", "ucx-tcp"])
def test_every_command_of_the_list_can_be_understood(slow: str) -> None:
    names = [each.name for each in benches(slow)]
    assert len(names) == len(set(names))
    for each in benches(slow):
        for options in (f"{each.options} --device cuda --prefill-gpus 0 --decode-gpus 1", each.tiny):
            with bench.make_context("bench", options.split()) as ctx:
                assert isinstance(ctx, click.Context)


def test_paths_are_held_against_each_other() -> None:
    document = {"runs": [run("slice"), run("staged", gb_per_s=150.0), run("auto", gb_per_s=148.5)]}
    assert over("gb_per_s", "staged", "slice")(document) == 150
    assert over("gb_per_s", "direct", "slice")(document) is None
    assert auto_of_best(document) == pytest.approx(0.99)


def test_ttft_is_that_of_one_load() -> None:
    runs = [run(path, concurrency=512, ttft_ms={"mean": mean}) for path, mean in (("slice", 90.0), ("staged", 3.0))]
    document = {"runs": [*runs, run("slice", ttft_ms={"mean": 1.0})]}
    assert ttft_at(512, "staged", "slice")(document) == pytest.approx(1 / 30)
    assert ttft_at(256, "staged", "slice")(document) is None


def test_pipelining_counts_where_transfer_takes_as_long_as_compute() -> None:
    document = {
        "runs": [
            served("off", 1024, 100.0, compute=10.0, exposed=90.0),
            served("on", 1024, 101.0),
            served("off", 4096, 100.0, compute=48.0, exposed=52.0),
            served("on", 4096, 55.0),
            served("off", 512, 100.0, exposed=10.0),  # too short to be cut
            served("on", 512, 101.0, exposed=10.0, groups=1),
            served("off", 8192, 100.0),  # its other half was not reached
        ]
    }
    assert ttft_where_even(document) == pytest.approx(-0.45)
    assert worst(document) == pytest.approx(0.01)


def test_a_claim_says_its_bound() -> None:
    at_most = Claim("latency", lambda document: 1.0, at_most=1.2, show="{:.1f} x")
    assert (at_most.target, at_most.holds(1.2), at_most.holds(1.3)) == ("at most 1.2 x", True, False)
    at_least = Claim("rate", lambda document: 1.0, at_least=0.5, show="{:.0%}")
    assert (at_least.target, at_least.holds(0.4)) == ("at least 50%", False)
    assert Claim("slower", lambda document: 1.0).target == "shown"


class TestList:
    """From commands to the table; `sh` stands in for python, so that nothing is measured."""

    DOCUMENT: ClassVar = {"verified": True, "env": {"kvctl": "1"}, "floors": {}, "runs": [run("staged", gb_per_s=3.0)]}

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Bench]:
        claims = (
            Claim("rate", lambda document: document["runs"][0]["gb_per_s"], at_least=2),
            Claim("of what is not there", lambda document: None, at_least=2),
        )
        calls = [Bench(name, "--tokens 5", claims, "--tokens 1", least_s=0.0) for name in ("first", "second")]
        monkeypatch.setattr(gpu_list, "benches", lambda slow: calls)
        (tmp_path / "document").write_text(json.dumps(self.DOCUMENT))
        monkeypatch.setattr(gpu_list, "_command", self.command(tmp_path, 'cp "$0" "$1"; echo a table'))
        return calls

    def command(self, tmp_path: Path, script: str) -> Any:
        return lambda each, asked, save: ["sh", "-c", script, str(tmp_path / "document"), str(save)]

    def table(self, tmp_path: Path, *options: str) -> tuple[int, dict[str, str], dict[str, Any]]:
        status = gpu_list.main(["--out", str(tmp_path / "out"), *options])
        saved = json.loads((tmp_path / "out" / "list.json").read_text())
        return status, {f"{line['bench']} {line['claim']}": line["result"] for line in saved["claims"]}, saved

    def test_all_results_are_in_one_table(self, calls: list[Bench], tmp_path: Path, capsys: Any) -> None:
        status, results, saved = self.table(tmp_path)
        assert status == 0
        assert results == {
            "first rate": "PASS",
            "first of what is not there": "not measured",
            "first first: every byte verified": "PASS",
            "second rate": "PASS",
            "second of what is not there": "not measured",
            "second second: every byte verified": "PASS",
        }
        assert saved["env"] == {"kvctl": "1"}
        assert [each["status"] for each in saved["benches"]] == [0, 0]
        assert (tmp_path / "out" / "first.txt").read_text() == "a table\n"
        assert "CLAIM                        TARGET         MEASURED  RESULT" in capsys.readouterr().out

    def test_what_fails_is_said_and_in_the_status(
        self, calls: list[Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gpu_list, "_command", self.command(tmp_path, "exit 3"))
        status, results, _ = self.table(tmp_path, "--only", "first")
        assert (status, results["first rate"]) == (1, "not run: exit 3, see above")

    def test_what_there_is_no_time_for_is_not_begun(self, calls: list[Bench], tmp_path: Path) -> None:
        status, results, saved = self.table(tmp_path, "--seconds", "-1")
        assert (status, results["second rate"]) == (0, "not run: 0 s were left")
        assert saved["benches"][0]["status"] is None

    def test_what_takes_too_long_is_interrupted_and_what_it_saved_counts(
        self, calls: list[Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = """trap 'cp "$0" "$1"; exit 130' INT; while true; do sleep 0.05; done"""
        monkeypatch.setattr(gpu_list, "_command", self.command(tmp_path, script))
        status, results, saved = self.table(tmp_path, "--seconds", "0.5", "--only", "first")
        assert (status, results["first rate"]) == (0, "PASS")
        assert saved["benches"][0]["why_not"].startswith("its time was up")

    def test_a_rehearsal_judges_nothing(self, calls: list[Bench], tmp_path: Path) -> None:
        assert set(self.table(tmp_path, "--rehearse")[1].values()) == {"", "not measured"}
