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
from kvctl_agent.contract.config import KEYS_BY_NAME


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--fault", "control-los=5%"), "did you mean control-loss"),
        (("--fault", "stuckroom"), "'stuckroom' is not a fault, did you mean stuck-room"),
        (("--fault", "dead-peer,gated-empty"), "gated-empty can run alone only: it stops all other traffic"),
        (("--fault", "compat", "--fault", "oversized-chunk"), "cannot run at the same time: both change decode-1"),
        (("--fault", "pinned-ring,bootstrap"), "they need different values of prefill_instances"),
        (("--fault", "mystery"), "'mystery' is not a fault; kvctl demo --list-faults lists them"),
        (("--list-faults", "--columns", "speed"), "speed"),
        (
            ("--fault", "kill=decode-7@5s"),
            "there is no rank decode-7; the ranks are prefill-0, prefill-1",
        ),
        (("--fault", "replace=decode-0@5s+9s"), "replace=decode-0@5s+9s: only a prefill rank without"),
        (("--fault", "replace=prefill-0@5s+9s"), "the registry can be replaced: prefill-1"),
        (("--fault", "control-loss=1%", "--fault", "control-loss=2%"), "control-loss"),
        (("--tokens", "5..1"), "5..1"),
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
