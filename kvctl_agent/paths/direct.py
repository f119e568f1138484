"""Path direct: a kernel copies rows from the local pages to the reader's pages, over NVLink or within one GPU.

The path needs no staging, ring or grant: one row copy replaces the gather, write and scatter of path staged. The kernel
writes through a mapping of the reader's memory. When its event is done, all bytes have landed and the tag is sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from kvctl_agent.device.base import Batch, Geometry, KeptBatch, RowCopies
from kvctl_agent.errors import DeviceError, MemoryLayoutError, TransportError
from kvctl_agent.layout.page_indices import all_below, extent
from kvctl_agent.memory.device_copier import page_strides
from kvctl_agent.paths.base import Flight
from kvctl_agent.paths.peer_connection import MappedMemory, Numbers, PeerConnection, SegmentPair
from kvctl_agent.protocol.events import Pages, Transfer

PROGRAMS = 64
"""Multiprocessors that a kernel uses unless `direct_sms` is set; the others are left to the engine's compute."""


class DirectFlight(Flight):
    """The transfer of a part by one kernel for each geometry of its planes.

    A launched kernel cannot be stopped. After cancellation it runs to its end, and no tag is sent.
    """

    def __init__(
        self,
        connection: PeerConnection,
        mapping: MappedMemory,
        order: Transfer,
        copies: RowCopies,
        programs: int,
        parts: tuple[Route, ...],
    ) -> None:
        super().__init__(connection, order, time.monotonic_ns())
        lo, hi, count = order.key.lo, order.key.hi, len(order.src_pages)
        batches = [route.batch(lo, hi, count) for route in parts]
        pages = np.concatenate((order.src_pages, order.dst_pages), dtype=np.int32)
        mapping.acquire()
        try:
            self.event = self._kernels = copies.begin(batches, pages, programs=programs)
        except BaseException:
            mapping.release()
            raise
        self._mapping: MappedMemory | None = mapping
        self._tag_sent = False
        self.post_ns = time.monotonic_ns() - self.began_ns
        self.posts = self.descriptors = len(batches)

    def advance(self) -> bool:
        if not self._landed():
            return False
        if not self._tag_sent and not self.order.cancel.cancelled:
            self._tag_sent = True
            self.connection.transport.tell(self.connection.peer, self.order.tag)
        return True

    def give_up(self) -> bool:
        try:
            return self._landed()
        except DeviceError:
            return False  # The kernel may still run, so the mapping and the pages are kept until the process ends.

    def _landed(self) -> bool:
        """Returns whether the kernel has ended; if so, releases the mapping.

        Raises:
            DeviceError: the kernel failed.
        """
        if self._mapping is not None and self._kernels.done():
            self._mapping.release()
            self._mapping = None
        return self._mapping is None


class DirectPath:
    """Path direct, with the kernel launcher of the control loop.

    `programs` is the maximum number of thread blocks, and so of multiprocessors, of a kernel; `PROGRAMS` if None.
    """

    def __init__(self, copies: RowCopies, programs: int | None = None) -> None:
        self._copies = copies
        self._programs = programs or PROGRAMS

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        share, key = order.share, order.key
        if share is None:
            raise MemoryLayoutError(f"{key} has no heads to send on path direct")
        if connection.mapping is None:
            raise TransportError(
                f"there is no direct path to {connection.peer} (auto takes another): {connection.why_not}"
            )
        segment = connection.segments[share.segment]
        segment.check_layers(key.lo, key.hi)
        check_pages(segment, order.src_pages, order.dst_pages)
        slice_key = share.segment, share.src_head, share.dst_head, share.heads
        parts = connection.routes.get(slice_key)
        if parts is None:
            parts = connection.routes[slice_key] = routes(segment, *slice_key[1:])
        return DirectFlight(connection, connection.mapping, order, self._copies, self._programs, parts)


# Prompts of the same length share an entry; an entry takes 6 KiB for 80 layers.
_BATCHES = 256


class Route:
    """Source and destination addresses of the planes of one geometry, in the layers that both sides hold.

    Attributes:
        batch: `_batch` with a cache; callers must not modify the result.
    """

    def __init__(self, geometry: Geometry, layer_lo: int, addrs: Numbers) -> None:
        """Creates a route.

        Args:
            geometry: Geometry of every block.
            layer_lo: First layer that both sides hold.
            addrs: Address of the first head of page 0, in the local pool and in the mapping of the peer's pool, int64
                `[layers, planes, 2]`.
        """
        self._geometry, self._layer_lo, self._addrs = geometry, layer_lo, addrs
        self.batch = lru_cache(_BATCHES)(self._batch)

    def _batch(self, lo: int, hi: int, pages: int) -> Batch:
        """Returns the batch that copies layers [lo, hi) of `pages` pages.

        The launch's page list must have the source pages first, then as many destination pages.
        """
        addrs = self._addrs[lo - self._layer_lo : hi - self._layer_lo].reshape(-1, 2)
        blocks = np.empty((len(addrs), 5), np.int64)
        blocks[:, :2] = addrs
        blocks[:, 2:] = 0, pages, pages
        return KeptBatch(self._geometry, blocks)


def routes(segment: SegmentPair, src_head: int, dst_head: int, heads: int) -> tuple[Route, ...]:
    """Returns the routes of one head slice of a mapped segment, one for each geometry of its planes.

    `src_head` and `dst_head` are the first head of the slice in the local pool and in the peer's pool.
    """
    lo, hi = segment.common_layers
    here, there = segment.bases(lo, hi)[0], segment.mapped_bases(lo, hi)
    src, dst = (
        np.array([strides.head for strides in side.strides], np.int64) for side in (segment.local, segment.remote)
    )
    pairs = np.stack((here + src_head * src, there + dst_head * dst), axis=2)
    found = _planes(segment, heads)
    return tuple(Route(geometry, lo, np.ascontiguousarray(pairs[:, planes])) for geometry, planes in found.items())


def geometries(segments: Iterable[SegmentPair]) -> set[Geometry]:
    """Returns all geometries that parts with these segments can have, to compile their kernels in advance."""
    found: set[Geometry] = set()
    for segment in segments:
        local, remote = segment.local.shard, segment.remote.shard
        heads = min(local.head_hi, remote.head_hi) - max(local.head_lo, remote.head_lo)
        lo, hi = segment.common_layers
        if heads > 0 and lo < hi:
            found.update(_planes(segment, heads))
    return found


def check_pages(segment: SegmentPair, src: Pages, dst: Pages) -> None:
    """Raises MemoryLayoutError for a page outside its pool; a kernel that writes to a wrong address faults the GPU."""
    for pages, side in ((src, segment.local), (dst, segment.remote)):
        if not all_below(pages, side.num_slots):
            least, most = extent(pages)
            owner = "the local pool" if side is segment.local else "the peer's pool"
            raise MemoryLayoutError(
                f"{side.shard.segment.name}: pages {least} to {most} are not all in {owner} of {side.num_slots} pages"
            )


def _planes(segment: SegmentPair, heads: int) -> dict[Geometry, list[int]]:
    """Returns the indices of the planes of each geometry, for a slice of `heads` heads."""
    found: dict[Geometry, list[int]] = {}
    for number, plane in enumerate(segment.local.shard.segment.planes):
        src, dst = page_strides(segment.local, number), page_strides(segment.remote, number)
        geometry = Geometry(plane.rows, heads, plane.head_bytes, src, dst)
        found.setdefault(geometry, []).append(number)
    return found
