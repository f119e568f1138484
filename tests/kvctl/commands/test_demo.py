"""`kvctl demo` refuses what cannot be before it starts anything, and says in the end what people have to know."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvctl.commands.demo import _plan, demo
from kvctl.lab.demo.fleet import CALM_TIMINGS, FleetPlan
from kvctl.lab.demo.scenarios import SCENARIOS, SCENARIOS_BY_NAME, Scenario, ScenarioContext, combined
from kvctl.lab.faults.specification import FAULTS_BY_NAME
from kvctl.lab.ranks.group import FleetError, rank_names
from kvctl.lab.ranks.request import Sizes
from kvctl.render.demo import MOMENTS, RANKS, blocks, totals
from kvctl.render.report import Grid, Text
from kvctl_agent.contract.config import KEYS_BY_NAME

SUMMARY: dict[str, Any] = {
    "seed": 7,
    "transport": "nixl",
    "seconds": 61.2,
    "rooms": {"opened": 1200, "done": 1100, "failed_expected": 98, "failed_unexpected": 1, "hung": 1},
    "causes": {"ABORTED": 60, "KV_PEER_LOST": 39},
    "verified_bytes": 3 << 30,
    "corrupt": 0,
    "faults": {"injected": {"kill": 2, "pause": 3}, "struck": {}},
    "restarts": {"count": 2, "cut_short": 1, "serving_s": {"p50": 1.9, "max": 1.9}},
    "starved_s": 4.25,
    "leaks": {"decode-0": ["rooms 1"]},
    "crashes": [{"rank": "decode-1", "returncode": -11, "words": "Segmentation fault"}],
    "not_drained": "waited 44 s for this: nothing of any room is left",
    "findings": ["hung: room 5 of 64 tokens"],
    "evidence": ["soak-evidence/room-5.json"],
    "ranks": [
        {
            "rank": "decode-0",
            "lives": 1,
            "slowest_ns": None,
            "rss_bytes": 300 << 20,
            "slope": 12.5,
            "fds": 47,
            "fds_grown": 0,
            "threads": 11,
            "threads_grown": 0,
            "ring_used_bytes": 0,
            "quarantined_bytes": 0,
            "records": 1,
            "leaks": ["rooms 1"],
        }
    ],
}


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--faults", "random"), "--faults random needs --minutes"),
        (("--fault", "control-los=5%"), "did you mean control-loss"),
        (("--fault", "stuckroom"), "'stuckroom' is not a fault, did you mean stuck-room"),
        (("--fault", "dead-peer,gated-empty"), "gated-empty can run alone only: it stops all other traffic"),
        (("--fault", "compat", "--fault", "oversized-chunk"), "cannot run at the same time: both change decode-1"),
        (("--fault", "pinned-ring,bootstrap"), "they need different values of prefill_instances"),
        (("--fault", "mystery"), "'mystery' is not a fault; kvctl demo --list-faults lists them"),
        (("--list-faults", "--columns", "speed"), "speed"),
        (
            ("--fault", "kill=decode-7@5s", "--minutes", "1"),
            "there is no rank decode-7; the ranks are prefill-0, prefill-1",
        ),
        (("--fault", "replace=decode-0@5s+9s"), "replace=decode-0@5s+9s: only a prefill rank without"),
        (("--fault", "replace=prefill-0@5s+9s"), "the registry can be replaced: prefill-1"),
        (("--fault", "control-loss=1%", "--fault", "control-loss=2%"), "control-loss"),
        (("--bursty",), "--bursty needs --rate"),
        (("--engine", "sglang"), "SGLang is not installed in this environment"),
        (("--tokens", "5..1"), "5..1"),
        (("--evidence", "/proc/nowhere/at/all"), "cannot make /proc/nowhere/at/all"),
        (("--prefill-instances", "tpx"), "tpx"),
        (("--prefill-tp", "3"), "3"),
        (("--columns", "speed"), "speed"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_started(kvctl: Any, args: tuple[str, ...], text: str):
    outcome = kvctl("demo", *args)
    assert outcome.code == 2
    assert text in outcome.err
    assert outcome.out == ""


def test_no_prefill_instances_are_the_one_of_prefill_tp():
    with demo.make_context("demo", ["--prefill-instances", "", "--prefill-tp", "4"]) as ctx:
        assert _plan(ctx.params, None).prefill == (Sizes(tp=4),)


def test_all_that_can_be_done_to_a_fleet_is_listed(kvctl: Any):
    outcome = kvctl("demo", "--list-faults", "-o", "json")
    assert outcome.code == 0
    rows = json.loads(outcome.out)["data"]
    scenarios = {row["fault"]: row["code"] for row in rows if row["kind"] == "scenario"}
    assert scenarios == {scenario.name: scenario.code for scenario in SCENARIOS}
    assert [row["fault"].partition("=")[0] for row in rows[len(scenarios) :]] == list(FAULTS_BY_NAME)
    assert all(row["does"].endswith(".") for row in rows)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_scenario_s_fleet_can_be(scenario: Scenario):
    prefill = scenario.options.get("prefill_instances", FleetPlan().prefill)
    ring_mb = scenario.options.get("ring_mb", 0)
    plan = FleetPlan(prefill=prefill, ring_mb=ring_mb, config={**CALM_TIMINGS, **scenario.config}, **scenario.plan)
    ranks = rank_names(plan.resolve()[0]["ranks"])
    assert plan.absent | plan.odd_pages.keys() <= set(ranks)
    assert plan.prefixed("b-").absent == {f"b-{name}" for name in plan.absent}
    assert scenario.config.keys() <= KEYS_BY_NAME.keys()
    assert plan.patience_s > plan.timings["waiting_timeout_s"]


def test_scenarios_that_run_at_the_same_time_have_the_fleet_of_both():
    both = combined([SCENARIOS_BY_NAME[name] for name in ("corrupt", "compat", "grant-loss")])
    assert both.config == {"checksum": True, "path": "staged"}
    assert both.plan == {"odd_pages": {"decode-1": 24}}


def test_each_scenario_acts_on_a_rank_of_its_own():
    fleet = SimpleNamespace(of_role=lambda role: [f"{role}-{number}" for number in range(3)])
    taken = {"decode-2"}
    contexts = [ScenarioContext(cast(Any, SimpleNamespace(fleet=fleet)), print, taken) for _ in range(2)]
    assert [context.take("prefill") for context in contexts] == ["prefill-2", "prefill-1"]
    assert [context.take("decode", 0) for context in contexts] == ["decode-0", "decode-1"]
    with pytest.raises(FleetError, match="more decode ranks than the fleet has: start more with --decode-dp"):
        contexts[0].take("decode")


def test_the_summary_names_every_finding():
    words, table = blocks(SUMMARY)
    assert isinstance(words, Text)
    assert isinstance(table, Grid)
    lines = ["".join(text for text, _ in line) for line in words.lines]
    assert "ran         61 s on nixl, seed 7" in lines
    assert "faults      kill 2, pause 3" in lines
    assert "restarts    2, 1 of them cut short; serving after 1.9 s, 1.9 s at most" in lines
    assert "hung        1" in lines
    assert any(line.startswith("starved     4.2 s without a processor") for line in lines)
    assert "crash: decode-1 ended with status -11: Segmentation fault" in lines
    assert "hung: room 5 of 64 tokens" in lines
    assert "evidence    soak-evidence/room-5.json" in lines
    red = {text for line in words.lines for text, style in line if style == "bold red"}
    assert {"1", SUMMARY["not_drained"], "hung: room 5 of 64 tokens"} <= red
    assert "0" not in red
    assert totals(SUMMARY)[0] == "1100 rooms done, 98 failed as expected, 1 unexpectedly, 1 hung"


def test_every_column_has_a_value_in_the_rows_that_a_soak_makes():
    row = SUMMARY["ranks"][0]
    assert {column.machine for column in RANKS.columns} <= row.keys()
    assert len({column.machine for column in MOMENTS.columns}) == len(MOMENTS.columns)
