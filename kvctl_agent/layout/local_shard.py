"""What one rank's memory holds of each segment: its pipeline stage's layers, its tensor-parallel rank's heads."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

from kvctl_agent.layout.heads import HeadRange, head_range
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.layout.shape import ModelShape, Segment, segments


class LocalShard(NamedTuple):
    """Layers [layer_lo, layer_hi) and heads [head_lo, head_hi) of one segment; no layers where its stage has none."""

    segment: Segment
    layer_lo: int
    layer_hi: int
    head_lo: int
    head_hi: int

    @property
    def num_layers(self) -> int:
        return self.layer_hi - self.layer_lo

    @property
    def heads(self) -> int:
        return self.head_hi - self.head_lo


@lru_cache(maxsize=4096)
def local_shards(shape: ModelShape, page_size: int, side: ParallelConfig, coord: RankCoord) -> tuple[LocalShard, ...]:
    """What the rank at `coord` holds, one entry per segment of the model.

    Raises:
        LayoutError: the heads of a segment cannot be laid out over the side's tp, or its stages do not add up.
    """
    return tuple(
        LocalShard(segment, *stage_layers(segment, shape, side, coord.pp), *segment_heads(segment, side.tp, coord.tp))
        for segment in segments(shape, page_size)
    )


def segment_heads(segment: Segment, tp: int, rank: int) -> HeadRange:
    """The heads of a segment that a tensor-parallel rank holds."""
    return head_range(segment.heads, tp, rank)


def stage_layers(segment: Segment, shape: ModelShape, side: ParallelConfig, stage: int) -> tuple[int, int]:
    """The layers of a segment that a pipeline stage holds: a draft lies on the last one, a state beside its KV."""
    lo, hi = side.stage_range(shape.num_layers, stage)
    if segment.state:
        return bisect_left(segment.beside, lo), bisect_left(segment.beside, hi)
    if segment.layer_lo >= shape.num_layers:
        return (segment.layer_lo, segment.layer_hi) if stage == side.pp - 1 else (segment.layer_lo, segment.layer_lo)
    return lo, hi
