"""`slice`: one descriptor per token row, layer, and K or V, for any two layouts.

This is the path that `staged` exists to avoid: a room of 1,024 tokens and 32 layers is 65,536 descriptors per writer.
Descriptor lists of both pools are prepared once per peer and head slice; a part is then two index arrays. They are
sorted by source, so that the engine merges rows that are neighbours on both sides.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.addresses import K, PoolAddresses, V
from kvctl_agent.paths.base import Flight, Lane, WriteFlight
from kvctl_agent.protocol.events import Pages, Transfer
from kvctl_agent.transport.base import Addresses, Prepared, Sizes


class SlicePath:
    """Keeps the prepared list of our own pool; those of peers live with their lanes."""

    def __init__(self) -> None:
        self._ours: dict[tuple[int, int], Prepared] = {}

    def start(self, lane: Lane, order: Transfer) -> Flight:
        share = order.share
        if share is None:
            raise MemoryLayoutError(f"{order.key} owes no heads")
        began_ns = time.monotonic_ns()
        ours, theirs = lane.pool.addresses(), lane.theirs
        here = self._ours.get((share.src_head, share.heads))
        if here is None:
            here = lane.transport.prepare_local(*_rows(ours, share.src_head, share.heads))
            self._ours[share.src_head, share.heads] = here
        there = lane.prepared.get((share.dst_head, share.heads))
        if there is None:
            there = lane.transport.prepare_remote(lane.peer, *_rows(theirs, share.dst_head, share.heads))
            lane.prepared[share.dst_head, share.heads] = there
        sort = np.argsort(order.src_pages, kind="stable")
        layers = range(order.key.lo, order.key.hi)
        src = _numbers(ours, order.src_pages[sort], layers)
        dst = _numbers(theirs, order.dst_pages[sort], layers)
        prepared = here, src, there, dst
        return WriteFlight(
            lane, order, began_ns, lambda: lane.transport.write_prepared(lane.peer, *prepared, order.tag)
        )


def _rows(pool: PoolAddresses, head: int, heads: int) -> tuple[Addresses, Sizes]:
    """Every token row of a pool, numbered layer, K before V, token."""
    pages = np.arange(pool.num_pages, dtype=np.int64)
    addrs: list[npt.NDArray[np.int64]] = []
    sizes: list[npt.NDArray[np.uint64]] = []
    for layer in range(len(pool.k_bases)):
        for kv in (K, V):
            rows = pool.token_addrs(layer, kv, pages, head)
            addrs.append(rows)
            sizes.append(np.full(len(rows), heads * pool.row_bytes(kv), np.uint64))
    return np.concatenate(addrs).astype(np.uint64), np.concatenate(sizes)


def _numbers(pool: PoolAddresses, pages: Pages, layers: range) -> npt.NDArray[np.int32]:
    """Numbers, in `_rows`, of all tokens of `pages` in `layers`."""
    tokens = pool.num_pages * pool.page_size
    rows = pages.astype(np.int64)[:, None] * pool.page_size + np.arange(pool.page_size)
    planes = np.arange(2 * layers.start, 2 * layers.stop, dtype=np.int64)[:, None] * tokens
    return (planes + rows.reshape(1, -1)).reshape(-1).astype(np.int32)
