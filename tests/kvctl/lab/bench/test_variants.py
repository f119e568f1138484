"""The fleets of a bench, and which of them run at the same time."""

from __future__ import annotations

import pytest

from kvctl.lab.bench.variants import MAX_RANKS, expand, sizes_text, waves
from kvctl.lab.ranks.request import PlanRequest, Sizes

TP4 = Sizes(tp=4)


def request(prefill: Sizes = TP4, memory_bytes: int = 1 << 30) -> PlanRequest:
    return PlanRequest(prefill=(prefill,), decode=Sizes(dp=4), loads=(), memory_bytes=memory_bytes, seed=0)


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
