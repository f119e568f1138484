"""The fleets of a bench, and which of them run at the same time."""

from __future__ import annotations

import pytest

from kvctl.lab.bench.variants import MAX_RANKS, expand, sizes_text, waves
from kvctl.lab.ranks.request import PlanRequest, Sizes

TP4 = Sizes(tp=4)


def request(prefill: Sizes = TP4, memory_bytes: int = 1 << 30) -> PlanRequest:
    return PlanRequest(prefill=(prefill,), decode=Sizes(dp=4), loads=(), memory_bytes=memory_bytes, seed=0)


def test_one_fleet_needs_no_name():
    (only,) = expand(request(), ["nixl"], ["rank0"])
    assert (only.label, only.name, only.ranks) == ("", "", 8)


def test_every_transport_in_every_mode_is_named_by_what_differs():
    assert [each.label for each in expand(request(), ["nixl", "mooncake"], ["all"])] == ["nixl", "mooncake"]
    both = expand(request(), ["nixl", "mooncake"], ["all", "all-chunk"])
    assert [each.name for each in both] == ["nixl-all", "nixl-all-chunk", "mooncake-all", "mooncake-all-chunk"]
    assert [(each.request.transport, each.request.cp_mode) for each in both][1] == ("nixl", "all-chunk")


def test_fleets_that_are_compared_are_alive_together_and_share_the_memory():
    (wave,) = waves(expand(request(), ["nixl", "mooncake"], ["rank0"]))
    assert [each.request.memory_bytes for each in wave] == [1 << 29] * 2


def test_more_ranks_than_the_machine_should_bear_run_one_after_another():
    group = expand(request(Sizes(tp=MAX_RANKS // 2)), ["nixl", "mooncake"], ["rank0"])
    assert [len(wave) for wave in waves(group)] == [1, 1]
    assert [wave[0].request.memory_bytes for wave in waves(group)] == [1 << 30] * 2


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (Sizes(), "tp1"),
        (Sizes(tp=4), "tp4"),
        (Sizes(dp=2, tp=2), "dp2 tp2"),
        (Sizes(pp=2, tp=2, layers=(10, 22)), "pp10+22 tp2"),
    ],
)
def test_sizes_for_people(sizes: Sizes, text: str):
    assert sizes_text(sizes) == text
