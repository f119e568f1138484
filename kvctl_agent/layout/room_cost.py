"""What a room costs on each path, in bytes and descriptors: for printing a plan and for sizing a ring beforehand."""

from __future__ import annotations

from dataclasses import dataclass

from kvctl_agent.layout.chunks import grid
from kvctl_agent.layout.plan import transfer_slices, writer_cells
from kvctl_agent.layout.plan_inputs import PlanInputs


@dataclass(frozen=True, slots=True)
class RoomCost:
    """One room's KV over all its writers and decode ranks; aux rows and state are left out.

    Attributes:
        writers: Prefill ranks that owe something.
        readers: Decode ranks that are owed something.
        cells: Grid cells.
        parts: Parts when layers are not grouped: also the staged path's writes.
        payload_bytes: KV bytes that land, one copy per decode replica, whole pages.
        staging_bytes: The same with every part aligned as in the ring.
        largest_part_bytes: The ring must hold at least this.
        slice_descriptors: One per row of each plane: of K and of V per token.
        bulk_descriptors: At most this many, one per page of each plane; neighbouring pages merge. None where some
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
    owed = transfer_slices(inputs, room, decode_dp)
    segments = inputs.segments
    writers: set[int] = set()
    readers: set[int] = set()
    parts: list[int] = []
    payload = by_row = by_page = 0
    for share in owed:
        planes = segments[share.segment].planes
        for cell in writer_cells(inputs, room, share.writer, total_pages, prefix_pages):
            writers.add(share.writer)
            readers.add(share.reader)
            parts.append(share.part_bytes(cell.count))
            payload += share.payload_bytes(cell.count)
            by_page += share.num_layers * len(planes) * cell.count
            by_row += share.num_layers * sum(plane.rows for plane in planes) * cell.count
    return RoomCost(
        writers=len(writers),
        readers=len(readers),
        cells=len(grid(total_pages, prefix_pages, inputs.chunk_pages)),
        parts=len(parts),
        payload_bytes=payload,
        staging_bytes=sum(parts),
        largest_part_bytes=max(parts, default=0),
        slice_descriptors=by_row,
        bulk_descriptors=by_page if all(share.whole_rows for share in owed) else None,
    )
