"""Where `direct` reads and writes: both sides' addresses of a head slice, laid out as a launch wants them.

They are worked out once per connection and head slice. A part then cuts its layers out of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from kvctl_agent.device.base import Batch, Geometry
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.paths.segment_pair import Numbers, SegmentPair
from kvctl_agent.protocol.events import Pages

# Prompts of one length have the same; 6 KiB for 80 layers.
_BATCHES = 256


class Route:
    """Planes of one geometry in the layers that both sides hold.

    Attributes:
        batch: `_batch`, worked out once for parts that are alike; not to be changed.
    """

    def __init__(self, geometry: Geometry, layer_lo: int, addrs: Numbers) -> None:
        """
        Args:
            geometry: of every block.
            layer_lo: the first of these layers.
            addrs: of the first head of page 0, ours and the peer's in our address space, int64 `[layers, planes, 2]`.
        """
        self._geometry, self._layer_lo, self._addrs = geometry, layer_lo, addrs
        self.batch = lru_cache(_BATCHES)(self._batch)

    def _batch(self, lo: int, hi: int, pages: int) -> Batch:
        """Layers [lo, hi), for a list of `pages` source pages with as many destination pages behind them."""
        addrs = self._addrs[lo - self._layer_lo : hi - self._layer_lo].reshape(-1, 2)
        blocks = np.empty((len(addrs), 5), np.int64)
        blocks[:, :2] = addrs
        blocks[:, 2:] = 0, pages, pages
        return Batch(self._geometry, blocks)


def routes(segment: SegmentPair, src_head: int, dst_head: int, heads: int) -> tuple[Route, ...]:
    """The routes of one head slice of a mapped segment, one for each geometry of its planes."""
    lo, hi = segment.common_layers
    here, there = segment.bases(lo, hi)[0], segment.mapped_bases(lo, hi)
    head_bytes = np.array([plane.head_bytes for plane in segment.ours.shard.segment.planes], np.int64)
    pairs = np.stack((here + src_head * head_bytes, there + dst_head * head_bytes), axis=2)
    found = _planes(segment, heads)
    return tuple(Route(geometry, lo, np.ascontiguousarray(pairs[:, planes])) for geometry, planes in found.items())


def geometries(segments: Iterable[SegmentPair]) -> set[Geometry]:
    """All that parts on a connection can have, to compile ahead."""
    found: set[Geometry] = set()
    for segment in segments:
        ours, theirs = segment.ours.shard, segment.theirs.shard
        heads = min(ours.head_hi, theirs.head_hi) - max(ours.head_lo, theirs.head_lo)
        lo, hi = segment.common_layers
        if heads > 0 and lo < hi:
            found.update(_planes(segment, heads))
    return found


def check_pages(segment: SegmentPair, src: Pages, dst: Pages) -> None:
    """Raises MemoryLayoutError for a page outside its pool: a kernel trusts, and one wrong address ends the device."""
    for pages, side in ((src, segment.ours), (dst, segment.theirs)):
        # As in `RowIndex`: `min` and `max` would take four times as long.
        if pages.item(pages.argmin()) < 0 or pages.item(pages.argmax()) >= side.num_slots:
            whose = "ours" if side is segment.ours else "the peer's"
            raise MemoryLayoutError(
                f"{side.shard.segment.name}: pages {pages.min()} to {pages.max()} are not all in a pool of "
                f"{side.num_slots} ({whose})"
            )


def _planes(segment: SegmentPair, heads: int) -> dict[Geometry, list[int]]:
    """Planes by the geometry of such a slice."""
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
