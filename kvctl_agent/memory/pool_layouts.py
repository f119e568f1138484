"""Layouts of allocated pools: the order of the axes of a pool's memory, and the strides that follow from it."""

from __future__ import annotations

from typing import NamedTuple

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.layout.shape import Plane
from kvctl_agent.memory.addresses import PlaneStrides

# Layers of an allocated pool start on a cache line pair, as staging regions do.
_BLOCK_ALIGN_BYTES = 256

POOL_LAYOUTS = {
    "nhd": "layer plane page row head",
    "hnd": "layer plane page head row",
    "kv-inner": "layer page plane row head",
    "kv-inner-hnd": "layer page plane head row",
    "fused": "layer page head row plane",
    "fused-nhd": "layer page row head plane",
    "block-outer": "page layer plane row head",
    "block-outer-hnd": "page layer plane head row",
}
"""The axes of each layout, outermost first; the elements of a head are innermost.

`plane` is K or V: nhd has separate arrays of K and V, kv-inner is `[pages, 2, ...]`, fused has K and V of a head in one
row (vLLM's `[blocks, heads, tokens, K|V]`), and block-outer has all layers of a page together.
"""


class PlacedSegment(NamedTuple):
    """Position of one segment's planes in an allocation.

    Attributes:
        offsets: For each local layer, the offset of each plane's first element.
        nbytes: Bytes of all planes with gaps.
    """

    offsets: tuple[tuple[int, ...], ...]
    strides: tuple[PlaneStrides, ...]
    nbytes: int


def place_segment(shard: LocalShard, num_slots: int, layout: str) -> PlacedSegment:
    """Returns the position of a segment in memory of a layout; state is always laid out as `nhd`.

    Planes whose pages have another number of rows than the first, such as scales, cannot be fused with it and follow as
    `nhd`.

    Raises:
        MemoryLayoutError: there is no such layout.
    """
    if layout not in POOL_LAYOUTS:
        raise MemoryLayoutError(f"pool layout {layout!r:.40} is unknown: it must be one of {', '.join(POOL_LAYOUTS)}")
    planes = shard.segment.planes
    axes = POOL_LAYOUTS["nhd" if shard.segment.state else layout].split()
    separate = axes.index("row") < axes.index("plane")
    together = [number for number, plane in enumerate(planes) if not separate or plane.rows == planes[0].rows]
    others = [number for number in range(len(planes)) if number not in together]
    offsets = [[0] * len(planes) for _ in range(shard.num_layers)]
    strides: dict[int, PlaneStrides] = {}
    nbytes = 0
    for group, order in ((together, axes), (others, POOL_LAYOUTS["nhd"].split())):
        if not group:
            continue
        starts, by_axis, size = _place([planes[number] for number in group], shard, num_slots, order)
        for number, start, each in zip(group, starts, by_axis, strict=True):
            strides[number] = PlaneStrides(each["page"], each["row"], each["head"])
            for layer, row in enumerate(offsets):
                row[number] = nbytes + start + layer * each["layer"]
        nbytes += size
    return PlacedSegment(tuple(map(tuple, offsets)), tuple(strides[number] for number in range(len(planes))), nbytes)


def _place(
    planes: list[Plane], shard: LocalShard, num_slots: int, axes: list[str]
) -> tuple[list[int], list[dict[str, int]], int]:
    """Returns for each plane its offset and its stride along each axis, and the bytes of all planes."""
    offsets = [0] * len(planes)
    strides: list[dict[str, int]] = [{} for _ in planes]
    sizes = [plane.head_bytes for plane in planes]  # of the axes so far, by plane
    for axis in reversed(axes):
        if axis == "plane":
            offsets = [sum(sizes[:number]) for number in range(len(planes))]
            sizes = [sum(sizes)] * len(planes)
            continue
        for number, plane in enumerate(planes):
            counts = {"layer": shard.num_layers, "page": num_slots, "row": plane.rows, "head": shard.heads}
            strides[number][axis] = sizes[number]
            sizes[number] *= counts[axis]
            if axis == "page":
                sizes[number] = -(-sizes[number] // _BLOCK_ALIGN_BYTES) * _BLOCK_ALIGN_BYTES
    return offsets, strides, sizes[0]
