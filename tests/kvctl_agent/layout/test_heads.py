from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.heads import HeadRange, head_range, mix64, replicas


def test_with_fewer_ranks_than_heads_each_holds_a_block() -> None:
    assert [head_range(8, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_with_more_ranks_than_heads_neighbours_hold_the_same_head() -> None:
    assert [head_range(2, 6, rank) for rank in range(6)] == [HeadRange(0, 1)] * 3 + [HeadRange(1, 2)] * 3
    assert replicas(2, 6) == 3
    assert replicas(8, 8) == replicas(8, 4) == 1


@pytest.mark.parametrize("heads", range(1, 25))
def test_ranges_are_the_replicated_head_list_dealt_out_evenly(heads: int) -> None:
    for tp in range(1, 49):
        if heads % tp and tp % heads:
            with pytest.raises(LayoutError):
                head_range(heads, tp, 0)
            continue
        dealt = np.split(np.repeat(np.arange(heads), replicas(heads, tp)), tp)
        assert [list(range(*head_range(heads, tp, rank))) for rank in range(tp)] == [block.tolist() for block in dealt]


def test_a_size_that_does_not_divide_is_refused_with_the_arithmetic_and_the_legal_sizes() -> None:
    with pytest.raises(LayoutError) as refused:
        head_range(8, 3, 0)
    assert str(refused.value) == (
        "8 KV heads cannot be laid out over tp 3: 8 % 3 = 2 and 3 % 8 = 3; choose a tp of 1, 2, 4, 8 or a multiple of 8"
    )


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_tp_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match=rf"tp rank {rank} is outside \[0, 4\)"):
        head_range(8, 4, rank)


def test_mix64_is_the_finaliser_that_splitmix64_publishes() -> None:
    # The first outputs of splitmix64 seeded with 0: the finaliser of 1, 2, 3 times the golden gamma.
    gamma = 0x9E3779B97F4A7C15
    assert [mix64(i * gamma) for i in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix64(0) == 0


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_mix64_stays_in_64_bits_and_ignores_higher_ones(x: int) -> None:
    assert 0 <= mix64(x) < 2**64
    assert mix64(x + 2**64) == mix64(x)


def test_neighbouring_rooms_spread_evenly() -> None:
    hits = Counter(mix64(room) % 4 for room in range(4000))
    assert min(hits.values()) > 850
    assert max(hits.values()) < 1150
