"""One plane of one segment on a rank, over all the layers it holds: what content is written to and checked in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvctl.lab.ranks.pattern import Bytes, PlaneId, Rows, Writer
from kvctl_agent.layout.local_shard import LocalShard
from kvctl_agent.layout.shape import Plane
from kvctl_agent.memory.pool import KVPool


@dataclass(frozen=True, slots=True)
class PlaneView:
    """A plane in every layer here.

    Attributes:
        held: which layers and heads of the segment.
        index, plane: of the plane in a layer.
        writer: writes and checks rows of its geometry.
    """

    pool: KVPool
    held: LocalShard
    index: int
    plane: Plane
    writer: Writer

    @property
    def num_slots(self) -> int:
        """Pages (of a state: items) of each layer."""
        return self.pool.segments[self.held.segment.index].num_slots

    @property
    def rows(self) -> Rows:
        return self.writer.rows

    @property
    def name(self) -> str:
        """What a mismatch calls it: "k", "latent", "draft k", a state component's name."""
        return f"draft {self.plane.name}" if self.held.segment.name == "draft" else self.plane.name

    def sheets(self) -> Iterator[tuple[PlaneId, Bytes]]:
        """Each layer's bytes, flat, in page order; of a pool in host memory."""
        memory = self.pool.segments[self.held.segment.index]
        for layer in range(self.held.layer_lo, self.held.layer_hi):
            yield self._sheet(layer), memory.block(layer, self.index)

    def places(self) -> Iterator[tuple[PlaneId, int]]:
        """Each layer's address of page 0, wherever the pool is."""
        bases = self.pool.segments[self.held.segment.index].addresses.bases
        for layer, planes in enumerate(bases, self.held.layer_lo):
            yield self._sheet(layer), planes[self.index]

    def _sheet(self, layer: int) -> PlaneId:
        return PlaneId(self.held.segment.index, layer, self.index)


def plane_views(pool: KVPool, dtype_bytes: int) -> list[PlaneView]:
    """Every plane of every segment that a pool has layers of.

    Args:
        dtype_bytes: of an element of KV.
    """
    return [
        PlaneView(pool, memory.shard, index, plane, Writer(_rows(memory.shard, plane, dtype_bytes)))
        for memory in pool.segments
        if memory.shard.num_layers
        for index, plane in enumerate(memory.shard.segment.planes)
    ]


def _rows(here: LocalShard, plane: Plane, dtype_bytes: int) -> Rows:
    # Scales and state have elements of their own size; bytes say enough there.
    paged = not here.segment.state and plane.head_bytes % dtype_bytes == 0 and "scale" not in plane.name
    return Rows(
        per_page=plane.rows,
        head_lo=here.head_lo,
        heads=here.heads,
        row_bytes=plane.head_bytes,
        element_bytes=dtype_bytes if paged else 1,
    )
