"""The layers and heads of each segment that one rank holds, by its pipeline stage and tensor-parallel rank."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

from kvctl_agent.layout.heads import HeadRange, head_range
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.layout.shape import ModelShape, Segment, segments


class LocalShard(NamedTuple):
    """Layers [layer_lo, layer_hi) and heads [head_lo, head_hi) of one segment on one rank.

    The layer range is empty if the rank's pipeline stage has no layer of the segment. Heads are numbered over the whole
    model.
    """

    segment: Segment
    layer_lo: int
    layer_hi: int
    head_lo: int
    head_hi: int

    @property
    def num_layers(self) -> int:
        """Layers of the segment on this rank."""
        return self.layer_hi - self.layer_lo

    @property
    def heads(self) -> int:
        """Heads of the segment on this rank."""
        return self.head_hi - self.head_lo


@lru_cache(maxsize=4096)
def local_shards(shape: ModelShape, page_size: int, side: ParallelConfig, coord: RankCoord) -> tuple[LocalShard, ...]:
    """Return the shards of the rank at `coord`, one for each segment of the model.

    Args:
        shape: The model.
        page_size: Tokens per page.
        side: Parallel sizes of the rank's instance.
        coord: The rank's coordinates in the instance.

    Raises:
        LayoutError: the heads of a segment cannot be divided over the instance's tp, or its pipeline stages do not add
            up to the model's layers.
    """
    return tuple(
        LocalShard(segment, *stage_layers(segment, shape, side, coord.pp), *segment_heads(segment, side.tp, coord.tp))
        for segment in segments(shape, page_size)
    )


def segment_heads(segment: Segment, tp: int, rank: int) -> HeadRange:
    """Return the heads of a segment that tensor-parallel rank `rank` of `tp` holds."""
    return head_range(segment.heads, tp, rank)


def stage_layers(segment: Segment, shape: ModelShape, side: ParallelConfig, stage: int) -> tuple[int, int]:
    """Return the layers [lo, hi) of a segment that a pipeline stage holds, in the segment's numbering.

    Draft layers are on the last stage. A layer of a state component is on the stage of the KV layer it belongs to.
    """
    lo, hi = side.stage_range(shape.num_layers, stage)
    if segment.state:
        return bisect_left(segment.kv_layers, lo), bisect_left(segment.kv_layers, hi)
    if segment.layer_lo >= shape.num_layers:
        return (segment.layer_lo, segment.layer_hi) if stage == side.pp - 1 else (segment.layer_lo, segment.layer_lo)
    return lo, hi
