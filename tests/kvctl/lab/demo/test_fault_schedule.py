"""What is drawn for a soak: the same from the same seed, and never so much at once that nobody can serve."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.lab.demo.fault_schedule import ScheduledFault, draw_schedule
from kvctl.lab.demo.fleet import replaceable
from kvctl.lab.faults.specification import parse_faults
from tests.support.planned_ranks import planned_ranks

LAYOUTS = {"tp2 and tp1 to dp2": ((2, 1), 2, 1), "tp2 to dp2": ((2,), 2, 1), "three to dp3 tp2": ((1, 1, 1), 3, 2)}


def group(ranks: dict[str, Any], name: str) -> tuple[str, int]:
    rank = ranks[name]
    return (rank["role"], rank["instance"] if rank["role"] == "prefill" else rank["dp"])


def outages(strikes: list[ScheduledFault]) -> list[ScheduledFault]:
    return [strike for strike in strikes if strike.kind in ("kill", "pause", "replace")]


def test_the_same_seed_gives_the_same_schedule_and_another_one_another():
    here = planned_ranks()
    first = draw_schedule(7, 300, here)
    assert first == draw_schedule(7, 300, dict(reversed(here.items())))
    assert first != draw_schedule(8, 300, here)
    assert len(first) > 50


def test_every_kind_and_every_rank_has_its_turn():
    here = planned_ranks()
    strikes = draw_schedule(3, 3600, here)
    assert {strike.kind for strike in strikes} == {"kill", "pause", "replace", "fault"}
    assert {strike.rank for strike in outages(strikes)} == set(here)
    faults = {strike.spec.partition("=")[0] for strike in strikes if strike.kind == "fault"}
    assert len(faults) == 14
    assert any(strike.spec for strike in strikes if strike.kind == "kill")  # a clock that is off
    assert any(strike.again_s for strike in strikes)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(seed=st.integers(0, 1 << 31))
def test_a_prefill_instance_and_a_decode_group_are_always_left(layout: str, seed: int):
    here = planned_ranks(*LAYOUTS[layout])
    strikes = outages(draw_schedule(seed, 600, here))
    for at in strikes:
        down = {
            strike.rank for strike in strikes if strike.at_s <= at.at_s <= strike.at_s + strike.seconds + strike.again_s
        }
        for role in ("prefill", "decode"):
            groups = {group(here, name) for name in here if here[name]["role"] == role}
            hit = [group(here, name) for name in down if here[name]["role"] == role]
            # Where there is one group only, its ranks take turns.
            assert len(hit) <= 1 if len(groups) == 1 else len(set(hit)) < len(groups)


@given(seed=st.integers(0, 1 << 31))
def test_a_rank_without_the_registry_is_replaced_and_its_instance_left_alone_meanwhile(seed: int):
    here = planned_ranks((2, 3), 2)
    strikes = outages(draw_schedule(seed, 1200, here))
    replaced = [strike for strike in strikes if strike.kind == "replace"]
    for strike in replaced:
        assert replaceable(here[strike.rank])
        assert 12 <= strike.seconds <= 30
        over_s = strike.at_s + strike.seconds + strike.again_s
        others = [
            other.rank
            for other in strikes
            if other is not strike
            and group(here, other.rank) == group(here, strike.rank)
            and other.at_s <= over_s
            and other.at_s + other.seconds + other.again_s >= strike.at_s
        ]
        assert others == []


def test_replaced_processes_go_on_or_die_frozen():
    strikes = [strike for strike in draw_schedule(3, 3600, planned_ranks()) if strike.kind == "replace"]
    assert {strike.rank for strike in strikes} == {"p0-prefill-1"}
    assert {strike.again_s > 0 for strike in strikes} == {True, False}


@given(seed=st.integers(0, 1 << 31), seconds=st.floats(1, 400))
def test_faults_are_ones_that_the_rank_can_have_and_all_is_over_before_the_end(seed: int, seconds: float):
    here = planned_ranks()
    for strike in draw_schedule(seed, seconds, here):
        assert 0 < strike.at_s < seconds
        assert strike.at_s + strike.seconds + strike.again_s < seconds
        for fault in parse_faults(strike.spec) if strike.spec else ():
            assert fault.kind.level == "agent"
            if here[strike.rank]["role"] == "prefill":
                assert not fault.name.startswith("notify-")
            else:
                assert not fault.name.startswith("write-")
