"""What a room costs on each path, in bytes and descriptors: for printing a plan and for sizing a ring beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from kvctl_agent.layout.chunks import grid
from kvctl_agent.layout.plan import PlanInputs, shares


@dataclass(frozen=True, slots=True)
class RoomCost:
    """One room over all its writers and decode ranks.

    Attributes:
        writers: Prefill ranks that owe something.
        readers: Decode ranks that are owed something.
        cells: Grid cells.
        parts: Parts when layers are not grouped: also the staged path's writes.
        payload_bytes: KV bytes that land, one copy per decode replica, whole pages.
        staging_bytes: The same with every part aligned as in the ring.
        largest_part_bytes: The ring must hold at least this.
        slice_descriptors: One per token row of K and of V.
        bulk_descriptors: At most this many, one per page of K and of V; neighbouring pages merge. None where some
            share is not whole rows, so that bulk does not apply.
    """

    writers: int
    readers: int
    cells: int
    parts: int
    payload_bytes: int
    staging_bytes: int
    largest_part_bytes: int
    slice_descriptors: int
    bulk_descriptors: int | None


def room_cost(
    inputs: PlanInputs, total_pages: int, prefix_pages: int = 0, room: int = 0, decode_dp: int = 0
) -> RoomCost:
    """Count one room of `total_pages` pages, the first `prefix_pages` of which the decode side already has.

    Raises:
        LayoutError: sizes out of range, or no such decode dp rank.
    """
    owed = shares(inputs, room, decode_dp)
    cells = grid(total_pages, prefix_pages, inputs.chunk_pages)
    pages = total_pages - prefix_pages
    parts = [share.part_bytes(inputs.shape, cell.count * inputs.page_size) for share in owed for cell in cells]
    # K and V are separate pools, hence two descriptors for every row or page of a layer.
    per_row = sum(2 * share.num_layers for share in owed)
    return RoomCost(
        writers=len({share.writer for share in owed}) if cells else 0,
        readers=len({share.reader for share in owed}) if cells else 0,
        cells=len(cells),
        parts=len(parts),
        payload_bytes=sum(share.payload_bytes(inputs.shape, pages * inputs.page_size) for share in owed),
        staging_bytes=sum(parts),
        largest_part_bytes=max(parts, default=0),
        slice_descriptors=per_row * pages * inputs.page_size,
        bulk_descriptors=per_row * pages if all(share.whole_rows for share in owed) else None,
    )
