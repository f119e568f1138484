"""Path bulk: writes whole pages directly into the reader's pages, with one descriptor per page run.

The path requires the same heads on both sides, and pages that are one run of bytes in the same order. Items of state
are treated as pages. The aux row is sent in its tag or in one small write.
"""

from __future__ import annotations

import time

import numpy as np

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.addresses import PoolAddresses
from kvctl_agent.paths.base import Flight, WriteFlight
from kvctl_agent.paths.contiguous_runs import whole_pages
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.paths.slice import SlicePath
from kvctl_agent.protocol.events import Transfer
from kvctl_agent.protocol.tag import MAX_ROW_BYTES, TAG_BYTES, with_row
from kvctl_agent.transport.base import Addresses


class BulkPath(SlicePath):
    """Path bulk: path slice for pages that are one run each."""

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        share = order.share
        if share is None or not share.whole_rows:
            raise MemoryLayoutError(f"path bulk needs the same heads on both sides, but {order.key} has {share}")
        runs = connection.segments[share.segment].joined.runs(share.heads)
        if not whole_pages(runs):
            raise MemoryLayoutError(f"path bulk needs contiguous pages in the same order, but {order.key} has {runs}")
        return super().start(connection, order)


class AuxPath:
    """Sends an aux row that does not go with a KV part: a small row in its tag, another one in one write.

    A tag costs a sixth of a write: a write is a request of the engine that is made, posted, polled and freed, and its
    end waits for the decode rank's acknowledgement. A row with a checksum is written, because the checksum is computed
    from the memory of both sides.
    """

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        began_ns = time.monotonic_ns()
        local, remote = connection.local, connection.remote
        (row,), (slot,) = order.src_pages.tolist(), order.dst_pages.tolist()
        fits = 0 <= row < local.aux_slots and 0 <= slot < remote.aux_slots
        if not fits or local.aux_row_bytes != remote.aux_row_bytes:
            raise MemoryLayoutError(
                f"aux row {row} of {local.aux_row_bytes} bytes cannot go to row {slot} of {remote.aux_row_bytes} "
                "bytes: pass an aux row to finish(), and use rows of one size on both sides"
            )
        if sum(local.aux_row_bytes) <= MAX_ROW_BYTES and len(order.tag) == TAG_BYTES:
            return _ToldFlight(connection, order, began_ns, connection.pool.aux_row(row))
        arrays = _addresses(local, row), _addresses(remote, slot), np.array(local.aux_row_bytes, np.uint64)
        transport, peer, tag = connection.transport, connection.peer, order.tag
        return WriteFlight(connection, order, began_ns, lambda: transport.write(peer, *arrays, tag))


class _ToldFlight(Flight):
    """The transfer of an aux row in its tag; complete once the tag is sent."""

    def __init__(self, connection: PeerConnection, order: Transfer, began_ns: int, row: bytes) -> None:
        super().__init__(connection, order, began_ns)
        self.row = row
        connection.transport.tell(connection.peer, with_row(order.tag, row))
        self.post_ns = time.monotonic_ns() - began_ns

    def advance(self) -> bool:
        return True

    def give_up(self) -> bool:
        return True


def _addresses(pool: PoolAddresses, row: int) -> Addresses:
    """Returns the address of an aux row in each aux buffer."""
    pairs = zip(pool.aux_bases, pool.aux_row_bytes, strict=True)
    return np.array([base + row * nbytes for base, nbytes in pairs], np.uint64)
