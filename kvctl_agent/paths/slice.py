"""Path slice: one descriptor per row (the heads of a token), layer and plane, for any two layouts.

A room of 1,024 tokens and 32 layers takes 65,536 descriptors per writer, which path staged avoids. Descriptor lists of
both pools are prepared once per peer, segment and head slice; a part is then sent as two index arrays into them. The
arrays are sorted by source row, so that the engine merges rows that are adjacent on both sides.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.addresses import SegmentAddresses
from kvctl_agent.paths.base import Flight, WriteFlight
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.protocol.events import Pages, Transfer
from kvctl_agent.transport.base import Addresses, Prepared, Sizes

_MAX_ROWS = (1 << 31) - 1  # a prepared list is indexed by int32


class SlicePath:
    """Path slice. Caches descriptor lists of the local pool; lists of peers' pools are kept in their connections."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[int, int, int], Prepared] = {}

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        share = order.share
        if share is None:
            raise MemoryLayoutError(f"{order.key} has no heads to send on path slice")
        began_ns = time.monotonic_ns()
        segment = connection.segments[share.segment]
        segment.check_layers(order.key.lo, order.key.hi)
        local, remote = segment.local, segment.remote
        key = share.segment, share.src_head, share.heads
        local_rows = self._prepared.get(key)
        if local_rows is None:
            local_rows = self._prepared[key] = connection.transport.prepare_local(
                *_rows(local, share.src_head, share.heads)
            )
        key = share.segment, share.dst_head, share.heads
        remote_rows = connection.prepared.get(key)
        if remote_rows is None:
            remote_rows = connection.transport.prepare_remote(
                connection.peer, *_rows(remote, share.dst_head, share.heads)
            )
            connection.prepared[key] = remote_rows
        sort = np.argsort(order.src_pages, kind="stable")
        src = _numbers(local, order.src_pages[sort], order.key.lo, order.key.hi)
        dst = _numbers(remote, order.dst_pages[sort], order.key.lo, order.key.hi)
        prepared = local_rows, src, remote_rows, dst
        return WriteFlight(
            connection,
            order,
            began_ns,
            lambda: connection.transport.write_prepared(connection.peer, *prepared, order.tag),
        )


def _rows(addresses: SegmentAddresses, head: int, heads: int) -> tuple[Addresses, Sizes]:
    """Returns addresses and sizes of `heads` heads from `head` in all rows of a segment.

    The order is layer, plane, page, row.

    Raises:
        MemoryLayoutError: the rows cannot be numbered by int32.
    """
    count = (
        addresses.shard.num_layers * addresses.num_slots * sum(plane.rows for plane in addresses.shard.segment.planes)
    )
    if count > _MAX_ROWS:
        raise MemoryLayoutError(
            f"{addresses.shard.segment.name}: {count} rows cannot be numbered by 32 bits; use path staged for this pool"
        )
    pages = np.arange(addresses.num_slots, dtype=np.int64)
    addrs: list[npt.NDArray[np.int64]] = []
    sizes: list[npt.NDArray[np.uint64]] = []
    for layer in range(addresses.shard.layer_lo, addresses.shard.layer_hi):
        for number, plane in enumerate(addresses.shard.segment.planes):
            rows = addresses.row_addrs(layer, number, pages, head)
            addrs.append(rows)
            sizes.append(np.full(len(rows), heads * plane.head_bytes, np.uint64))
    return np.concatenate(addrs).astype(np.uint64), np.concatenate(sizes)


def _numbers(addresses: SegmentAddresses, pages: Pages, lo: int, hi: int) -> npt.NDArray[np.int32]:
    """Returns the indices in the arrays of `_rows` of all rows of `pages` in layers [lo, hi).

    They fit into int32, which `_rows` has checked.
    """
    inside: list[npt.NDArray[np.int32]] = []  # row indices of one layer
    before = 0
    for plane in addresses.shard.segment.planes:
        rows = np.arange(before, before + plane.rows, dtype=np.int32)
        inside.append((pages[:, None] * np.int32(plane.rows) + rows).reshape(-1))
        before += addresses.num_slots * plane.rows
    layers = np.arange(lo - addresses.shard.layer_lo, hi - addresses.shard.layer_lo, dtype=np.int32)[:, None]
    return (layers * np.int32(before) + np.concatenate(inside)).reshape(-1)
