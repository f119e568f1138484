"""Where a worker stands in its instance: what an engine author states once."""

from __future__ import annotations

from dataclasses import dataclass

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.layout.sizes import check_sizes, set_sizes


@dataclass(frozen=True, slots=True)
class Rank:
    """A point (dp, pp, cp, tp) of an instance of the given sizes; `tp_size` is the attention TP size.

    `stages` is the number of layers of each pipeline stage; empty where they are even.

    Raises:
        LayoutError: a coordinate or size is no whole number, or a coordinate lies outside its size.
    """

    dp: int = 0
    pp: int = 0
    cp: int = 0
    tp: int = 0
    dp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    tp_size: int = 1
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        set_sizes(self, *RankCoord._fields, minimum=0)
        set_sizes(self, *(f"{axis}_size" for axis in RankCoord._fields))
        object.__setattr__(self, "stages", check_sizes("layers of a stage", self.stages))
        for axis in RankCoord._fields:
            place, size = getattr(self, axis), getattr(self, f"{axis}_size")
            if place >= size:
                raise LayoutError(f"rank {axis}={place} is outside {axis}_size={size}")

    @property
    def coord(self) -> RankCoord:
        return RankCoord(self.dp, self.pp, self.cp, self.tp)

    @property
    def side(self) -> ParallelConfig:
        return ParallelConfig(self.dp_size, self.pp_size, self.cp_size, self.tp_size, self.stages)
