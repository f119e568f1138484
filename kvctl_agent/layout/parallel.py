"""Parallel sizes of a prefill or decode instance, and the numbering of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.sizes import check_sizes, set_sizes

MAX_RANKS = 65_536
"""Largest number of ranks in an instance. A peer sends its own sizes, and this limits the work they can cause here."""


class RankCoord(NamedTuple):
    """A rank's coordinates in its instance."""

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
        """Return the layers [lo, hi) that a pipeline stage holds of a model with `num_layers` layers.

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
        """Number of ranks."""
        return self.dp * self.pp * self.cp * self.tp

    def coord(self, unique_rank: int) -> RankCoord:
        """Return the coordinates of a rank.

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
        """Return the number of the rank at `coord`; the inverse of `coord()`.

        Raises:
            LayoutError: a coordinate is outside this instance.
        """
        for axis, position, size in zip(RankCoord._fields, coord, self._sizes(), strict=True):
            if not 0 <= position < size:
                raise LayoutError(f"{axis}={position} is outside an instance with {axis} size {size}")
        return ((coord.pp * self.dp + coord.dp) * self.cp + coord.cp) * self.tp + coord.tp

    def label(self, coord: RankCoord) -> str:
        """Return a rank's short name for messages, for example "dp=1,tp=0": only axes with more than one rank.

        The label of the only rank of an instance is "tp=0", so a label is never empty.
        """
        axes = zip(RankCoord._fields, coord, self._sizes(), strict=True)
        return ",".join(f"{axis}={position}" for axis, position, size in axes if size > 1) or f"tp={coord.tp}"

    def _sizes(self) -> RankCoord:
        return RankCoord(dp=self.dp, pp=self.pp, cp=self.cp, tp=self.tp)
