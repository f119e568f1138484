"""`bulk`: whole pages of all heads straight into the reader's pages, neighbours merged into one descriptor.

Needs the same heads on both sides. The aux row, one small write, travels the same way.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.runs import page_run_arrays
from kvctl_agent.memory.addresses import K, V
from kvctl_agent.paths.base import Flight, Lane, WriteFlight
from kvctl_agent.protocol.events import Transfer

_Numbers = npt.NDArray[np.int64]


class BulkPath:
    """One write with one descriptor per page run, layer, and K or V."""

    def start(self, lane: Lane, order: Transfer) -> Flight:
        share = order.share
        if share is None or not share.whole_rows:
            raise MemoryLayoutError(f"bulk needs the same heads on both sides, {order.key} has {share}")
        ours, theirs = lane.pool.addresses(), lane.theirs
        runs = page_run_arrays(order.src_pages, order.dst_pages)
        here: list[_Numbers] = []
        there: list[_Numbers] = []
        sizes: list[_Numbers] = []
        for layer in range(order.key.lo, order.key.hi):
            for kv in (K, V):
                page_bytes = theirs.page_bytes(kv)
                here.append(ours.base(layer, kv) + runs.src_first * page_bytes)
                there.append(theirs.base(layer, kv) + runs.dst_first * page_bytes)
                sizes.append(runs.counts * page_bytes)
        return _post(lane, order, np.concatenate(here), np.concatenate(there), np.concatenate(sizes))


class AuxPath:
    """The aux row of a room."""

    def start(self, lane: Lane, order: Transfer) -> Flight:
        ours, theirs = lane.pool.addresses(), lane.theirs
        if not 0 <= order.src_aux < ours.aux_slots or ours.aux_row_bytes != theirs.aux_row_bytes:
            raise MemoryLayoutError(
                f"aux row {order.src_aux} of {ours.aux_row_bytes} bytes cannot go to a row of "
                f"{theirs.aux_row_bytes} bytes: give finish() an aux row, and both sides rows of one size"
            )
        here = np.array([ours.aux_addr(order.src_aux)], np.int64)
        there = np.array([theirs.aux_addr(order.dst_aux)], np.int64)
        return _post(lane, order, here, there, np.array([ours.aux_row_bytes], np.int64))


def _post(lane: Lane, order: Transfer, here: _Numbers, there: _Numbers, sizes: _Numbers) -> Flight:
    addresses = here.astype(np.uint64), there.astype(np.uint64), sizes.astype(np.uint64)
    return WriteFlight(lane, order, lambda: lane.transport.write(lane.peer, *addresses, order.tag))
