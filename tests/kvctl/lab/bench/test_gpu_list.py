"""The list of GPU measurements: how claims are measured, and commands that run out of time."""

from __future__ import annotations

from typing import Any

import click
import pytest

from benchmarks.gpu_claims import Claim, auto_of_best, benches, over, ttft_at, ttft_where_even
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
