"""Computes the largest runs of bytes of a page that are contiguous on both sides of a transfer."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import Plane
from kvctl_agent.memory.addresses import PlaneStrides, SegmentAddresses, contiguous_strides


class PlaneRuns(NamedTuple):
    """Contiguous runs of some heads of a page of one plane.

    Attributes:
        rows, heads: Rows and heads of a run that is contiguous on both sides, in the same order.
        per_page: Number of these runs in a page.
        page_bytes: Bytes of the heads in one page.
        adjacent: Whether consecutive pages follow one another without gaps on both sides.
        gather_bytes, scatter_bytes: Bytes of a run that is contiguous in the source, or in the destination, and in
            staging.
    """

    rows: int
    heads: int
    per_page: int
    page_bytes: int
    adjacent: bool
    gather_bytes: int
    scatter_bytes: int


def whole_pages(runs: tuple[PlaneRuns, ...]) -> bool:
    """Returns whether a page of every plane is one run, so that path bulk can send it."""
    return all(plane.per_page == 1 for plane in runs)


def bulk_is_possible(share: TransferSlice, runs: tuple[PlaneRuns, ...]) -> bool:
    """Returns whether path bulk can send a slice: it has the same heads on both sides, and a page is one run."""
    return share.whole_rows and whole_pages(runs)


def join_planes(local: SegmentAddresses, remote: SegmentAddresses) -> tuple[SegmentAddresses, SegmentAddresses] | None:
    """Returns both sides with the first two planes, K and V, as one plane; None if they are not adjacent on both.

    K and V are adjacent in fused rows (K of a head, then V), and in `[pages, 2, tokens, heads, dim]`.
    """
    sides, planes = (local, remote), local.shard.segment.planes
    if len(planes) < 2 or any(side.strides[0] != side.strides[1] for side in sides):
        return None
    k, v = planes[:2]
    distances = {layer[1] - layer[0] for side in sides for layer in side.bases}
    if k.rows != v.rows or len(distances) != 1:
        return None
    (distance,) = distances
    if distance == k.head_bytes:
        plane = k._replace(head_bytes=k.head_bytes + v.head_bytes)
    elif k == v._replace(name=k.name) and all(
        side.split == 1 and distance == k.rows * side.strides[0].row for side in sides
    ):
        plane = k._replace(rows=2 * k.rows)
    else:
        return None
    return _joined(local, plane), _joined(remote, plane)


def _joined(side: SegmentAddresses, plane: Plane) -> SegmentAddresses:
    segment = side.shard.segment
    shard = side.shard._replace(segment=replace(segment, planes=(plane, *segment.planes[2:])))
    bases = tuple((layer[0], *layer[2:]) for layer in side.bases)
    return SegmentAddresses(shard, side.num_slots, bases, (side.strides[0], *side.strides[2:]), side.split)


def segment_runs(local: SegmentAddresses, remote: SegmentAddresses, heads: int) -> tuple[PlaneRuns, ...]:
    """Returns the runs of parts of `heads` heads, for each plane of a segment."""
    return tuple(
        _plane_runs(plane, heads, (source, local.split), (target, remote.split))
        for plane, source, target in zip(local.shard.segment.planes, local.strides, remote.strides, strict=True)
    )


def contiguous_runs(planes: tuple[Plane, ...], share: TransferSlice) -> tuple[PlaneRuns, ...]:
    """Returns the runs of a transfer slice between contiguous pools with pages of equal size."""
    return tuple(
        _plane_runs(
            plane,
            share.heads,
            (contiguous_strides(plane, share.src_pool_heads), 1),
            (contiguous_strides(plane, share.dst_pool_heads), 1),
        )
        for plane in planes
    )


def _plane_runs(
    plane: Plane, heads: int, source: tuple[PlaneStrides, int], target: tuple[PlaneStrides, int]
) -> PlaneRuns:
    """Returns the runs of one plane; a side is its strides and its transfer pages in a page of the engine."""
    _, rows, head_bytes = plane
    page_bytes = rows * heads * head_bytes
    staged = contiguous_strides(plane, heads)
    run_rows, run_heads = _run(plane, heads, source[0], target[0])
    gather_rows, gather_heads = _run(plane, heads, source[0], staged)
    scatter_rows, scatter_heads = _run(plane, heads, target[0], staged)
    adjacent = all(
        strides.page == split * page_bytes and (split == 1 or rows * strides.row == page_bytes)
        for strides, split in (source, target)
    )
    return PlaneRuns(
        run_rows,
        run_heads,
        rows // run_rows * (heads // run_heads),
        page_bytes,
        adjacent,
        gather_rows * gather_heads * head_bytes,
        scatter_rows * scatter_heads * head_bytes,
    )


def _run(plane: Plane, heads: int, *sides: PlaneStrides) -> tuple[int, int]:
    """Returns the rows and heads of the largest run of a page that is contiguous on all sides, in the same order."""
    _, rows, head_bytes = plane
    # The inner axis is the one whose elements are adjacent: heads (NHD), or rows (HND).
    if all(heads == 1 or side.head == head_bytes for side in sides):
        whole = all(rows == 1 or side.row == heads * head_bytes for side in sides)
        return (rows if whole else 1), heads
    if all(rows == 1 or side.row == head_bytes for side in sides):
        whole = all(side.head == rows * head_bytes for side in sides)
        return rows, (heads if whole else 1)
    return 1, 1
