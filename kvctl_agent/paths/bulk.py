"""`bulk`: whole pages of all heads straight into the reader's pages, neighbours merged into one descriptor.

Needs the same heads on both sides. Items of state are pages here. The aux row, one small write, travels the same way.
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
            raise MemoryLayoutError(f"bulk needs the same heads on both sides, {order.key} has {share}")
        began_ns = time.monotonic_ns()
        runs = page_run_arrays(order.src_pages, order.dst_pages)
        segment = connection.segments[share.segment]
        ours, theirs = segment.bases(order.key.lo, order.key.hi)  # all of [layers, planes, runs] from here on
        page_bytes = segment.page_bytes[:, None]
        here = ours[:, :, None] + runs.src_first * page_bytes
        there = theirs[:, :, None] + runs.dst_first * page_bytes
        sizes = np.broadcast_to(runs.counts * page_bytes, here.shape)
        return _post(connection, order, began_ns, here, there, sizes)


class AuxPath:
    """The aux row of a room."""

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        began_ns = time.monotonic_ns()
        ours, theirs = connection.ours, connection.theirs
        (row,), (slot,) = order.src_pages.tolist(), order.dst_pages.tolist()
        if not 0 <= row < ours.aux_slots or ours.aux_row_bytes != theirs.aux_row_bytes:
            raise MemoryLayoutError(
                f"aux row {row} of {ours.aux_row_bytes} bytes cannot go to a row of {theirs.aux_row_bytes} bytes: "
                "give finish() an aux row, and both sides rows of one size"
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
