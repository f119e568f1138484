"""`direct`: one kernel reads our pages and writes the reader's, over NVLink or within one GPU.

No staging, no ring, no grant: what `staged` does in a gather, a write and a scatter is here one copy of the rows. The
kernel writes through a mapping of the reader's memory; its event says that all of it is there, and then the tag goes.
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
"""Multiprocessors that a kernel takes unless `direct_sms` says otherwise: the rest is left to the engine's compute."""


class DirectFlight(Flight):
    """A part that is one kernel, or one for each geometry of its planes.

    What was begun cannot be recalled: behind a raised cancel it runs to its end, and no tag is sent.
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
        self._told = False
        self.post_ns = time.monotonic_ns() - self.began_ns
        self.posts = self.descriptors = len(batches)

    def advance(self) -> bool:
        if not self._landed():
            return False
        if not self._told and not self.order.cancel.cancelled:
            self._told = True
            self.connection.transport.tell(self.connection.peer, self.order.tag)
        return True

    def give_up(self) -> bool:
        try:
            return self._landed()
        except DeviceError:
            return False  # nothing proves that it has stopped; the mapping and the pages stay until our process ends

    def _landed(self) -> bool:
        """Whether the kernel has ended; the mapping is ours no longer then."""
        if self._mapping is not None and self._event.done():
            self._mapping.give()
            self._mapping = None
        return self._mapping is None


class DirectPath:
    """Copies on a stream of one worker.

    Args:
        programs: thread blocks, and so multiprocessors, that a kernel may take; None: `PROGRAMS`.
    """

    def __init__(self, copies: RowCopies, programs: int | None = None) -> None:
        self._copies = copies
        self._programs = programs or PROGRAMS

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        share, key = order.share, order.key
        if share is None:
            raise MemoryLayoutError(f"{key} owes no heads")
        if connection.mapping is None:
            raise TransportError(
                f"there is no direct path to {connection.peer} (auto takes another): {connection.why_not}"
            )
        segment = connection.segments[share.segment]
        segment.check_layers(key.lo, key.hi)
        check_pages(segment, order.src_pages, order.dst_pages)
        place = share.segment, share.src_head, share.dst_head, share.heads
        parts = connection.routes.get(place)
        if parts is None:
            parts = connection.routes[place] = routes(segment, *place[1:])
        return DirectFlight(connection, connection.mapping, order, self._copies, self._programs, parts)
