"""Path staged: gathers a part into staging and writes it to the reader's ring, from which the reader scatters it.

A part has one contiguous region of the ring, so it takes one descriptor per piece however scattered its pages are. It
is divided into pieces that stay in cache (on a device, pieces large enough for the full write rate), and the next
pieces are gathered while the previous ones are on the wire. Pieces gathered together are posted as one write.

All writes of a part share its tag if the transport can do that. Otherwise the tag is sent with the last piece, after
all others are complete, because tags of different writes may be delivered out of order. The last piece then has a write
of its own unless the whole part is one write: a transport may divide a write with a tag among connections, and a piece
that failed is seen only on its own.
"""

from __future__ import annotations

import contextlib
import time

import numpy as np

from kvctl_agent.errors import KvctlError, MemoryLayoutError
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.memory.allocations import Buffer, StagingBuffers
from kvctl_agent.memory.copier import Copier, PendingCopy
from kvctl_agent.memory.host_copier import HostCopier, HostCopy
from kvctl_agent.memory.segment import RowIndex
from kvctl_agent.paths.base import Flight
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.protocol.events import Transfer
from kvctl_agent.protocol.messages import Grant
from kvctl_agent.transport.base import Addresses, DeferredWrite, SharedTag, Sizes, Write

# Pieces of one part that may be in flight, unless twice as many as are gathered at once are more: enough to keep a
# connection busy, few enough to stay in cache.
_IN_FLIGHT = 4
# A batch of chained pieces costs 80 µs of Python, a quarter of the time in which a piece is copied.
_LEAST_CHAINED = 4


class PieceFlight(Flight):
    """The transfer of a part in pieces; pauses while its peer may take no staging buffer."""

    def __init__(
        self,
        connection: PeerConnection,
        order: Transfer,
        buffers: StagingBuffers,
        piece_bytes: int,
        share: TransferSlice,
        grant: Grant,
    ) -> None:
        super().__init__(connection, order, time.monotonic_ns())
        memory, key = connection.pool.segments_at(share.src_split)[share.segment], order.key
        layout = memory.part_layout(key.lo, key.hi, len(order.src_pages), share.heads)
        if layout.region_bytes > grant.end - grant.offset:
            raise MemoryLayoutError(f"{key} needs {layout.region_bytes} bytes, its grant {grant} is smaller")
        self._buffers = buffers
        self._rows = RowIndex(memory, order.src_pages, share.src_head, share.heads)
        self._target = connection.ring_base + grant.offset
        self._pieces = layout.pieces(min(piece_bytes, buffers.buffer_bytes))
        self._shared: SharedTag | None = None
        self._next = 0  # the next piece to post

    def _acquire(self, count: int) -> list[Buffer]:
        """Returns `count` buffers, or as many as the peer may take."""
        buffers: list[Buffer] = []
        while len(buffers) < count and (buffer := self._buffers.acquire(self.connection.peer)) is not None:
            buffers.append(buffer)
        return buffers

    def _release(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            self._buffers.release(buffer)

    def _descriptors(self, buffers: list[Buffer]) -> tuple[Addresses, Addresses, Sizes]:
        """Returns local and remote addresses and sizes of the next pieces, which are or will be in `buffers`."""
        pieces = self._pieces[self._next : self._next + len(buffers)]
        local = np.array([buffer.span.addr for buffer in buffers], np.uint64)
        remote = np.array([self._target + piece.offset for piece in pieces], np.uint64)
        return local, remote, np.array([piece.nbytes for piece in pieces], np.uint64)


class StagedFlight(PieceFlight):
    """A transfer whose pieces are posted by the control loop when they are gathered."""

    def __init__(
        self,
        connection: PeerConnection,
        order: Transfer,
        buffers: StagingBuffers,
        copier: Copier,
        share: TransferSlice,
        grant: Grant,
    ) -> None:
        super().__init__(connection, order, buffers, copier.piece_bytes, share, grant)
        self._copier = copier
        self._gathers = 0  # pieces whose gather has begun
        self._writes: list[tuple[Write, list[Buffer]]] = []
        self._gather: PendingCopy | None = None  # the gather into `_filling`
        self._filling: list[Buffer] = []
        self._since_ns = 0
        self._gathered: list[Buffer] = []  # not yet posted; the last piece waits here for all others

    def advance(self) -> bool:
        self._reap()
        cancel = self.order.cancel
        if cancel.cancelled:
            self._drop()
        else:
            self._collect()
            # Threads and devices gather the next pieces while this thread posts; the collection that follows copies
            # them if there are neither.
            begun = self._begin()
            self._post_gathered()
            if begun:
                self._collect()
                self._post_gathered()
            if self._next < len(self._pieces):
                return False
        self._reap()
        return not self._writes and self._gather is None

    def give_up(self) -> bool:
        self._drop()
        # Buffers that the engine may still read are not released.
        for each in self._writes[:]:
            write, buffers = each
            if write.release():
                self._release(buffers)
                self._writes.remove(each)
        return not self._writes and self._gather is None

    def _begin(self) -> bool:
        """Begins the gather of the next pieces.

        Returns False if one is running, all pieces are gathered, the lease has expired, or the peer may take no buffer.
        """
        at_once = self._copier.pieces_at_once
        in_flight = len(self._gathered) + sum(len(buffers) for _, buffers in self._writes)
        most = max(_IN_FLIGHT, 2 * at_once)
        pieces = self._pieces[self._gathers : self._gathers + min(at_once, most - in_flight)]
        if self._gather is not None or in_flight >= most or not self.order.cancel.may_post(time.monotonic_ns()):
            return False
        self._filling = self._acquire(len(pieces))
        if not self._filling:
            return False
        self._since_ns = time.monotonic_ns()
        into = [buffer.span for buffer in self._filling]
        self._gather = self._copier.gather(self._rows, pieces[: len(into)], into)
        self._gathers += len(into)
        return True

    def _collect(self) -> None:
        """Moves the buffers of the running gather to `_gathered` if it is done.

        Raises:
            KvctlError: the gather failed.
        """
        if self._gather is None:
            return
        try:
            if not self._gather.done():
                return
        except KvctlError:
            self._gather = None  # a failed copy no longer uses the buffers
            raise
        self.gather_ns += time.monotonic_ns() - self._since_ns
        self._gathered += self._filling
        self._filling, self._gather = [], None

    def _post_gathered(self) -> None:
        """Posts the gathered pieces that may be posted: under the lease, and the last one after all others."""
        while self._gathered and self.order.cancel.may_post(time.monotonic_ns()):
            if self._next == 0 and len(self._gathered) < len(self._pieces):
                self._shared = self.connection.transport.share_tag(self.order.tag, len(self._pieces))
            if self._shared is not None:
                self._post(len(self._gathered), self._shared)
                return
            count, left = len(self._gathered), len(self._pieces) - self._next
            last = count == left
            if last and count < len(self._pieces):
                if count == 1 and self._writes:
                    return
                count, last = max(1, count - 1), count == 1
            self._post(count, self.order.tag if last else None)

    def _post(self, count: int, tag: bytes | SharedTag | None) -> None:
        """Posts the first `count` gathered pieces as one write."""
        buffers = self._gathered[:count]
        local, remote, sizes = self._descriptors(buffers)
        since = time.monotonic_ns()
        write = self.connection.transport.write(self.connection.peer, local, remote, sizes, tag)
        self.count(write, since)
        self._writes.append((write, buffers))
        del self._gathered[:count]
        self._next += count

    def _reap(self) -> None:
        """Releases the buffers of complete writes."""
        for each in self._writes[:]:
            write, buffers = each
            if write.poll():
                self._writes.remove(each)
                self._release(buffers)

    def _drop(self) -> None:
        """Releases all buffers that have not been posted, except those of a gather that is still running."""
        if self._gather is not None:
            with contextlib.suppress(KvctlError):  # the part has already failed or been cancelled
                self._collect()
        if self._gather is None:
            self._gathered += self._filling  # buffers of a gather that failed
            self._filling = []
        self._release(self._gathered)
        self._gathered = []


class _Batch:
    """Pieces that are gathered and posted together.

    Attributes:
        buffers: Their buffers.
        write: Their write.
        copy: Their gather, which posts each; None when it has ended or been dropped.
        began_ns: Time at which it began.
    """

    __slots__ = ("began_ns", "buffers", "copy", "write")

    def __init__(self, buffers: list[Buffer], write: DeferredWrite, copy: HostCopy) -> None:
        self.buffers = buffers
        self.write = write
        self.copy: HostCopy | None = copy
        self.began_ns = time.monotonic_ns()


class ChainedFlight(PieceFlight):
    """A transfer each of whose pieces is gathered and posted by one thread, one after the other, without the GIL.

    The control loop begins a batch of pieces and hears of its end. On a host of many cores no thread waits for another
    between the two, and the piece is read from the cache into which it was gathered; beside an engine's thread that
    runs Python, a part takes the GIL a few times instead of a few times for each piece.
    """

    def __init__(
        self,
        connection: PeerConnection,
        order: Transfer,
        buffers: StagingBuffers,
        copier: HostCopier,
        share: TransferSlice,
        grant: Grant,
    ) -> None:
        super().__init__(connection, order, buffers, copier.piece_bytes, share, grant)
        self._copier = copier
        self._batches: list[_Batch] = []

    def advance(self) -> bool:
        if self.order.cancel.cancelled:
            return self.give_up()
        self._reap()
        while self._begin():
            self._reap()  # which copies, if the copy pool has no threads
        return self._next == len(self._pieces) and not self._batches

    def give_up(self) -> bool:
        for batch in self._batches[:]:
            batch.write.stop()  # first, so that a thread that still copies a piece does not post it
            batch.copy = None
            if batch.write.release():
                self._batches.remove(batch)
                self._release(batch.buffers)
        return not self._batches

    def _begin(self) -> bool:
        """Begins the next pieces; returns False if there are none or too many in flight, or they must wait."""
        left, in_flight = len(self._pieces) - self._next, sum(len(batch.buffers) for batch in self._batches)
        at_once = max(self._copier.pieces_at_once, _LEAST_CHAINED)
        count = min(at_once, max(_IN_FLIGHT, 2 * at_once) - in_flight, left)
        if count <= 0 or not self.order.cancel.may_post(time.monotonic_ns()):
            return False
        tag: bytes | SharedTag | None = self.order.tag
        if len(self._pieces) > 1:
            tag = self._shared = self._shared or self._share_tag()
            if tag is None and left == 1:  # the last piece, after all others
                if self._batches:
                    return False
                tag = self.order.tag
            elif tag is None:
                count = min(count, left - 1)
        buffers = self._acquire(count)
        if not buffers:
            return False
        descriptors = self._descriptors(buffers)
        until_ns = self.order.cancel.lease.expires_ns
        try:
            write = self.connection.transport.defer_write(self.connection.peer, *descriptors, tag, until_ns)
            pieces = self._pieces[self._next : self._next + len(buffers)]
            copy = self._copier.gather(self._rows, pieces, [buffer.span for buffer in buffers], write)
        except KvctlError:
            self._release(buffers)
            raise
        self._batches.append(_Batch(buffers, write, copy))
        self._next += len(buffers)
        self.posts += len(buffers)
        self.descriptors += len(buffers)
        return True

    def _share_tag(self) -> SharedTag | None:
        return self.connection.transport.share_tag(self.order.tag, len(self._pieces)) if self._next == 0 else None

    def _reap(self) -> None:
        """Releases the buffers of complete writes, and lets those go on whose lease had expired meanwhile."""
        for batch in self._batches[:]:
            if batch.copy is not None:
                if not batch.copy.done():
                    continue
                self._count_times(batch, batch.copy)
                batch.copy = None
            if batch.write.skipped and self.order.cancel.may_post(time.monotonic_ns()):
                batch.write.resume(self.order.cancel.lease.expires_ns)
            if batch.write.poll():
                self._batches.remove(batch)
                self._release(batch.buffers)

    def _count_times(self, batch: _Batch, copy: HostCopy) -> None:
        """Divides the duration of a batch between gather and post, as its threads have spent their time."""
        took_ns = time.monotonic_ns() - batch.began_ns
        copy_ns, post_ns = copy.copy_ns, batch.write.post_ns
        gather_ns = took_ns * copy_ns // max(1, copy_ns + post_ns)
        self.gather_ns += gather_ns
        self.post_ns += took_ns - gather_ns


class StagedPath:
    """Path staged, with the rank's staging buffers and copier."""

    def __init__(self, buffers: StagingBuffers, copier: Copier) -> None:
        self._buffers = buffers
        self._copier = copier

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        if order.share is None or order.grant is None:
            raise MemoryLayoutError(f"{order.key} has no staging grant")
        copier = self._copier
        if isinstance(copier, HostCopier) and connection.transport.defers(connection.peer):
            return ChainedFlight(connection, order, self._buffers, copier, order.share, order.grant)
        return StagedFlight(connection, order, self._buffers, copier, order.share, order.grant)
