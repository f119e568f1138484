from __future__ import annotations

import pytest

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import MAX_RANKS, ParallelConfig, RankCoord


def test_sizes_default_to_one_rank() -> None:
    assert ParallelConfig().size == 1
    assert ParallelConfig().coord(0) == RankCoord(dp=0, pp=0, cp=0, tp=0)


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


def ranges(side: ParallelConfig, num_layers: int) -> list[tuple[int, int]]:
    return [side.stage_range(num_layers, stage) for stage in range(side.pp)]


def test_even_stages_give_the_first_ones_the_remainder() -> None:
    assert ranges(ParallelConfig(), 5) == [(0, 5)]
    assert ranges(ParallelConfig(pp=2), 4) == [(0, 2), (2, 4)]
    assert ranges(ParallelConfig(pp=3), 8) == [(0, 3), (3, 6), (6, 8)]
    assert ranges(ParallelConfig(pp=4), 5) == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_stages_of_given_sizes_follow_each_other() -> None:
    assert ranges(ParallelConfig(pp=3, stages=(1, 5, 2)), 8) == [(0, 1), (1, 6), (6, 8)]


@pytest.mark.parametrize("layers", range(1, 12))
@pytest.mark.parametrize("pp", range(1, 12))
def test_even_stages_tile_the_layers_and_differ_by_one_at_most(layers: int, pp: int) -> None:
    if pp > layers:
        with pytest.raises(
            LayoutError, match=f"^{layers} layers cannot be divided into pp={pp} stages: one would be empty"
        ):
            ParallelConfig(pp=pp).stage_range(layers, 0)
        return
    stages = ranges(ParallelConfig(pp=pp), layers)
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
