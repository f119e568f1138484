"""One instance's parallel sizes and the numbering of its ranks, so that a rank has one name everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.sizes import check_sizes, set_sizes

MAX_RANKS = 65_536
"""A peer states its own sizes; this bounds the work that its numbers can ask of us."""


class RankCoord(NamedTuple):
    """A rank's place in its instance."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The sizes of one prefill or decode instance.

    `tp` is the *attention* TP size, so the instance has dp * pp * cp * tp processes. Ranks are numbered in the order
    (pp, dp, cp, tp): tp varies fastest. `stages` is the number of layers of each pipeline stage; where it is empty
    they are even, the first ones taking one more where the layers do not divide.

    Raises:
        LayoutError: a size is not a positive whole number, the instance has more than `MAX_RANKS` ranks, or there are
            not as many stages as `pp` says.
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
            raise LayoutError(f"stages of {sizes} layers are {len(self.stages)}, but pp={self.pp}")

    def stage_range(self, num_layers: int, stage: int) -> tuple[int, int]:
        """Layers [lo, hi) of a model of `num_layers` that a pipeline stage holds.

        Raises:
            LayoutError: the stages do not add up to the model's layers, or there are fewer layers than stages.
        """
        if self.stages:
            if sum(self.stages) != num_layers:
                total = "+".join(map(str, self.stages))
                raise LayoutError(f"stages of {total} = {sum(self.stages)} layers do not make the model's {num_layers}")
            lo = sum(self.stages[:stage])
            return lo, lo + self.stages[stage]
        each, more = divmod(num_layers, self.pp)
        if not each:
            raise LayoutError(f"{num_layers} layers cannot be cut into pp={self.pp} stages: one would be empty")
        lo = stage * each + min(stage, more)
        return lo, lo + each + (stage < more)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.cp * self.tp

    def coord(self, unique_rank: int) -> RankCoord:
        """The place of a rank.

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
        """The number of the rank at a place; the inverse of `coord`.

        Raises:
            LayoutError: an axis is outside this instance.
        """
        for axis, at, size in zip(RankCoord._fields, coord, self._sizes(), strict=True):
            if not 0 <= at < size:
                raise LayoutError(f"{axis}={at} is outside an instance with {axis} size {size}")
        return ((coord.pp * self.dp + coord.dp) * self.cp + coord.cp) * self.tp + coord.tp

    def label(self, coord: RankCoord) -> str:
        """A rank's short name for messages, for example "dp=1,tp=0": only axes with more than one rank.

        The only rank of an instance is "tp=0", so that a label is never empty.
        """
        named = [
            f"{axis}={at}" for axis, at, size in zip(RankCoord._fields, coord, self._sizes(), strict=True) if size > 1
        ]
        return ",".join(named) or f"tp={coord.tp}"

    def _sizes(self) -> RankCoord:
        return RankCoord(dp=self.dp, pp=self.pp, cp=self.cp, tp=self.tp)
