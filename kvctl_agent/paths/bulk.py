"""Path bulk: writes whole pages directly into the reader's pages, with one descriptor per page run.

The path requires the same heads on both sides, and pages that are one run of bytes in the same order. Items of state
are treated as pages. The aux row is sent in its tag or in one small write.
"""

from __future__ import annotations

import time

import numpy as np

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.addresses import PoolAddresses
from kvctl_agent.memory.page_runs import RunDescriptors, run_descriptors
from kvctl_agent.paths.base import Flight, WriteFlight
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.protocol.events import Transfer
from kvctl_agent.protocol.tag import TAG_BYTES, with_row
from kvctl_agent.transport.base import Addresses, Prepared, Sizes

_MAX_AUX_ROWS = 1 << 20
MAX_ROW_IN_TAG = 2048
"""Size of the largest aux row that is sent in its tag."""


class BulkPath:
    """Path bulk: sends a part in one write with one descriptor per page run, layer and plane."""

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        share = order.share
        if share is None or not share.whole_rows:
            raise MemoryLayoutError(f"path bulk needs the same heads on both sides, but {order.key} has {share}")
        began_ns = time.monotonic_ns()
        segment = connection.segments[share.segment].joined
        runs = segment.runs(share.heads)
        local_bases, remote_bases = segment.bases(order.key.lo, order.key.hi)
        each: list[RunDescriptors] = []
        for alike in segment.alike:
            plane = runs[alike.first]
            if plane.per_page != 1:
                raise MemoryLayoutError(
                    f"path bulk needs contiguous pages in the same order, but {order.key} has {runs}"
                )
            bases = local_bases[:, alike.planes].reshape(-1), remote_bases[:, alike.planes].reshape(-1)
            pages = order.src_pages, order.dst_pages, alike.local, alike.remote
            each.append(run_descriptors(*pages, plane.page_bytes, *bases))
        local, remote, nbytes = each[0] if len(each) == 1 else map(np.concatenate, zip(*each, strict=True))
        return WriteFlight(
            connection,
            order,
            began_ns,
            lambda: connection.transport.write(connection.peer, local, remote, nbytes, order.tag),
        )


class AuxPath:
    """Sends the aux row of a room: a small row in its tag, another one in one write.

    A tag costs a sixth of a write: a write is a request of the engine that is made, posted, polled and freed, and its
    end waits for the decode rank's acknowledgement. A row with a checksum is written, because the checksum is computed
    from the memory of both sides.

    Rows to be written are named by their index in descriptor lists of all rows: with addresses, a post took 2.5 times
    the CPU time. Caches the list of the local rows; that of the peer's rows is kept in its connection.
    """

    def __init__(self) -> None:
        self._rows: Prepared | None = None

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        began_ns = time.monotonic_ns()
        local, remote = connection.local, connection.remote
        (row,) = order.src_pages.tolist()
        if not 0 <= row < local.aux_slots or local.aux_row_bytes != remote.aux_row_bytes:
            raise MemoryLayoutError(
                f"aux row {row} of {local.aux_row_bytes} bytes cannot go to a row of {remote.aux_row_bytes} bytes: "
                "pass an aux row to finish(), and use rows of one size on both sides"
            )
        if sum(local.aux_row_bytes) <= MAX_ROW_IN_TAG and len(order.tag) == TAG_BYTES:
            return _ToldFlight(connection, order, began_ns, connection.pool.aux_row(row))
        if self._rows is None:
            self._rows = connection.transport.prepare_local(*_aux_rows(local))
        if connection.aux_rows is None:
            connection.aux_rows = connection.transport.prepare_remote(connection.peer, *_aux_rows(remote))
        buffers = np.arange(len(local.aux_bases), dtype=np.int32)
        src, dst = buffers * local.aux_slots + order.src_pages, buffers * remote.aux_slots + order.dst_pages
        prepared = self._rows, src, connection.aux_rows, dst
        return WriteFlight(
            connection,
            order,
            began_ns,
            lambda: connection.transport.write_prepared(connection.peer, *prepared, order.tag),
        )


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


def _aux_rows(addresses: PoolAddresses) -> tuple[Addresses, Sizes]:
    """Returns addresses and sizes of the rows of all aux buffers, one buffer after the other.

    Raises:
        MemoryLayoutError: there are more rows than requests that a rank can have; a peer states their number.
    """
    count = addresses.aux_slots * len(addresses.aux_bases)
    if count > _MAX_AUX_ROWS:
        raise MemoryLayoutError(f"{count} aux rows are too many to list; a pool may have {_MAX_AUX_ROWS}")
    bases, sizes = np.array(addresses.aux_bases, np.uint64), np.array(addresses.aux_row_bytes, np.uint64)
    rows = bases[:, None] + sizes[:, None] * np.arange(addresses.aux_slots, dtype=np.uint64)
    return rows.reshape(-1).astype(np.uint64), np.repeat(sizes, addresses.aux_slots)
