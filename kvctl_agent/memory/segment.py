"""Memory of one segment on one rank: a flat block of bytes for each plane of each local layer.

Layers have the segment's numbers, as in transfers, so that ranks of different pipeline stages number layers alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvctl_agent.contract.values import layer_range
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.memory.addresses import SegmentAddresses
from kvctl_agent.memory.block_table import BlockTable
from kvctl_agent.memory.head_slice import HeadSlice
from kvctl_agent.memory.huge_pages import Bytes
from kvctl_agent.memory.part_layout import PartLayout, part_layout
from kvctl_agent.memory.region import Region


class SegmentMemory:
    """One rank's memory of one segment.

    Attributes:
        shard: The layers and heads of the segment on this rank; no layers if its pipeline stage has none.
        num_slots: Pages (for state: items) of each block; 0 without layers.
        blocks: For each local layer, the memory of each plane, in page order.
        view: Returns the bytes of a block in host memory.
        addresses: Addresses of the blocks.
        nbytes: Bytes of all blocks.
    """

    def __init__(
        self,
        shard: LocalShard,
        num_slots: int,
        blocks: Sequence[tuple[Region, ...]],
        view: Callable[[Region], Bytes] = Region.array,
    ) -> None:
        """Wrap memory that the caller has checked; each block has `num_slots` pages of its plane."""
        self.shard = shard
        self.num_slots = num_slots
        self.blocks = tuple(blocks)
        self.view = view
        bases = tuple(tuple(block.addr for block in layer) for layer in self.blocks)
        self.addresses = SegmentAddresses(shard, num_slots, bases)
        self.nbytes = sum(block.nbytes for layer in self.blocks for block in layer)
        self._slices: dict[tuple[int, int], HeadSlice] = {}
        self._tables: dict[int, BlockTable] = {}

    @property
    def name(self) -> str:
        """The segment's name: "kv", "draft" or the name of a state component."""
        return self.shard.segment.name

    def block(self, layer: int, plane: int) -> Bytes:
        """Return all bytes of one plane of one layer, flat, in page order.

        Raises:
            MemoryLayoutError: the rank does not have the layer, or the memory is on a device.
        """
        self._check_layers(layer, layer + 1)
        return self.view(self.blocks[layer - self.shard.layer_lo][plane])

    def head_slice(self, head: int, heads: int) -> HeadSlice:
        """Return views of local heads [head, head + heads) in every layer, kept while the pool is open."""
        head_slice = self._slices.get((head, heads))
        if head_slice is None:
            self.check_heads(head, heads)
            views = [tuple(map(self.view, layer)) for layer in self.blocks]
            head_slice = self._slices[head, heads] = HeadSlice(views, self.addresses, head, heads)
        return head_slice

    def block_table(self, heads: int) -> BlockTable:
        """Return the block table for device copies of any `heads` local heads, kept while the pool is open."""
        table = self._tables.get(heads)
        if table is None:
            self.check_heads(0, heads)
            table = self._tables[heads] = BlockTable(self.addresses, heads)
        return table

    def check_heads(self, head: int, heads: int) -> None:
        """Raise MemoryLayoutError unless this rank has local heads [head, head + heads)."""
        if not self.blocks:
            raise MemoryLayoutError(f"{self.name}: heads [{head}, {head + heads}) requested, but {self._available()}")
        if head < 0 or heads <= 0 or head + heads > self.shard.heads:
            raise MemoryLayoutError(
                f"{self.name}: heads [{head}, {head + heads}) are outside the {self.shard.heads} heads of this rank"
            )

    def part_layout(self, layer_lo: int, layer_hi: int, num_pages: int, heads: int) -> PartLayout:
        """Return the layout of a part of layers [layer_lo, layer_hi), `num_pages` pages and `heads` heads.

        Raises:
            MemoryLayoutError: this rank does not have the layers.
        """
        self._check_layers(layer_lo, layer_hi)
        return part_layout(self.shard, layer_lo, layer_hi, num_pages, heads)

    def close(self) -> None:
        """Drop the references to the memory."""
        self.blocks = ()
        self._slices.clear()
        self._tables.clear()

    def _check_layers(self, lo: int, hi: int) -> None:
        if not self.blocks or not self.shard.layer_lo <= lo < hi <= self.shard.layer_hi:
            raise MemoryLayoutError(f"{self.name}: layers {layer_range(lo, hi)} requested, but {self._available()}")

    def _available(self) -> str:
        """The layers of this rank, or why it has none, for error texts."""
        lo, hi = self.shard.layer_lo, self.shard.layer_hi
        if self.blocks:
            return f"this rank has layers {layer_range(lo, hi)}"
        return "the pool is closed" if lo < hi else "this rank's pipeline stage has none of its layers"
