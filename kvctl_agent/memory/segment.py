"""One rank's memory of one segment: a flat block of bytes for each plane of each layer that it holds.

Layers have the segment's numbers, as transfers name them: two ranks of different pipeline stages mean the same layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvctl_agent.contract.layer_range import layer_range
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.local_shard import LocalShard
from kvctl_agent.memory.addresses import SegmentAddresses
from kvctl_agent.memory.block_table import BlockTable
from kvctl_agent.memory.head_slice import HeadSlice
from kvctl_agent.memory.huge_pages import Bytes
from kvctl_agent.memory.part_layout import PartLayout, part_layout
from kvctl_agent.memory.region import Region


class SegmentMemory:
    """What a rank holds of one segment.

    Attributes:
        held: which layers and heads; no layers where its pipeline stage has none.
        num_slots: pages (of a state: items) of each block; 0 without layers.
        blocks: for each layer held, the memory of each plane, in page order.
        view: gives the bytes of a block, where they are in host memory.
        addresses: where the blocks are.
    """

    def __init__(
        self,
        held: LocalShard,
        num_slots: int,
        blocks: Sequence[tuple[Region, ...]],
        view: Callable[[Region], Bytes] = Region.array,
    ) -> None:
        """Wrap checked memory: a block is `num_slots` pages of its plane."""
        self.held = held
        self.num_slots = num_slots
        self.blocks = tuple(blocks)
        self.view = view
        bases = tuple(tuple(block.addr for block in layer) for layer in self.blocks)
        self.addresses = SegmentAddresses(held, num_slots, bases)
        self.nbytes = sum(block.nbytes for layer in self.blocks for block in layer)
        self._slices: dict[tuple[int, int], HeadSlice] = {}
        self._tables: dict[int, BlockTable] = {}

    @property
    def name(self) -> str:
        """The segment's: "kv", "draft" or a state component's."""
        return self.held.segment.name

    def block(self, layer: int, plane: int) -> Bytes:
        """All bytes of one layer's plane, flat, in page order; raises MemoryLayoutError where they are on a device."""
        self._check_layers(layer, layer + 1)
        return self.view(self.blocks[layer - self.held.layer_lo][plane])

    def head_slice(self, head: int, heads: int) -> HeadSlice:
        """Views of local heads [head, head + heads) in every layer, made once and kept while the pool is open."""
        found = self._slices.get((head, heads))
        if found is None:
            self.check_heads(head, heads)
            views = [tuple(map(self.view, layer)) for layer in self.blocks]
            found = self._slices[head, heads] = HeadSlice(views, self.addresses, head, heads)
        return found

    def block_table(self, heads: int) -> BlockTable:
        """The same for launches on a device, of any `heads` local heads."""
        found = self._tables.get(heads)
        if found is None:
            self.check_heads(0, heads)
            found = self._tables[heads] = BlockTable(self.addresses, heads)
        return found

    def check_heads(self, head: int, heads: int) -> None:
        """Raises MemoryLayoutError unless this rank has local heads [head, head + heads)."""
        if not self.blocks:
            raise MemoryLayoutError(f"{self.name}: heads [{head}, {head + heads}) asked for, but {self._empty()}")
        if head < 0 or heads <= 0 or head + heads > self.held.heads:
            raise MemoryLayoutError(
                f"{self.name}: heads [{head}, {head + heads}) are outside the {self.held.heads} heads of this rank"
            )

    def part_layout(self, layer_lo: int, layer_hi: int, num_pages: int, heads: int) -> PartLayout:
        """How a part of these layers, pages and heads lies in its contiguous region."""
        self._check_layers(layer_lo, layer_hi)
        return part_layout(self.held, layer_lo, layer_hi, num_pages, heads)

    def close(self) -> None:
        """Let go of the memory."""
        self.blocks = ()
        self._slices.clear()
        self._tables.clear()

    def _check_layers(self, lo: int, hi: int) -> None:
        if not self.blocks or not self.held.layer_lo <= lo < hi <= self.held.layer_hi:
            raise MemoryLayoutError(f"{self.name}: layers {layer_range(lo, hi)} asked for, but {self._empty()}")

    def _empty(self) -> str:
        lo, hi = self.held.layer_lo, self.held.layer_hi
        if self.blocks:
            return f"this rank has layers {layer_range(lo, hi)}"
        return "the pool is closed" if lo < hi else "this rank's stage has none of its layers"
