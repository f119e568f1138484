"""Chained pieces of a staged part, over NIXL: bytes and tag, leases, cancelled rooms, bounded buffers, wrong pages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvctl_agent.errors import MemoryLayoutError, PeerDisconnected, TransportError
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import Plane, Segment
from kvctl_agent.memory.allocations import RingMemory, StagingBuffers
from kvctl_agent.memory.host_copier import CopyPool, HostCopier
from kvctl_agent.memory.part_layout import PartLayout
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.segment import RowIndex
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.paths.staged import ChainedFlight, StagedPath
from kvctl_agent.protocol.events import Transfer
from kvctl_agent.protocol.messages import Grant
from kvctl_agent.protocol.peer import CancelToken, Lease
from kvctl_agent.protocol.tag import PartKey, PartKind
from kvctl_agent.transport import Region
from kvctl_agent.transport.nixl.native_requests import UNLIMITED_NS
from tests.support.engines import PooledTransport, open_engine
from tests.support.numpy_copier import gather_piece

PAGES = np.random.default_rng(1).permutation(64)[:48].astype(np.int32)
SHARD = LocalShard(Segment(0, "kv", 0, 4, 4, (Plane("k", 16, 128), Plane("v", 16, 128))), 0, 4, 0, 4)
SHARE = TransferSlice(0, 0, 0, 1, 0, 2, 0, 4, 4, 2, SHARD.segment.page_head_bytes)
PART = PartLayout(0, 4, len(PAGES), (16 * 2 * 128, 16 * 2 * 128))
OFFSET = 4096


class Rig:
    """A writer with a pool and staging buffers, and a reader with a ring, in this process."""

    def __init__(self, engine: str, buffers: int, buffer_bytes: int) -> None:
        self.pool = KVPool.allocate((SHARD,), 16, 64)
        random = np.random.default_rng(2)
        for layer in self.pool.segments[0].blocks:
            for block in layer:
                block.array()[:] = random.integers(0, 256, block.nbytes, np.uint8)
        self.buffers = StagingBuffers(buffers, buffer_bytes)
        self.ring = RingMemory(8 << 20)
        self.here, self.there = open_engine(engine, "writer"), open_engine("nixl", "reader")
        self.here.register([*(Region(*region) for region in self.pool.regions()), Region(*self.buffers.region())])
        self.there.register([Region(*self.ring.region())])
        self.here.connect("reader", self.there.metadata())
        wake = os.eventfd(0)
        self.copies = self.here.pool if isinstance(self.here, PooledTransport) else CopyPool(0, wake)
        os.close(wake)
        self.path = StagedPath(self.buffers, HostCopier(self.copies))
        self.cancel = CancelToken(Lease(1 << 62))

    def start(self, pages: Any = PAGES) -> ChainedFlight:
        connection = PeerConnection("reader", self.here, self.pool, self.pool.addresses(), self.ring.addr)
        grant = Grant(0, 0, 4, 1, OFFSET, OFFSET + PART.region_bytes, 0)
        part = (PartKind.KV, PartKey(0, 0, 0, 4), "staged")
        rest = {"src_pages": pages, "dst_pages": PAGES, "tag": b"tag", "ready_ns": 1, "opened_ns": 1}
        flight = self.path.start(
            connection, Transfer("reader", 1, 1, *part, share=SHARE, grant=grant, cancel=self.cancel, **rest)
        )
        assert isinstance(flight, ChainedFlight)
        return flight

    def run(self, advance: Callable[[], bool]) -> list[bytes]:
        """Calls `advance` until it returns True; returns the tags that have arrived by then and shortly after."""
        tags: list[bytes] = []
        deadline = time.monotonic() + 60
        while not advance():
            tags += [arrival.tag for arrival in self.there.arrivals()]
            assert time.monotonic() < deadline, "the part does not end"
            time.sleep(0.0002)
        return tags + self.late_tags()

    def late_tags(self) -> list[bytes]:
        tags: list[bytes] = []
        for _ in range(50):
            self.here.progress()
            tags += [arrival.tag for arrival in self.there.arrivals()]
            time.sleep(0.0002)
        return tags

    def landed(self) -> bool:
        """Whether the region holds the whole part and the ring nothing else."""
        wanted = np.zeros(self.ring.nbytes, np.uint8)
        region = wanted[OFFSET : OFFSET + PART.region_bytes]
        for piece in PART.pieces():
            gather_piece(piece, RowIndex(self.pool.segments[0], PAGES, 1, 2), region[piece.offset :])
        return bool(np.array_equal(self.ring.view(0, self.ring.nbytes).array, wanted))

    def empty(self) -> bool:
        array = self.ring.view(0, self.ring.nbytes).array
        assert array is not None
        return not array.any()

    def close(self) -> None:
        for each in (self.here, self.there, self.copies, self.buffers, self.ring, self.pool):
            each.close()


@pytest.fixture(params=["nixl", "nixl+pool num_threads=3"])
def make(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def rig(buffers: int = 64, buffer_bytes: int = 64 << 10) -> Rig:
        rigs.append(Rig(request.param, buffers, buffer_bytes))
        return rigs[-1]

    yield rig
    for each in rigs:
        each.close()


@pytest.mark.parametrize(("buffers", "buffer_bytes"), [(64, 64 << 10), (1, 64 << 10), (3, 256 << 10), (2, 8 << 20)])
def test_all_bytes_arrive_and_then_the_tag_once(make: Any, buffers: int, buffer_bytes: int) -> None:
    rig = make(buffers, buffer_bytes)
    for _ in range(10):
        rig.ring.view(0, rig.ring.nbytes).array[:] = 0
        flight = rig.start()
        seen: list[bool] = []

        def advance(flight: ChainedFlight = flight, seen: list[bool] = seen) -> bool:
            ended = flight.advance()
            seen.append(rig.landed() if ended else False)
            return ended

        assert rig.run(advance) == [b"tag"]
        assert seen[-1]
        assert rig.buffers.in_use == 0
        assert flight.posts == flight.descriptors == len(PART.pieces(min(buffer_bytes, 2 << 20)))
        assert flight.gather_ns > 0
        assert flight.post_ns > 0


def test_the_last_piece_and_its_tag_wait_for_all_others_unless_these_share_the_tag(make: Any, monkeypatch: Any) -> None:
    rig = make(buffer_bytes=512 << 10)
    held = [True]
    tags: list[Any] = []
    defer_write = rig.here.defer_write

    class HeldWrite:
        """A write whose completion is not seen for a while."""

        def __init__(self, write: Any) -> None:
            self.write = write

        def __getattr__(self, name: str) -> Any:
            return getattr(self.write, name)

        def poll(self) -> bool:
            return self.write.poll() and not held[0]

    def hold(peer: str, local: Any, remote: Any, sizes: Any, tag: Any, until_ns: int) -> HeldWrite:
        tags.append(tag)
        return HeldWrite(defer_write(peer, local, remote, sizes, tag, until_ns))

    monkeypatch.setattr(rig.here, "share_tag", lambda tag, descriptors: None)
    monkeypatch.setattr(rig.here, "defer_write", hold)
    flight = rig.start()
    for _ in range(20):
        assert not flight.advance()
        time.sleep(0.001)
    assert tags == [None]
    held[0] = False
    assert rig.run(flight.advance) == [b"tag"]
    assert tags == [None, b"tag"]
    assert rig.landed()


def test_nothing_is_posted_after_the_lease_and_the_rest_when_it_is_renewed(make: Any) -> None:
    rig = make()
    rig.cancel.lease.length_ns = -1
    flight = rig.start()
    for _ in range(20):
        assert not flight.advance()
    assert rig.empty()
    assert rig.buffers.in_use == 0
    rig.cancel.lease.length_ns = 1 << 62
    assert rig.run(flight.advance) == [b"tag"]
    assert rig.landed()


def test_pieces_whose_lease_expires_while_they_are_gathered_wait_in_their_buffers(make: Any, monkeypatch: Any) -> None:
    rig = make()
    monkeypatch.setattr(Lease, "expires_ns", property(lambda lease: 0))
    monkeypatch.setattr(Lease, "valid", lambda lease, now_ns: True)
    flight = rig.start()
    flight.advance()
    monkeypatch.setattr(Lease, "valid", lambda lease, now_ns: False)
    for _ in range(50):
        assert not flight.advance()
        time.sleep(0.001)
    assert rig.empty()
    assert rig.buffers.in_use > 0
    monkeypatch.undo()
    assert rig.run(flight.advance) == [b"tag"]
    assert rig.landed()


@pytest.mark.parametrize("advances", [1, 3])
def test_a_cancelled_part_ends_and_its_tag_is_not_sent(make: Any, advances: int) -> None:
    rig = make(buffers=4)
    flight = rig.start()
    for _ in range(advances):
        assert not flight.advance()
    rig.cancel.cancelled = True
    assert rig.run(lambda: flight.advance() or flight.give_up()) == []
    assert rig.buffers.in_use == 0
    assert not rig.landed()


def test_a_page_list_that_is_modified_meanwhile_fails_the_part(make: Any) -> None:
    rig = make(buffers=4)
    pages = PAGES.copy()
    flight = rig.start(pages)
    assert not flight.advance()
    pages[:] = 64
    with pytest.raises(MemoryLayoutError, match="a page lies outside the pool"):
        rig.run(flight.advance)
    assert rig.run(flight.give_up) == []
    assert rig.buffers.in_use == 0


def test_a_peer_that_is_disconnected_gets_nothing_more(make: Any) -> None:
    rig = make()
    flight = rig.start()
    assert not flight.advance()
    rig.here.disconnect("reader")
    with pytest.raises(TransportError):
        rig.run(flight.advance)
    assert rig.run(flight.give_up) == []
    assert rig.buffers.in_use == 0


def test_a_deferred_write_waits_for_its_time_limit_and_can_be_resumed_or_stopped(make: Any) -> None:
    rig = make()
    source = rig.buffers.acquire("reader").span
    source.array[:] = 7
    where = np.array([source.addr], np.uint64), np.array([rig.ring.addr], np.uint64), np.array([4096], np.uint64)
    for resumed in (True, False):
        rig.ring.view(0, 4096).array[:] = 0
        write = rig.here.defer_write("reader", *where, b"one", 0)
        posting = rig.copies.run(1, write)
        while not posting.done():
            time.sleep(0.0002)
        assert write.skipped
        assert not write.poll()
        if resumed:
            write.resume(UNLIMITED_NS)
            assert rig.run(write.poll) == [b"one"]
        else:
            write.stop()
            with pytest.raises(PeerDisconnected, match="stopped before all was posted"):
                rig.run(write.poll)
        assert (rig.ring.view(0, 4096).array == (7 if resumed else 0)).all()


def test_a_part_whose_pieces_are_not_posted_is_not_complete(make: Any, monkeypatch: Any) -> None:
    rig = make(buffers=2, buffer_bytes=8 << 20)  # one piece
    monkeypatch.setattr(Lease, "expires_ns", property(lambda lease: 0))
    monkeypatch.setattr(Lease, "valid", lambda lease, now_ns: True)
    flight = rig.start()
    flight.advance()
    rig.here.disconnect("reader")
    with pytest.raises(TransportError):
        rig.run(flight.advance)
    assert rig.empty()


def test_a_deferred_write_to_a_disconnected_peer_is_refused(make: Any) -> None:
    rig = make()
    rig.here.disconnect("reader")
    nothing = np.array([rig.ring.addr], np.uint64), np.array([rig.ring.addr], np.uint64), np.array([1], np.uint64)
    with pytest.raises((PeerDisconnected, TransportError)):
        rig.here.defer_write("reader", *nothing, b"t", UNLIMITED_NS)


def test_a_transport_may_be_closed_while_pieces_are_copied(make: Any) -> None:
    rig = make()
    for _ in range(3):
        flight = rig.start()
        flight.advance()
    rig.here.close()
    assert flight.give_up()
