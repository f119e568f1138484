"""Routes of path direct: source and destination addresses of a head slice, in the form of kernel launches.

A route is computed once per connection and head slice; each part uses the layers it needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from kvctl_agent.device.base import Batch, Geometry
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.paths.segment_pair import Numbers, SegmentPair
from kvctl_agent.protocol.events import Pages

# Prompts of one length share the entries; an entry has 6 KiB for 80 layers.
_BATCHES = 256


class Route:
    """Addresses of the planes of one geometry, in the layers that both sides hold.

    Attributes:
        batch: `_batch` with a cache; callers must not modify the result.
    """

    def __init__(self, geometry: Geometry, layer_lo: int, addrs: Numbers) -> None:
        """Create a route.

        Args:
            geometry: Geometry of every block.
            layer_lo: First layer that both sides hold.
            addrs: Address of the first head of page 0, in the local pool and in the mapping of the peer's pool, int64
                `[layers, planes, 2]`.
        """
        self._geometry, self._layer_lo, self._addrs = geometry, layer_lo, addrs
        self.batch = lru_cache(_BATCHES)(self._batch)

    def _batch(self, lo: int, hi: int, pages: int) -> Batch:
        """The batch of layers [lo, hi), for a list of `pages` source pages followed by as many destination pages."""
        addrs = self._addrs[lo - self._layer_lo : hi - self._layer_lo].reshape(-1, 2)
        blocks = np.empty((len(addrs), 5), np.int64)
        blocks[:, :2] = addrs
        blocks[:, 2:] = 0, pages, pages
        return Batch(self._geometry, blocks)


def routes(segment: SegmentPair, src_head: int, dst_head: int, heads: int) -> tuple[Route, ...]:
    """Return the routes of one head slice of a mapped segment, one for each geometry of its planes.

    Args:
        segment: The segment on both sides.
        src_head, dst_head: First head in the local pool and in the peer's pool.
        heads: Number of heads.
    """
    lo, hi = segment.common_layers
    here, there = segment.bases(lo, hi)[0], segment.mapped_bases(lo, hi)
    head_bytes = np.array([plane.head_bytes for plane in segment.ours.shard.segment.planes], np.int64)
    pairs = np.stack((here + src_head * head_bytes, there + dst_head * head_bytes), axis=2)
    found = _planes(segment, heads)
    return tuple(Route(geometry, lo, np.ascontiguousarray(pairs[:, planes])) for geometry, planes in found.items())


def geometries(segments: Iterable[SegmentPair]) -> set[Geometry]:
    """Return all geometries that parts on a connection can have, to compile their kernels in advance."""
    found: set[Geometry] = set()
    for segment in segments:
        ours, theirs = segment.ours.shard, segment.theirs.shard
        heads = min(ours.head_hi, theirs.head_hi) - max(ours.head_lo, theirs.head_lo)
        lo, hi = segment.common_layers
        if heads > 0 and lo < hi:
            found.update(_planes(segment, heads))
    return found


def check_pages(segment: SegmentPair, src: Pages, dst: Pages) -> None:
    """Raise MemoryLayoutError for a page outside its pool; a kernel with a wrong address would lose the device."""
    for pages, side in ((src, segment.ours), (dst, segment.theirs)):
        # As in `RowIndex`: `min` and `max` take four times as long.
        if pages.item(pages.argmin()) < 0 or pages.item(pages.argmax()) >= side.num_slots:
            owner = "the local pool" if side is segment.ours else "the peer's pool"
            raise MemoryLayoutError(
                f"{side.shard.segment.name}: pages {pages.min()} to {pages.max()} are not all in {owner} of "
                f"{side.num_slots} pages"
            )


def _planes(segment: SegmentPair, heads: int) -> dict[Geometry, list[int]]:
    """The planes of each geometry, for a slice of `heads` heads."""
    found: dict[Geometry, list[int]] = {}
    for number, plane in enumerate(segment.ours.shard.segment.planes):
        width = heads * plane.head_bytes
        src, dst = segment.ours.row_bytes(number), segment.theirs.row_bytes(number)
        if width == src == dst:  # all heads on both sides: a page is one row
            page = plane.rows * width
            geometry = Geometry(1, page, page, page, True, True)
        else:
            geometry = Geometry(plane.rows, width, src, dst, True, True)
        found.setdefault(geometry, []).append(number)
    return found
