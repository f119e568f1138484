"""What one writer owes one decode rank of one segment: the plan's unit, before pages are cut into chunks."""

from __future__ import annotations

from dataclasses import dataclass

STAGING_ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class TransferSlice:
    """What one writer owes one decode rank of one segment, in every chunk of a room.

    Attributes:
        writer: Prefill rank (unique rank).
        reader: Decode rank (unique rank).
        segment: Index of the segment in the model's.
        src_head: First head, counted in the writer's pool.
        dst_head: First head, counted in the decode rank's pool.
        heads: Number of heads.
        layer_lo: First layer, in the segment's numbering: global for KV and draft.
        layer_hi: End of the layers, exclusive.
        src_pool_heads: Heads in one row of the writer's pool: the source stride.
        dst_pool_heads: Heads in one row of the decode rank's pool: the destination stride.
        page_head_bytes: Bytes of one page (of a state: one item), in one layer, of one head.
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
        """Layers owed."""
        return self.layer_hi - self.layer_lo

    @property
    def whole_rows(self) -> bool:
        """Both pools hold exactly these heads, so whole pages can move as they are (the bulk path)."""
        return self.heads == self.src_pool_heads == self.dst_pool_heads

    def payload_bytes(self, pages: int, layers: int | None = None) -> int:
        """Bytes of a part of `pages` pages and `layers` layers (all of the share's if None)."""
        return (self.num_layers if layers is None else layers) * pages * self.heads * self.page_head_bytes

    def part_bytes(self, pages: int, layers: int | None = None) -> int:
        """Staging bytes of such a part: its payload, aligned up to `STAGING_ALIGN_BYTES`."""
        return -(-self.payload_bytes(pages, layers) // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES
