"""`staged`: gather into staging, write contiguously into the reader's ring, where the reader scatters.

A part is one contiguous region of the ring, so it costs one descriptor per piece however scattered its pages are.
It is cut into pieces that stay in cache (on a device: as large as writes want to be): while one is on the wire the next
is gathered. The tag travels with the last piece, and only after all others are complete, because tags of different
writes may overtake each other.
"""

from __future__ import annotations

import contextlib
import time

import numpy as np

from kvctl_agent.errors import KvctlError, MemoryLayoutError
from kvctl_agent.layout.transfer_slice import TransferSlice
from kvctl_agent.memory.buffers import Buffer, StagingBuffers
from kvctl_agent.memory.copier import Copier, PendingCopy
from kvctl_agent.memory.row_index import RowIndex
from kvctl_agent.paths.base import Flight, PeerConnection
from kvctl_agent.protocol.events import Transfer
from kvctl_agent.protocol.messages import Grant
from kvctl_agent.transport.base import Write

# Pieces of one part on the wire at once: enough to keep a connection busy, few enough to stay in cache.
_IN_FLIGHT = 4


class StagedFlight(Flight):
    """A part that moves piece by piece; when all buffers are in use it simply waits its turn."""

    def __init__(
        self,
        connection: PeerConnection,
        order: Transfer,
        buffers: StagingBuffers,
        copier: Copier,
        share: TransferSlice,
        grant: Grant,
    ) -> None:
        super().__init__(connection, order, time.monotonic_ns())
        memory, key = connection.pool.segments[share.segment], order.key
        layout = memory.part_layout(key.lo, key.hi, len(order.src_pages), share.heads)
        if layout.region_bytes > grant.end - grant.offset:
            raise MemoryLayoutError(f"{key} needs {layout.region_bytes} bytes, its grant {grant} is smaller")
        self._buffers = buffers
        self._copier = copier
        self._rows = RowIndex(memory, order.src_pages, share.src_head, share.heads)
        self._target = connection.ring_base + grant.offset
        self._pieces = layout.pieces(min(copier.piece_bytes, buffers.buffer_bytes))
        self._next = 0
        self._wired: list[tuple[Write, Buffer]] = []
        self._work: PendingCopy | None = None  # the gather into these:
        self._filling: list[Buffer] = []
        self._since_ns = 0
        self._held: list[Buffer] = []  # gathered, not yet posted; the last piece waits here for all others

    def advance(self) -> bool:
        self._reap()
        cancel = self.order.cancel
        while self._next < len(self._pieces) and cancel.may_post(time.monotonic_ns()):
            if not self._held and not (self._begin() and self._gathered()):
                return False
            self._reap()
            last = self._next == len(self._pieces) - 1
            if last and self._wired:
                return False
            self._post(self.order.tag if last else None)
        if cancel.cancelled:
            self._drop()
        elif self._next < len(self._pieces):
            return False  # the lease has ended: what is left waits for it
        self._reap()
        return not self._wired and self._work is None

    def give_up(self) -> bool:
        self._drop()
        # Buffers that the engine may still read stay out of use until it lets go.
        for write, buffer in self._wired[:]:
            if write.release():
                self._buffers.release(buffer)
                self._wired.remove((write, buffer))
        return not self._wired and self._work is None

    def _begin(self) -> bool:
        """Gather the next piece, or as many as go together; False when none can begin and none has."""
        if self._work is not None:
            return True
        if len(self._wired) >= _IN_FLIGHT:
            return False
        pieces = self._pieces[self._next : self._next + self._copier.pieces_at_once]
        for _ in pieces:
            buffer = self._buffers.acquire()
            if buffer is None:
                break
            self._filling.append(buffer)
        if not self._filling:
            return False
        self._since_ns = time.monotonic_ns()
        into = [buffer.span for buffer in self._filling]
        self._work = self._copier.gather(self._rows, pieces[: len(into)], into)
        return True

    def _gathered(self) -> bool:
        """Whether the gather that was begun is done; then its buffers are held."""
        assert self._work is not None
        try:
            if not self._work.done():
                return False
        except KvctlError:
            self._work = None  # it touches nothing any more
            raise
        self.gather_ns += time.monotonic_ns() - self._since_ns
        self._held, self._filling, self._work = self._filling, [], None
        return True

    def _post(self, tag: bytes | None) -> None:
        buffer, piece = self._held[0], self._pieces[self._next]
        here = np.array([buffer.span.addr], np.uint64)
        there = np.array([self._target + piece.offset], np.uint64)
        since = time.monotonic_ns()
        write = self.connection.transport.write(
            self.connection.peer, here, there, np.array([piece.nbytes], np.uint64), tag
        )
        self.count(write, since)
        self._wired.append((write, self._held.pop(0)))
        self._next += 1

    def _reap(self) -> None:
        """Give back the buffers of pieces that are complete."""
        for write, buffer in self._wired[:]:
            if write.poll():
                self._wired.remove((write, buffer))
                self._buffers.release(buffer)

    def _drop(self) -> None:
        """Give back the buffers that no write has; those of a gather that still runs stay out."""
        if self._work is not None:
            with contextlib.suppress(KvctlError):  # the part is over, and why is known
                self._gathered()
        if self._work is None:
            self._held += self._filling  # of a gather that failed
            self._filling = []
        while self._held:
            self._buffers.release(self._held.pop())


class StagedPath:
    """Gathers into `buffers`, at least one piece each, by `copier`, which is the worker's."""

    def __init__(self, buffers: StagingBuffers, copier: Copier) -> None:
        self._buffers = buffers
        self._copier = copier

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        if order.share is None or order.grant is None:
            raise MemoryLayoutError(f"{order.key} has no staging grant")
        return StagedFlight(connection, order, self._buffers, self._copier, order.share, order.grant)
