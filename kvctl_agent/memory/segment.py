"""Memory of one segment on one rank, and the checked pages and heads of a part in it.

A segment has a block of memory for each plane of each local layer. The strides of the plane locate its pages, rows and
heads in the block. Layers are numbered over the whole segment, so ranks of different pipeline stages use the same
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.choices import HOST
from kvctl_agent.contract.values import layer_range
from kvctl_agent.device.base import PageIds
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.page_indices import extent
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.memory.addresses import PlaneStrides, SegmentAddresses
from kvctl_agent.memory.allocations import Bytes
from kvctl_agent.memory.part_layout import PartLayout, part_layout
from kvctl_agent.memory.region import Region


class SegmentMemory:
    """One rank's memory of one segment.

    Attributes:
        shard: The layers and heads of the segment on this rank; no layers if its pipeline stage has none.
        num_slots: Transfer pages (for state: items) of each block; 0 without layers.
        blocks: For each local layer, the memory of each plane from its first to its last element.
        view: Function that returns the bytes of a block in host memory.
        nbytes: Total bytes of the elements of all planes.
        derived: Views and tables that copiers derive from the blocks by (kind, heads), kept while the pool is open.
    """

    def __init__(
        self,
        shard: LocalShard,
        num_slots: int,
        blocks: Sequence[tuple[Region, ...]],
        view: Callable[[Region], Bytes] = Region.array,
        strides: tuple[PlaneStrides, ...] = (),
        split: int = 1,
    ) -> None:
        """Wraps memory that the caller has checked; each block has `num_slots` transfer pages of its plane.

        `strides` and `split` are those of `SegmentAddresses`.
        """
        self.shard = shard
        self.num_slots = num_slots
        self._heads = shard.heads
        self.blocks = tuple(blocks)
        self.view = view
        bases = tuple(tuple(block.addr for block in layer) for layer in self.blocks)
        self.addresses = SegmentAddresses(shard, num_slots, bases, strides, split)
        planes = range(len(shard.segment.planes))
        self.nbytes = shard.num_layers * num_slots * sum(map(self.addresses.page_bytes, planes))
        self._page_bytes: dict[int, tuple[int, ...]] = {}  # of a part, by its number of heads
        self.derived: dict[tuple[object, ...], Any] = {}

    @classmethod
    def at_addresses(
        cls,
        shard: LocalShard,
        num_slots: int,
        bases: Sequence[Sequence[int]],
        strides: tuple[PlaneStrides, ...],
        device: int = HOST,
        view: Callable[[Region], Bytes] = Region.array,
    ) -> SegmentMemory:
        """Returns the memory of planes at `bases`, one address for each local layer and plane, on one device."""
        where = SegmentAddresses(shard, num_slots, tuple(map(tuple, bases)), strides)
        blocks = [
            tuple(Region(base, where.extent(plane), device) for plane, base in enumerate(layer)) for layer in bases
        ]
        return cls(shard, num_slots, blocks, view, strides)

    @property
    def name(self) -> str:
        """The segment's name: "kv", "draft", or the name of a KV group or state component."""
        return self.shard.segment.name

    def at(self, split: int) -> SegmentMemory:
        """Returns the same memory in transfer pages, `split` of which make one page of this object.

        Raises:
            MemoryLayoutError: the rows of a page cannot be divided by `split`.
        """
        segment = self.shard.segment
        planes = tuple(plane._replace(rows=plane.rows // split) for plane in segment.planes)
        shard = self.shard._replace(segment=replace(segment, planes=planes))
        where = self.addresses.at(shard, split)
        return SegmentMemory(shard, where.num_slots, self.blocks, self.view, where.strides, where.split)

    def block(self, layer: int, plane: int) -> Bytes:
        """Returns the bytes of one plane of one layer, from its first to its last element, as a flat array.

        They are in page order if the plane is contiguous; see `elements` for any plane.

        Raises:
            MemoryLayoutError: the rank does not have the layer, or the memory is on a device.
        """
        self._check_layers(layer, layer + 1)
        return self.view(self.blocks[layer - self.shard.layer_lo][plane])

    def elements(self, layer: int, plane: int) -> Bytes:
        """Returns a view of one plane of one layer, uint8 `[engine pages, rows, heads, head_bytes]`, strided.

        Raises:
            MemoryLayoutError: as for `block`.
        """
        _, rows, head_bytes = self.shard.segment.planes[plane]
        split = self.addresses.split
        return np.lib.stride_tricks.as_strided(
            self.block(layer, plane),
            (self.num_slots // split, rows * split, self.shard.heads, head_bytes),
            (*self.addresses.strides[plane], 1),
        )

    def check_heads(self, head: int, heads: int) -> None:
        """Raises MemoryLayoutError unless this rank has local heads [head, head + heads)."""
        if not self.blocks:
            raise MemoryLayoutError(f"{self.name}: heads [{head}, {head + heads}) requested, but {self._available()}")
        if head < 0 or heads <= 0 or head + heads > self._heads:
            raise MemoryLayoutError(
                f"{self.name}: heads [{head}, {head + heads}) are outside the {self._heads} heads of this rank"
            )

    def part_layout(self, layer_lo: int, layer_hi: int, num_pages: int, heads: int) -> PartLayout:
        """Returns the layout of a part of layers [layer_lo, layer_hi), `num_pages` pages and `heads` heads.

        Raises:
            MemoryLayoutError: this rank does not have the layers.
        """
        self._check_layers(layer_lo, layer_hi)
        page_bytes = self._page_bytes.get(heads)
        if page_bytes is None:
            planes = self.shard.segment.planes
            page_bytes = self._page_bytes[heads] = tuple(plane.rows * heads * plane.head_bytes for plane in planes)
        return part_layout(layer_lo - self.shard.layer_lo, layer_hi - layer_lo, num_pages, page_bytes)

    def close(self) -> None:
        """Drops the references to the memory and everything derived from it."""
        self.blocks = ()
        self.derived.clear()

    def _check_layers(self, lo: int, hi: int) -> None:
        if not self.blocks or not self.shard.layer_lo <= lo < hi <= self.shard.layer_hi:
            raise MemoryLayoutError(f"{self.name}: layers {layer_range(lo, hi)} requested, but {self._available()}")

    def _available(self) -> str:
        """Returns a clause for error texts: which layers this rank has, or why it has none."""
        lo, hi = self.shard.layer_lo, self.shard.layer_hi
        if self.blocks:
            return f"this rank has layers {layer_range(lo, hi)}"
        return "the pool is closed" if lo < hi else "this rank's pipeline stage has none of its layers"


class RowIndex:
    """The pages (for state: items) of one part and its heads in one segment, checked once for all copies.

    Copies neither check nor clip the pages. A gather may list a page more than once. If a scatter lists a page more
    than once, it is undefined which of the copies remains.

    Attributes:
        head, heads: Local heads [head, head + heads).
        raw_pages: The pages in the part's order, as the caller passed them; the caller must not modify them.
    """

    __slots__ = ("head", "heads", "memory", "raw_pages")

    def __init__(self, memory: SegmentMemory, pages: npt.ArrayLike, head: int, heads: int) -> None:
        """Checks the pages, which must be a non-empty list of integers, and the heads.

        Raises:
            MemoryLayoutError: `pages` is not such a list, or a page or head is outside the segment's memory.
        """
        raw_pages = np.asarray(pages)
        if raw_pages.ndim != 1 or not raw_pages.size or raw_pages.dtype.kind not in "iu":
            raise MemoryLayoutError(
                f"pages: {raw_pages.dtype} {raw_pages.shape}, expected a non-empty list of integers"
            )
        low, high = extent(raw_pages)
        if low < 0 or high >= memory.num_slots:
            noun = "item" if memory.shard.segment.state else "page"
            raise MemoryLayoutError(
                f"{memory.name}: {noun} {low if low < 0 else high} is outside the pool of {memory.num_slots} {noun}s; "
                "the indices belong to another pool or are stale"
            )
        memory.check_heads(head, heads)
        self.memory = memory
        self.head, self.heads = head, heads
        self.raw_pages = raw_pages

    def __len__(self) -> int:
        """Returns the number of pages."""
        return len(self.raw_pages)

    @property
    def page_ids(self) -> PageIds:
        """The pages, int32 `[num_pages]`, for kernel launches."""
        return self.raw_pages.astype(np.int32, copy=False)
