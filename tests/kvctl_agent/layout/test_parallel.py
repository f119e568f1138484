from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.contract.states import MAX_RANKS
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import (
    ParallelConfig,
    RankCoord,
    head_range,
    local_shards,
    mix64,
    replicas,
)
from kvctl_agent.layout.shape import ModelShape, StateShape


def test_ranks_are_numbered_pp_dp_cp_tp_with_tp_fastest() -> None:
    side = ParallelConfig(dp=2, pp=3, cp=2, tp=4)
    in_order = [
        RankCoord(dp=dp, pp=pp, cp=cp, tp=tp)
        for pp in range(3)
        for dp in range(2)
        for cp in range(2)
        for tp in range(4)
    ]
    assert side.size == 48
    assert [side.coord(rank) for rank in range(48)] == in_order
    assert [side.unique_rank(coord) for coord in in_order] == list(range(48))


@pytest.mark.parametrize(
    ("side", "rank", "label"),
    [
        (ParallelConfig(tp=4), 2, "tp=2"),
        (ParallelConfig(dp=2, tp=2), 2, "dp=1,tp=0"),
        (ParallelConfig(dp=4), 3, "dp=3"),
        (ParallelConfig(dp=2, pp=2, cp=2, tp=2), 13, "dp=1,pp=1,cp=0,tp=1"),
        (ParallelConfig(), 0, "tp=0"),
    ],
)
def test_a_label_names_only_the_axes_that_tell_ranks_apart(side: ParallelConfig, rank: int, label: str) -> None:
    assert side.label(side.coord(rank)) == label


@pytest.mark.parametrize("size", [0, -1, 1.0, "2", True, None, 2**31])
@pytest.mark.parametrize("axis", ["dp", "pp", "cp", "tp"])
def test_a_size_that_is_no_positive_whole_number_is_refused_by_name(axis: str, size: object) -> None:
    with pytest.raises(LayoutError, match=rf"^{axis} is .* it must be a whole number from 1"):
        ParallelConfig(**{axis: size})  # type: ignore[arg-type]


def test_more_than_the_maximum_number_of_ranks_are_refused() -> None:
    assert ParallelConfig(dp=256, tp=256).size == MAX_RANKS
    with pytest.raises(LayoutError, match=r"dp=257 \* pp=1 \* cp=1 \* tp=256 = 65792 ranks"):
        ParallelConfig(dp=257, tp=256)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_instance_is_refused(rank: int) -> None:
    with pytest.raises(LayoutError, match=f"rank {rank} is not one of the 4 ranks"):
        ParallelConfig(tp=4).coord(rank)


def test_a_place_outside_the_instance_is_refused() -> None:
    with pytest.raises(LayoutError, match="dp=2 is outside an instance with dp size 2"):
        ParallelConfig(dp=2).unique_rank(RankCoord(dp=2, pp=0, cp=0, tp=0))
    with pytest.raises(LayoutError, match="tp=-1 is outside"):
        ParallelConfig(tp=2).unique_rank(RankCoord(dp=0, pp=0, cp=0, tp=-1))


# --- Pipeline stages. ---


def stage_ranges(side: ParallelConfig, num_layers: int) -> list[tuple[int, int]]:
    return [side.stage_range(num_layers, stage) for stage in range(side.pp)]


@pytest.mark.parametrize("layers", range(1, 12))
@pytest.mark.parametrize("pp", range(1, 12))
def test_even_stages_tile_the_layers_and_differ_by_one_at_most(layers: int, pp: int) -> None:
    if pp > layers:
        with pytest.raises(
            LayoutError, match=f"^{layers} layers cannot be divided into pp={pp} stages: one would be empty"
        ):
            ParallelConfig(pp=pp).stage_range(layers, 0)
        return
    stages = stage_ranges(ParallelConfig(pp=pp), layers)
    assert [layer for lo, hi in stages for layer in range(lo, hi)] == list(range(layers))
    sizes = [hi - lo for lo, hi in stages]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_stages_that_do_not_add_up_are_refused_with_the_sum() -> None:
    with pytest.raises(LayoutError, match=r"^pipeline stages have 3\+4 = 7 layers, but the model has 8$"):
        ParallelConfig(pp=2, stages=(3, 4)).stage_range(8, 0)


def test_the_number_of_stages_must_equal_pp() -> None:
    with pytest.raises(LayoutError, match=r"^stages=3,4,1 has 3 stages, but pp=2$"):
        ParallelConfig(pp=2, stages=(3, 4, 1))
    with pytest.raises(LayoutError, match=r"^stages=8 has 1 stages, but pp=2$"):
        ParallelConfig(pp=2, stages=(8,))


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True])
def test_a_stage_has_layers(size: object) -> None:
    with pytest.raises(LayoutError, match=r"^layers of a stage is .* it must be a whole number from 1"):
        ParallelConfig(pp=2, stages=(3, size))  # type: ignore[arg-type]


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


DRAFT = ModelShape(1, 2, 4, 4, 2)
CONV = StateShape("conv", layers=(0, 1, 1, 5), rows=3, heads=1, head_bytes=10)
SSM = StateShape("ssm", layers=(4,), rows=1, heads=4, head_bytes=10)
SHAPE = ModelShape(6, 8, 4, 4, 2, draft=DRAFT, states=(CONV, SSM))


def ranges(side: ParallelConfig, pp: int, tp: int, shape: ModelShape = SHAPE) -> list[tuple[str, int, int, int, int]]:
    mine = local_shards(shape, 16, side, RankCoord(dp=0, pp=pp, cp=0, tp=tp))
    return [(h.segment.name, h.layer_lo, h.layer_hi, h.head_lo, h.head_hi) for h in mine]


def test_a_stage_holds_its_layers_the_state_beside_them_and_the_last_one_the_draft() -> None:
    side = ParallelConfig(pp=2, tp=4, stages=(4, 2))
    first, last = ranges(side, 0, 3), ranges(side, 1, 3)
    assert first == [("kv", 0, 4, 6, 8), ("draft", 6, 6, 1, 2), ("conv", 0, 3, 0, 1), ("ssm", 0, 0, 3, 4)]
    assert last == [("kv", 4, 6, 6, 8), ("draft", 6, 7, 1, 2), ("conv", 3, 4, 0, 1), ("ssm", 0, 1, 3, 4)]
    mine = local_shards(SHAPE, 16, side, RankCoord(dp=0, pp=0, cp=0, tp=3))
    assert [(h.num_layers, h.heads) for h in mine] == [(4, 2), (0, 1), (3, 1), (0, 1)]


def test_an_impossible_layout_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"8 % 3 = 2 and 3 % 8 = 3"):
        ranges(ParallelConfig(tp=3), 0, 0)
    with pytest.raises(LayoutError, match=r"6 layers cannot be divided into pp=7 stages"):
        ranges(ParallelConfig(pp=7), 0, 0)
    with pytest.raises(LayoutError, match=r"2 KV heads cannot be laid out over tp 3"):
        ranges(ParallelConfig(tp=3), 0, 0, replace(SHAPE, num_kv_heads=3, states=()))
