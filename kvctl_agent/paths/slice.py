"""Path slice: one descriptor per run of bytes that is contiguous on both sides, for any two layouts.

A run is the heads of a token (NHD on both sides), a page of some heads (HND on both sides), or one head of one token. A
room of 1,024 tokens and 32 layers takes 65,536 descriptors per writer for the heads of tokens, which path staged
avoids. Descriptor lists of both pools are prepared once per peer, segment and head slice; a part is then sent as two
index arrays into them. Single heads of tokens are sent by address: lists of a pool would have tens of millions. Runs
are sorted by source page, so that the engine merges those that are adjacent on both sides.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.addresses import SegmentAddresses
from kvctl_agent.paths.base import Flight, WriteFlight
from kvctl_agent.paths.contiguous_runs import PlaneRuns
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.protocol.events import Pages, Transfer
from kvctl_agent.transport.base import Addresses, Prepared, Sizes

_MAX_RUNS = (1 << 31) - 1  # a prepared list is indexed by int32


class SlicePath:
    """Path slice. Caches descriptor lists of the local pool; lists of peers' pools are kept in their connections."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[object, ...], Prepared] = {}

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        share = order.share
        if share is None:
            raise MemoryLayoutError(f"{order.key} has no heads to send on path slice")
        began_ns = time.monotonic_ns()
        segment = connection.segments[share.segment].joined
        segment.check_layers(order.key.lo, order.key.hi)
        local, remote, runs = segment.local, segment.remote, segment.runs(share.heads)
        transport, peer, lo, hi = connection.transport, connection.peer, order.key.lo, order.key.hi
        sort = np.argsort(order.src_pages, kind="stable")
        src_pages, dst_pages = order.src_pages[sort], order.dst_pages[sort]
        if any(each.per_page > plane.rows for each, plane in zip(runs, local.shard.segment.planes, strict=True)):
            src, sizes = _runs(local, share.src_head, runs, src_pages, lo, hi)
            dst, _ = _runs(remote, share.dst_head, runs, dst_pages, lo, hi)
            return WriteFlight(connection, order, began_ns, lambda: transport.write(peer, src, dst, sizes, order.tag))
        local_key = share.segment, share.src_head, local.split, runs
        local_runs = self._prepared.get(local_key)
        if local_runs is None:
            local_runs = self._prepared[local_key] = transport.prepare_local(*_all_runs(local, share.src_head, runs))
        key = share.segment, share.dst_head, share.heads
        remote_runs = connection.prepared.get(key)
        if remote_runs is None:
            remote_runs = transport.prepare_remote(peer, *_all_runs(remote, share.dst_head, runs))
            connection.prepared[key] = remote_runs
        src_numbers = _numbers(local, runs, src_pages, lo, hi)
        dst_numbers = _numbers(remote, runs, dst_pages, lo, hi)
        prepared = local_runs, src_numbers, remote_runs, dst_numbers
        return WriteFlight(connection, order, began_ns, lambda: transport.write_prepared(peer, *prepared, order.tag))


def _all_runs(addresses: SegmentAddresses, head: int, runs: tuple[PlaneRuns, ...]) -> tuple[Addresses, Sizes]:
    """Returns addresses and sizes of the runs of all pages and layers of a segment, as `_runs`.

    Raises:
        MemoryLayoutError: the runs cannot be numbered by int32.
    """
    shard = addresses.shard
    count = shard.num_layers * addresses.num_slots * sum(plane.per_page for plane in runs)
    if count > _MAX_RUNS:
        raise MemoryLayoutError(
            f"{shard.segment.name}: {count} rows cannot be numbered by 32 bits; use path staged for this pool"
        )
    pages = np.arange(addresses.num_slots, dtype=np.int32)
    return _runs(addresses, head, runs, pages, shard.layer_lo, shard.layer_hi)


def _runs(
    addresses: SegmentAddresses, head: int, runs: tuple[PlaneRuns, ...], pages: Pages, lo: int, hi: int
) -> tuple[Addresses, Sizes]:
    """Returns addresses and sizes of the runs of `pages` in layers [lo, hi), of which `head` is the first local head.

    The order is layer, plane, page, row, head.
    """
    offsets, sizes = [], []  # of each plane, in one layer
    for number, (plane, strides) in enumerate(zip(runs, addresses.strides, strict=True)):
        _, page_rows, head_bytes = addresses.shard.segment.planes[number]
        rows = np.arange(0, page_rows, plane.rows, dtype=np.int64) * strides.row
        heads = np.arange(plane.per_page // len(rows), dtype=np.int64) * (plane.heads * strides.head)
        inside = (rows[:, None] + heads + head * strides.head).reshape(-1)
        offsets.append((addresses.page_offsets(number, pages)[:, None] + inside).reshape(-1))
        sizes.append(np.full(len(offsets[-1]), plane.rows * plane.heads * head_bytes, np.uint64))
    layers = addresses.bases[lo - addresses.shard.layer_lo : hi - addresses.shard.layer_lo]
    addrs = [base + each for layer in layers for base, each in zip(layer, offsets, strict=True)]
    return np.concatenate(addrs).astype(np.uint64), np.concatenate(sizes * len(layers))


def _numbers(
    addresses: SegmentAddresses, runs: tuple[PlaneRuns, ...], pages: Pages, lo: int, hi: int
) -> npt.NDArray[np.int32]:
    """Returns the indices in the arrays of `_all_runs` of all runs of `pages` in layers [lo, hi).

    They fit into int32, which `_all_runs` has checked.
    """
    inside: list[npt.NDArray[np.int32]] = []  # indices in one layer
    before = 0
    for plane in runs:
        numbers = np.arange(before, before + plane.per_page, dtype=np.int32)
        inside.append((pages[:, None] * np.int32(plane.per_page) + numbers).reshape(-1))
        before += addresses.num_slots * plane.per_page
    layers = np.arange(lo - addresses.shard.layer_lo, hi - addresses.shard.layer_lo, dtype=np.int32)[:, None]
    return (layers * np.int32(before) + np.concatenate(inside)).reshape(-1)
