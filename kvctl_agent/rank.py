"""Coordinates of a worker in its instance, as passed to `Agent`, and its name in a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvctl_agent.contract.snapshots import Role
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.layout.sizes import check_sizes, set_sizes

Axes = Mapping[str, tuple[int, int]]
"""(rank, size) of a worker on the axes that its name tells, such as dp, pp and cp, in the order of the name."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Coordinates (dp, pp, cp, tp) of a worker and the sizes of its instance; `tp_size` is the attention TP size.

    Attributes:
        stages: number of layers in each pipeline stage; empty if the layers are divided evenly.

    Raises:
        LayoutError: a coordinate or size is not an integer, or a coordinate is not below its size.
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
            coordinate, size = getattr(self, axis), getattr(self, f"{axis}_size")
            if coordinate >= size:
                raise LayoutError(f"rank {axis}={coordinate} is outside {axis}_size={size}")

    @property
    def coord(self) -> RankCoord:
        """The coordinates without the sizes."""
        return RankCoord(self.dp, self.pp, self.cp, self.tp)

    @property
    def parallel_config(self) -> ParallelConfig:
        """The parallel sizes of the instance and the layers of its pipeline stages."""
        return ParallelConfig(self.dp_size, self.pp_size, self.cp_size, self.tp_size, self.stages)


def rank_name(role: Role, axes: Axes, tp: int, server: str = "") -> str:
    """Returns the name of a rank: its role, its ranks on the axes of size 2 or more, and its server if given.

    For example `prefill-dp1-tp0@10.0.0.5:30000`.
    """
    name = f"{role}{''.join(f'-{axis}{rank}' for axis, (rank, size) in axes.items() if size > 1)}-tp{tp}"
    return f"{name}@{server}" if server else name
