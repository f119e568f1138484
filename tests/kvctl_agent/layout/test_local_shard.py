from __future__ import annotations

from dataclasses import replace

import pytest

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.local_shard import local_shards
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.layout.shape import ModelShape, StateShape

DRAFT = ModelShape(1, 2, 4, 4, 2)
CONV = StateShape("conv", layers=(0, 1, 1, 5), rows=3, heads=1, head_bytes=10)
SSM = StateShape("ssm", layers=(4,), rows=1, heads=4, head_bytes=10)
SHAPE = ModelShape(6, 8, 4, 4, 2, draft=DRAFT, states=(CONV, SSM))


def ranges(side: ParallelConfig, pp: int, tp: int, shape: ModelShape = SHAPE) -> list[tuple[str, int, int, int, int]]:
    mine = local_shards(shape, 16, side, RankCoord(dp=0, pp=pp, cp=0, tp=tp))
    return [(h.segment.name, h.layer_lo, h.layer_hi, h.head_lo, h.head_hi) for h in mine]


def test_one_rank_holds_everything() -> None:
    assert ranges(ParallelConfig(), 0, 0) == [
        ("kv", 0, 6, 0, 8),
        ("draft", 6, 7, 0, 2),
        ("conv", 0, 4, 0, 1),
        ("ssm", 0, 1, 0, 4),
    ]


def test_a_stage_holds_its_layers_the_state_beside_them_and_the_last_one_the_draft() -> None:
    side = ParallelConfig(pp=2, tp=4, stages=(4, 2))
    first, last = ranges(side, 0, 3), ranges(side, 1, 3)
    assert first == [("kv", 0, 4, 6, 8), ("draft", 6, 6, 1, 2), ("conv", 0, 3, 0, 1), ("ssm", 0, 0, 3, 4)]
    assert last == [("kv", 4, 6, 6, 8), ("draft", 6, 7, 1, 2), ("conv", 3, 4, 0, 1), ("ssm", 0, 1, 3, 4)]
    mine = local_shards(SHAPE, 16, side, RankCoord(dp=0, pp=0, cp=0, tp=3))
    assert [(h.num_layers, h.heads) for h in mine] == [(4, 2), (0, 1), (3, 1), (0, 1)]


def test_cp_and_dp_ranks_of_a_place_hold_the_same() -> None:
    side = ParallelConfig(dp=2, pp=2, cp=3, tp=2)
    same = {local_shards(SHAPE, 16, side, RankCoord(dp=dp, pp=1, cp=cp, tp=1)) for dp in range(2) for cp in range(3)}
    assert len(same) == 1


def test_more_ranks_than_heads_hold_one_each_and_every_rank_the_latent() -> None:
    assert [ranges(ParallelConfig(tp=16), 0, tp)[0][3:] for tp in (0, 1, 2, 15)] == [(0, 1), (0, 1), (1, 2), (7, 8)]
    latent = ModelShape(2, 1, 576, 0, 2, kind="mla")
    assert [ranges(ParallelConfig(tp=4), 0, tp, latent) for tp in range(4)] == [[("kv", 0, 2, 0, 1)]] * 4


def test_an_impossible_layout_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"8 % 3 = 2 and 3 % 8 = 3"):
        ranges(ParallelConfig(tp=3), 0, 0)
    with pytest.raises(LayoutError, match=r"6 layers cannot be divided into pp=7 stages"):
        ranges(ParallelConfig(pp=7), 0, 0)
    with pytest.raises(LayoutError, match=r"2 KV heads cannot be laid out over tp 3"):
        ranges(ParallelConfig(tp=3), 0, 0, replace(SHAPE, num_kv_heads=3, states=()))
