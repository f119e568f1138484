"""Ranks of a prefill or decode instance: parallel sizes, rank numbers, and the layers and heads on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kvctl_agent.contract.states import MAX_RANKS
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.shape import ModelShape, Segment, segments
from kvctl_agent.layout.sizes import check_sizes, set_sizes


class RankCoord(NamedTuple):
    """Coordinates of a rank in its instance: its dp, pp, cp and tp rank."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Parallel sizes of one prefill or decode instance.

    `tp` is the *attention* TP size, so the instance has dp * pp * cp * tp processes. Ranks are numbered in the order
    (pp, dp, cp, tp), tp varying fastest. `stages` is the number of layers of each pipeline stage. If it is empty, the
    layers are divided evenly, and the first stages get one layer more if the division leaves a remainder.

    Raises:
        LayoutError: a size is not a positive whole number, the instance has more than `MAX_RANKS` ranks, or `stages`
            does not have `pp` entries.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        set_sizes(self, *RankCoord._fields)
        if self.size > MAX_RANKS:
            raise LayoutError(
                f"dp={self.dp} * pp={self.pp} * cp={self.cp} * tp={self.tp} = {self.size} ranks: "
                f"an instance may have at most {MAX_RANKS}"
            )
        object.__setattr__(self, "stages", check_sizes("layers of a stage", self.stages))
        if self.stages and len(self.stages) != self.pp:
            sizes = ",".join(map(str, self.stages))
            raise LayoutError(f"stages={sizes} has {len(self.stages)} stages, but pp={self.pp}")

    def stage_range(self, num_layers: int, stage: int) -> tuple[int, int]:
        """Returns the layers [lo, hi) of pipeline stage `stage`, for a model with `num_layers` layers.

        Raises:
            LayoutError: the stages do not add up to `num_layers`, or there are fewer layers than stages.
        """
        if self.stages:
            if sum(self.stages) != num_layers:
                total = "+".join(map(str, self.stages))
                raise LayoutError(
                    f"pipeline stages have {total} = {sum(self.stages)} layers, but the model has {num_layers}"
                )
            lo = sum(self.stages[:stage])
            return lo, lo + self.stages[stage]
        quotient, remainder = divmod(num_layers, self.pp)
        if not quotient:
            raise LayoutError(f"{num_layers} layers cannot be divided into pp={self.pp} stages: one would be empty")
        lo = stage * quotient + min(stage, remainder)
        return lo, lo + quotient + (stage < remainder)

    @property
    def size(self) -> int:
        """Number of ranks in the instance."""
        return self.dp * self.pp * self.cp * self.tp

    def coord(self, unique_rank: int) -> RankCoord:
        """Returns the coordinates of the rank numbered `unique_rank`.

        Raises:
            LayoutError: the instance has no such rank.
        """
        if not 0 <= unique_rank < self.size:
            raise LayoutError(f"rank {unique_rank} is not one of the {self.size} ranks of {self}")
        rest, tp = divmod(unique_rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return RankCoord(dp=dp, pp=pp, cp=cp, tp=tp)

    def unique_rank(self, coord: RankCoord) -> int:
        """Returns the number of the rank with these coordinates; the inverse of method `coord`.

        Raises:
            LayoutError: a coordinate is outside this instance.
        """
        for axis, position, size in zip(RankCoord._fields, coord, self._sizes(), strict=True):
            if not 0 <= position < size:
                raise LayoutError(f"{axis}={position} is outside an instance with {axis} size {size}")
        return ((coord.pp * self.dp + coord.dp) * self.cp + coord.cp) * self.tp + coord.tp

    def label(self, coord: RankCoord) -> str:
        """Returns a rank's short name for messages, such as "dp=1,tp=0", with only the axes that have several ranks.

        The label of the only rank of an instance is "tp=0", so a label is never empty.
        """
        axes = zip(RankCoord._fields, coord, self._sizes(), strict=True)
        return ",".join(f"{axis}={position}" for axis, position, size in axes if size > 1) or f"tp={coord.tp}"

    def _sizes(self) -> RankCoord:
        return RankCoord(dp=self.dp, pp=self.pp, cp=self.cp, tp=self.tp)


class HeadRange(NamedTuple):
    """The heads [lo, hi) that one rank holds, numbered over the whole model."""

    lo: int
    hi: int


def head_range(num_heads: int, tp: int, rank: int) -> HeadRange:
    """Returns the heads that one tensor-parallel rank holds.

    With tp <= num_heads a rank holds a block of num_heads / tp heads. With tp > num_heads it holds one head, and
    tp / num_heads neighbouring ranks hold the same head.

    Raises:
        LayoutError: neither `num_heads` nor `tp` divides the other, or `rank` is outside [0, tp).
    """
    if not 0 <= rank < tp:
        raise LayoutError(f"tp rank {rank} is outside [0, {tp})")
    if num_heads % tp == 0:
        block = num_heads // tp
        return HeadRange(rank * block, (rank + 1) * block)
    if tp % num_heads == 0:
        head = rank * num_heads // tp
        return HeadRange(head, head + 1)
    divisors = ", ".join(str(size) for size in range(1, num_heads + 1) if num_heads % size == 0)
    raise LayoutError(
        f"{num_heads} KV heads cannot be laid out over tp {tp}: {num_heads} % {tp} = {num_heads % tp} and "
        f"{tp} % {num_heads} = {tp % num_heads}; choose a tp of {divisors} or a multiple of {num_heads}"
    )


def replicas(num_heads: int, tp: int) -> int:
    """Returns the number of tp ranks that hold the same head; 1 unless tp > num_heads."""
    return max(1, tp // num_heads)


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
        """Number of the segment's layers on this rank."""
        return self.layer_hi - self.layer_lo

    @property
    def heads(self) -> int:
        """Number of the segment's heads on this rank."""
        return self.head_hi - self.head_lo


@lru_cache(maxsize=4096)
def local_shards(shape: ModelShape, page_size: int, side: ParallelConfig, coord: RankCoord) -> tuple[LocalShard, ...]:
    """Returns the shards of the rank at `coord` of the instance `side`, one for each segment of the model.

    Raises:
        LayoutError: the heads of a segment cannot be divided over the instance's tp, or its pipeline stages do not add
            up to the model's layers.
    """
    return tuple(
        LocalShard(
            segment, *stage_layers(segment, shape, side, coord.pp), *head_range(segment.heads, side.tp, coord.tp)
        )
        for segment in segments(shape, page_size)
    )


def stage_layers(segment: Segment, shape: ModelShape, side: ParallelConfig, stage: int) -> tuple[int, int]:
    """Returns the layers [lo, hi) of a segment on one pipeline stage of instance `side`, in the segment's numbering.

    Draft layers are on the last stage. A layer of a group or state component is on the stage of the KV layer it belongs
    to.
    """
    lo, hi = side.stage_range(shape.num_layers, stage)
    if segment.kv_layers:
        return segment.beside(lo, hi)
    if segment.layer_lo >= shape.num_layers:
        return (segment.layer_lo, segment.layer_hi) if stage == side.pp - 1 else (segment.layer_lo, segment.layer_lo)
    return lo, hi


def mix64(x: int) -> int:
    """Hashes a 64-bit number with splitmix64's finaliser, a bijection that maps consecutive rooms to unrelated numbers.

    Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014), variant 13.
    """
    mask = 2**64 - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
