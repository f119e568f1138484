"""Path direct: a kernel copies rows from the local pages to the reader's pages, over NVLink or within one GPU.

It needs no staging, ring or grant: one row copy replaces the gather, write and scatter of path staged. The kernel
writes through a mapping of the reader's memory. When its event is done, all bytes have landed and the tag is sent.
"""

from __future__ import annotations

import time

import numpy as np

from kvctl_agent.device.base import RowCopies
from kvctl_agent.errors import DeviceError, MemoryLayoutError, TransportError
from kvctl_agent.paths.base import Flight, PeerConnection
from kvctl_agent.paths.direct_routes import Route, check_pages, routes
from kvctl_agent.paths.mapped_memory import MappedMemory
from kvctl_agent.protocol.events import Transfer

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
        mapping.take()
        try:
            self._event = copies.begin(batches, pages, programs=programs)
        except BaseException:
            mapping.give()
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
        """Whether the kernel has ended; if so, release the mapping."""
        if self._mapping is not None and self._event.done():
            self._mapping.give()
            self._mapping = None
        return self._mapping is None


class DirectPath:
    """Path direct with the row copies of one worker.

    Args:
        copies: The worker's stream.
        programs: Maximum number of thread blocks, and so of multiprocessors, of a kernel; `PROGRAMS` if None.
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
