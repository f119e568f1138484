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
