"""Counts the bytes and descriptors of a room on each path, for printing a plan and for choosing a ring size."""

from __future__ import annotations

from dataclasses import dataclass

from kvctl_agent.layout.chunks import grid
from kvctl_agent.layout.plan import transfer_slices, writer_cells
from kvctl_agent.layout.plan_inputs import PlanInputs


@dataclass(frozen=True, slots=True)
class RoomCost:
    """The KV of one room over all its writers and decode ranks, without aux rows and state.

    Attributes:
        writers: Prefill ranks that send parts.
        readers: Decode ranks that receive parts.
        cells: Grid cells.
        parts: Parts if layers are not grouped; also the number of writes on the staged path.
        payload_bytes: KV bytes written, counting whole pages and one copy per decode replica.
        staging_bytes: The same with every part aligned as in the ring.
        largest_part_bytes: Staging bytes of the largest part; the ring must not be smaller.
        slice_descriptors: Descriptors on the slice path: one per row of each plane, so one for K and one for V of each
            token.
        bulk_descriptors: Upper limit of the descriptors on the bulk path: one per page of each plane, fewer if
            neighbouring pages merge. None if a slice does not cover whole rows, which rules out the bulk path.
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
    """Return the cost of a room of `total_pages` pages, the first `prefix_pages` of which the decode side already has.

    Raises:
        LayoutError: a size is out of range, or the decode instance has no such dp rank.
    """
    slices = transfer_slices(inputs, room, decode_dp)
    segments = inputs.segments
    writers: set[int] = set()
    readers: set[int] = set()
    parts: list[int] = []
    payload = by_row = by_page = 0
    for part_slice in slices:
        planes = segments[part_slice.segment].planes
        for cell in writer_cells(inputs, room, part_slice.writer, total_pages, prefix_pages):
            writers.add(part_slice.writer)
            readers.add(part_slice.reader)
            parts.append(part_slice.part_bytes(cell.count))
            payload += part_slice.payload_bytes(cell.count)
            by_page += part_slice.num_layers * len(planes) * cell.count
            by_row += part_slice.num_layers * sum(plane.rows for plane in planes) * cell.count
    return RoomCost(
        writers=len(writers),
        readers=len(readers),
        cells=len(grid(total_pages, prefix_pages, inputs.chunk_pages)),
        parts=len(parts),
        payload_bytes=payload,
        staging_bytes=sum(parts),
        largest_part_bytes=max(parts, default=0),
        slice_descriptors=by_row,
        bulk_descriptors=by_page if all(part_slice.whole_rows for part_slice in slices) else None,
    )
