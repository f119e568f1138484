"""`bulk`: whole pages of all heads straight into the reader's pages, neighbours merged into one descriptor.

Needs the same heads on both sides. The aux row, one small write, travels the same way.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.runs import page_run_arrays
from kvctl_agent.paths.base import Flight, Lane, WriteFlight
from kvctl_agent.protocol.events import Transfer

_Numbers = npt.NDArray[np.int64]


class BulkPath:
    """One write with one descriptor per page run, layer, and K or V."""

    def start(self, lane: Lane, order: Transfer) -> Flight:
        share = order.share
        if share is None or not share.whole_rows:
            raise MemoryLayoutError(f"bulk needs the same heads on both sides, {order.key} has {share}")
        began_ns = time.monotonic_ns()
        runs = page_run_arrays(order.src_pages, order.dst_pages)
        part = slice(2 * order.key.lo, 2 * order.key.hi)
        ours, theirs, page_bytes = (plane[part, None] for plane in lane.planes)
        here = (ours + runs.src_first * page_bytes).reshape(-1)
        there = (theirs + runs.dst_first * page_bytes).reshape(-1)
        return _post(lane, order, began_ns, here, there, (runs.counts * page_bytes).reshape(-1))


class AuxPath:
    """The aux row of a room."""

    def start(self, lane: Lane, order: Transfer) -> Flight:
        began_ns = time.monotonic_ns()
        ours, theirs = lane.pool.addresses(), lane.theirs
        if not 0 <= order.src_aux < ours.aux_slots or ours.aux_row_bytes != theirs.aux_row_bytes:
            raise MemoryLayoutError(
                f"aux row {order.src_aux} of {ours.aux_row_bytes} bytes cannot go to a row of "
                f"{theirs.aux_row_bytes} bytes: give finish() an aux row, and both sides rows of one size"
            )
        here = np.array([ours.aux_addr(order.src_aux)], np.int64)
        there = np.array([theirs.aux_addr(order.dst_aux)], np.int64)
        return _post(lane, order, began_ns, here, there, np.array([ours.aux_row_bytes], np.int64))


def _post(lane: Lane, order: Transfer, began_ns: int, here: _Numbers, there: _Numbers, sizes: _Numbers) -> Flight:
    addresses = here.astype(np.uint64), there.astype(np.uint64), sizes.astype(np.uint64)
    return WriteFlight(lane, order, began_ns, lambda: lane.transport.write(lane.peer, *addresses, order.tag))
