"""Transfer slices: the unit of the transfer plan, before pages are divided into chunks."""

from __future__ import annotations

from dataclasses import dataclass

STAGING_ALIGN_BYTES = 256
"""Alignment of a part's size in the staging ring."""


@dataclass(frozen=True, slots=True)
class TransferSlice:
    """The heads and layers of one segment that one writer sends to one decode rank, in every chunk of a room.

    Attributes:
        writer: Prefill rank (unique rank).
        reader: Decode rank (unique rank).
        segment: Index of the segment in the model's segments.
        src_head: First head, as an index into the heads of the writer's pool.
        dst_head: First head, as an index into the heads of the decode rank's pool.
        heads: Number of heads.
        layer_lo: First layer, in the segment's numbering, which is global for KV and draft.
        layer_hi: End of the layers, exclusive.
        src_pool_heads: Heads in one row of the writer's pool; the source stride.
        dst_pool_heads: Heads in one row of the decode rank's pool; the destination stride.
        page_head_bytes: Bytes of one head of one page (for state: one item) in one layer.
    """

    writer: int
    reader: int
    segment: int
    src_head: int
    dst_head: int
    heads: int
    layer_lo: int
    layer_hi: int
    src_pool_heads: int
    dst_pool_heads: int
    page_head_bytes: int

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.layer_hi - self.layer_lo

    @property
    def whole_rows(self) -> bool:
        """Whether both pools hold exactly these heads, so that whole pages can be sent unchanged (the bulk path)."""
        return self.heads == self.src_pool_heads == self.dst_pool_heads

    def payload_bytes(self, pages: int, layers: int | None = None) -> int:
        """Return the bytes of a part of `pages` pages and `layers` layers (all layers of the slice if None)."""
        return (self.num_layers if layers is None else layers) * pages * self.heads * self.page_head_bytes

    def part_bytes(self, pages: int, layers: int | None = None) -> int:
        """Return the staging bytes of the same part: its payload rounded up to `STAGING_ALIGN_BYTES`."""
        return -(-self.payload_bytes(pages, layers) // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES
