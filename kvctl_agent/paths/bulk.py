"""Path bulk: writes whole pages directly into the reader's pages, with one descriptor per page run.

It requires the same heads on both sides. State items are treated as pages. The aux row, one small write, is sent the
same way.
"""

from __future__ import annotations

import time

import numpy as np

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.page_runs import page_run_arrays
from kvctl_agent.paths.base import Flight, PeerConnection, WriteFlight
from kvctl_agent.paths.segment_pair import Numbers
from kvctl_agent.protocol.events import Transfer


class BulkPath:
    """One write with one descriptor per page run, layer and plane."""

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        share = order.share
        if share is None or not share.whole_rows:
            raise MemoryLayoutError(f"path bulk needs the same heads on both sides, but {order.key} has {share}")
        began_ns = time.monotonic_ns()
        runs = page_run_arrays(order.src_pages, order.dst_pages)
        segment = connection.segments[share.segment]
        ours, theirs = segment.bases(order.key.lo, order.key.hi)  # arrays below are [layers, planes, runs]
        page_bytes = segment.page_bytes[:, None]
        here = ours[:, :, None] + runs.src_first * page_bytes
        there = theirs[:, :, None] + runs.dst_first * page_bytes
        sizes = np.broadcast_to(runs.counts * page_bytes, here.shape)
        return _post(connection, order, began_ns, here, there, sizes)


class AuxPath:
    """Sends the aux row of a room in one write."""

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        began_ns = time.monotonic_ns()
        ours, theirs = connection.ours, connection.theirs
        (row,), (slot,) = order.src_pages.tolist(), order.dst_pages.tolist()
        if not 0 <= row < ours.aux_slots or ours.aux_row_bytes != theirs.aux_row_bytes:
            raise MemoryLayoutError(
                f"aux row {row} of {ours.aux_row_bytes} bytes cannot go to a row of {theirs.aux_row_bytes} bytes: "
                "pass an aux row to finish(), and use rows of one size on both sides"
            )
        here, there = np.array([ours.aux_addr(row)], np.int64), np.array([theirs.aux_addr(slot)], np.int64)
        return _post(connection, order, began_ns, here, there, np.array([ours.aux_row_bytes], np.int64))


def _post(
    connection: PeerConnection, order: Transfer, began_ns: int, here: Numbers, there: Numbers, sizes: Numbers
) -> Flight:
    ours, theirs, nbytes = (numbers.reshape(-1).astype(np.uint64) for numbers in (here, there, sizes))
    return WriteFlight(
        connection,
        order,
        began_ns,
        lambda: connection.transport.write(connection.peer, ours, theirs, nbytes, order.tag),
    )
