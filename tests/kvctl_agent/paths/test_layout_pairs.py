"""Random pairs of pool layouts: every copier, path and engine moves exactly the planned bytes between them.

The oracle is numpy indexing of the engines' arrays. All memory of the destination is compared, so a byte written
outside the part is found.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import segments
from kvctl_agent.memory.allocations import StagingBuffers
from kvctl_agent.memory.checksum import part_checksum
from kvctl_agent.memory.copier import Copier, LandedPart, PendingCopy
from kvctl_agent.memory.device_copier import DeviceCopier
from kvctl_agent.memory.host_copier import CopyPool, HostCopier
from kvctl_agent.memory.part_layout import PartLayout
from kvctl_agent.memory.region import MemorySpan, Region
from kvctl_agent.memory.segment import RowIndex
from kvctl_agent.paths.base import Path
from kvctl_agent.paths.bulk import BulkPath
from kvctl_agent.paths.path_chooser import PathChooser
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.paths.slice import SlicePath
from kvctl_agent.paths.staged import StagedPath
from kvctl_agent.protocol.events import Transfer
from kvctl_agent.protocol.messages import Grant
from kvctl_agent.protocol.peer import CancelToken, Lease
from kvctl_agent.protocol.tag import PartKey, PartKind
from kvctl_agent.transport.registry import open_transport
from tests.support.engine_layouts import ORDERS, EnginePool
from tests.support.host_device import HostDevice
from tests.support.numpy_copier import NumpyCopier

LAYERS = 2
RING_OFFSET = 4096


class Pair(NamedTuple):
    """Two pools, and a part to send from one to the other."""

    source: EnginePool
    target: EnginePool
    share: TransferSlice
    layers: tuple[int, int]
    src_pages: np.ndarray
    dst_pages: np.ndarray

    def expected(self) -> np.ndarray:
        """Writes the part to the target by index, returns all its memory, and restores it."""
        before = self.target.raw.copy()
        share = self.share
        for layer in range(*self.layers):
            for plane in (0, 1):
                source = self.source.part(layer, plane, share.src_split)[self.src_pages]
                values = source[:, :, share.src_head : share.src_head + share.heads]
                heads = slice(share.dst_head, share.dst_head + share.heads)
                self.target.store(layer, plane, share.dst_split, self.dst_pages, heads, values)
        wanted = self.target.raw.copy()
        self.target.raw[:] = before
        return wanted

    def staged(self) -> bytes:
        """Returns the part in staging order."""
        heads = slice(self.share.src_head, self.share.src_head + self.share.heads)
        return b"".join(
            self.source.part(layer, plane, self.share.src_split)[self.src_pages][:, :, heads].tobytes()
            for layer in range(*self.layers)
            for plane in (0, 1)
        )


def random_pair(random: np.random.Generator) -> Pair:
    tokens, heads = int(random.choice([1, 2, 4])), int(random.integers(1, 4))
    k_dim = int(random.choice([1, 4, 8]))
    v_dim = k_dim if random.integers(2) else int(random.choice([2, 4]))
    pools, splits, first_heads = [], [], []
    for _ in range(2):
        split, local = int(random.choice([1, 1, 2, 4])), heads + int(random.integers(0, 2) * random.integers(0, 3))
        pages = int(random.integers(3, 6))
        sizes = {"l": LAYERS, "p": pages, "t": split * tokens, "h": local, "k": k_dim, "v": v_dim}
        pools.append(EnginePool(random, ORDERS[random.integers(len(ORDERS))], sizes, local))
        splits.append(split)
        first_heads.append(int(random.integers(0, local - heads + 1)))
    counts = [pool.pool.num_pages * split for pool, split in zip(pools, splits, strict=True)]
    count = int(random.integers(1, min(counts) + 1))
    src_pages, dst_pages = (
        (np.arange(count) if random.integers(2) else random.permutation(total)[:count]).astype(np.int32)
        for total in counts
    )
    lo = int(random.integers(LAYERS))
    (segment,) = segments(pools[0].pool.shape(), tokens)
    share = TransferSlice(
        writer=0,
        reader=0,
        segment=0,
        src_head=first_heads[0],
        dst_head=first_heads[1],
        heads=heads,
        layer_lo=0,
        layer_hi=LAYERS,
        src_pool_heads=pools[0].pool.segments[0].shard.heads,
        dst_pool_heads=pools[1].pool.segments[0].shard.heads,
        page_head_bytes=segment.page_head_bytes,
        src_split=splits[0],
        dst_split=splits[1],
    )
    return Pair(pools[0], pools[1], share, (lo, int(random.integers(lo + 1, LAYERS + 1))), src_pages, dst_pages)


def finish(copy: PendingCopy) -> None:
    deadline = time.monotonic() + 60
    while not copy.done():
        assert time.monotonic() < deadline


def gathered(copier: Copier, pair: Pair) -> np.ndarray:
    share = pair.share
    memory = pair.source.pool.segments_at(share.src_split)[0]
    part = memory.part_layout(*pair.layers, len(pair.src_pages), share.heads)
    region = np.zeros(part.region_bytes, np.uint8)
    pieces = part.pieces(64)
    into = [MemorySpan(region.ctypes.data + each.offset, each.nbytes, region[each.offset :]) for each in pieces]
    finish(copier.gather(RowIndex(memory, pair.src_pages, share.src_head, share.heads), pieces, into))
    return region[: part.nbytes]


def landed_part(pair: Pair, region: MemorySpan) -> LandedPart:
    share = pair.share
    memory = pair.target.pool.segments_at(share.dst_split)[0]
    part = memory.part_layout(*pair.layers, len(pair.dst_pages), share.heads)
    return LandedPart(RowIndex(memory, pair.dst_pages, share.dst_head, share.heads), part, region)


@pytest.fixture
def copiers() -> Iterator[list[Copier]]:
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    pool = CopyPool(0, fd)
    yield [NumpyCopier(), DeviceCopier(HostDevice().copies()), HostCopier(pool)]
    pool.close()
    os.close(fd)


class Copies:
    """Replaces a transport: copies every descriptor at once, and checks that it lies in the two pools."""

    def __init__(self, pair: Pair) -> None:
        self.descriptors = 0
        self._pair = pair

    def write(self, peer: str, local: Any, remote: Any, sizes: Any, tag: bytes) -> Copies:
        self.descriptors = len(sizes)
        assert int(sizes.sum()) == len(self._pair.staged()), "every byte once"
        for array, addrs in ((self._pair.source.raw, local), (self._pair.target.raw, remote)):
            first = array.ctypes.data
            assert first <= addrs.min()
            assert (addrs + sizes).max() <= first + array.nbytes
        for source, target, nbytes in zip(local.tolist(), remote.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, nbytes)
        return self

    def poll(self) -> bool:
        return True


def connect(transport: Any, pair: Pair, ring_base: int = 0) -> PeerConnection:
    """Returns a connection to the target, whose addresses have travelled in Hello."""
    wire, target, split = pair.target.pool.addresses().to_wire(), pair.target.pool, pair.share.dst_split
    addresses = type(target.addresses()).from_wire(wire, tuple(memory.shard for memory in target.segments))
    remote = addresses.at(tuple(memory.shard for memory in target.segments_at(split)), split)
    return PeerConnection("reader", transport, pair.source.pool, remote, ring_base, split=pair.share.src_split)


def order_of(pair: Pair, grant: Grant | None = None, tag: bytes = b"tag") -> Transfer:
    return Transfer(
        peer="reader",
        room=1,
        nonce=1,
        kind=PartKind.KV,
        key=PartKey(0, 0, *pair.layers),
        path="?",
        share=pair.share,
        src_pages=pair.src_pages,
        dst_pages=pair.dst_pages,
        grant=grant,
        tag=tag,
        cancel=CancelToken(Lease(1 << 62)),
        ready_ns=time.monotonic_ns(),
        opened_ns=time.monotonic_ns(),
    )


def fastest_path(pair: Pair, connection: PeerConnection) -> Path:
    """Returns path bulk if the chooser offers it, else path slice."""
    chooser = PathChooser(pair.source.pool.shape(), pair.source.pool.page_size, "bulk", "off")
    path = chooser.without_ring(pair.share, runs=connection.segments[0].runs(pair.share.heads))
    return BulkPath() if path == "bulk" else SlicePath()


@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_pairs_by_every_copier_and_path(copiers: list[Copier], seed: int) -> None:
    random = np.random.default_rng(seed)
    bulk = 0
    for number in range(1000):
        pair = random_pair(random)
        wanted, staged = pair.expected(), np.frombuffer(pair.staged(), np.uint8)
        copier = copiers[number % len(copiers)]
        before = pair.target.raw.copy()
        assert np.array_equal(gathered(copier, pair), staged), pair
        finish(copier.scatter([landed_part(pair, MemorySpan(staged.ctypes.data, staged.nbytes, staged))]))
        assert np.array_equal(pair.target.raw, wanted), pair
        pair.target.raw[:] = before
        transport = Copies(pair)
        connection = connect(transport, pair)
        path = fastest_path(pair, connection)
        bulk += isinstance(path, BulkPath)
        assert path.start(connection, order_of(pair)).advance()
        assert np.array_equal(pair.target.raw, wanted), (path, pair)
    assert 20 < bulk < 500, "the pairs include many for each path"


@pytest.mark.parametrize("seed", range(3))
def test_checksums_of_both_sides_agree(seed: int) -> None:
    random = np.random.default_rng([1, seed])
    for _ in range(50):
        pair = random_pair(random)
        pair.target.raw[:] = pair.expected()
        share = pair.share
        sums = [
            part_checksum(engine.pool, share, pages, head, *pair.layers, split=split)
            for engine, pages, head, split in (
                (pair.source, pair.src_pages, share.src_head, share.src_split),
                (pair.target, pair.dst_pages, share.dst_head, share.dst_split),
            )
        ]
        assert sums[0] == sums[1], pair


@pytest.mark.usefixtures("mooncake_started")
@pytest.mark.parametrize("engine", ["loopback", "nixl", "mooncake"])
def test_engines_move_two_hundred_pairs(engine: str, copiers: list[Copier]) -> None:
    random = np.random.default_rng(5)
    pairs = [random_pair(random) for _ in range(200)]
    buffers, ring = StagingBuffers(8, 4096), np.zeros(1 << 20, np.uint8)
    here, there = open_transport(engine, "writer"), open_transport(engine, "reader")
    here.register([Region(*region) for pair in pairs for region in pair.source.pool.regions()] + [buffers.region()])
    there.register(
        [Region(*region) for pair in pairs for region in pair.target.pool.regions()]
        + [Region(ring.ctypes.data, ring.nbytes)]
    )
    here.connect("reader", there.metadata())
    staged = StagedPath(buffers, copiers[-1])
    try:
        for number, pair in enumerate(pairs):
            wanted = pair.expected()
            connection = connect(here, pair, ring.ctypes.data)
            by_address = fastest_path(pair, connection)
            for path in (by_address, staged):
                before = pair.target.raw.copy()
                layout: PartLayout = landed_part(pair, MemorySpan(0, 0, None)).layout
                grant = Grant(0, *pair.layers, 1, RING_OFFSET, RING_OFFSET + layout.region_bytes, 0)
                tag = b"%d %s" % (number, type(path).__name__.encode())
                flight = path.start(connection, order_of(pair, grant, tag))
                arrived: list[bytes] = []
                deadline = time.monotonic() + 60
                while not (flight.advance() and tag in arrived):
                    there.progress()
                    arrived += [arrival.tag for arrival in there.arrivals()]
                    assert time.monotonic() < deadline, (number, path)
                if path is staged:
                    array = ring[RING_OFFSET : RING_OFFSET + layout.region_bytes]
                    finish(copiers[-1].scatter([landed_part(pair, MemorySpan(0, array.nbytes, array))]))
                assert np.array_equal(pair.target.raw, wanted), (path, pair)
                pair.target.raw[:] = before
    finally:
        here.close()
        there.close()
        buffers.close()
