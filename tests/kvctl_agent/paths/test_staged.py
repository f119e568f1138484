"""Pieces of a staged part: bounded buffers, the tag after all bytes, and nothing reused under a write that may land.

The transport here completes writes when the test says so, late and out of order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.errors import DeviceError, MemoryLayoutError, PeerDisconnected
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import Plane, Segment
from kvctl_agent.memory.allocations import RingMemory, StagingBuffers
from kvctl_agent.memory.copier import Copier
from kvctl_agent.memory.device_copier import DeviceCopier
from kvctl_agent.memory.part_layout import PartLayout
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.segment import RowIndex
from kvctl_agent.paths.base import Flight
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.paths.staged import StagedPath
from kvctl_agent.protocol.events import Transfer
from kvctl_agent.protocol.messages import Grant
from kvctl_agent.protocol.peer import CancelToken, Lease
from kvctl_agent.protocol.tag import PartKey, PartKind
from kvctl_agent.transport.base import SharedTag
from tests.support.host_device import HostDevice
from tests.support.numpy_copier import NumpyCopier, gather_piece

PAGES = np.array([3, 9, 4, 1, 15, 0, 2, 8, 7, 11, 13, 12], np.int32)
HELD = LocalShard(Segment(0, "kv", 0, 4, 4, (Plane("k", 4, 32), Plane("v", 4, 32))), 0, 4, 0, 4)
SHARE = TransferSlice(0, 0, 0, 1, 0, 2, 0, 4, 4, 2, HELD.segment.page_head_bytes)
PART = PartLayout(0, 4, len(PAGES), (256, 256))


class LateWrite:
    """A write whose bytes land, and whose tag is heard, when the test completes it."""

    def __init__(self, here: Any, there: Any, sizes: Any, tag: bytes | SharedTag | None) -> None:
        self.pieces = list(zip(here.tolist(), there.tolist(), sizes.tolist(), strict=True))
        self.here, self.bytes, self.tag, self.descriptors = int(here[0]), int(sizes.sum()), tag, len(here)
        self.error: Exception | None = None
        self.finished = False
        self.given_up = False

    def complete(self) -> None:
        for here, there, nbytes in self.pieces:
            ctypes.memmove(there, here, nbytes)
        self.finished = True

    def poll(self) -> bool:
        assert not self.given_up, "poll after release"
        if self.error is not None:
            raise self.error
        return self.finished

    def release(self) -> bool:
        self.given_up = True
        return self.finished or self.error is not None


class LateTransport:
    def __init__(self) -> None:
        self.writes: list[LateWrite] = []
        self.error: Exception | None = None
        self.shares_tags = False

    def share_tag(self, tag: bytes, descriptors: int) -> SharedTag | None:
        return SharedTag(tag, 1, descriptors) if self.shares_tags else None

    def defers(self, peer: str) -> bool:
        return False

    def write(self, peer: str, here: Any, there: Any, sizes: Any, tag: bytes | SharedTag | None) -> LateWrite:
        if self.error is not None:
            raise self.error
        self.writes.append(LateWrite(here, there, sizes, tag))
        return self.writes[-1]

    @property
    def open(self) -> list[LateWrite]:
        return [write for write in self.writes if not write.finished]


class Bench:
    """A writer, a reader and a ring; a device that completes copies at the first query behaves as the host does."""

    def __init__(self, device: HostDevice | None = None) -> None:
        self.device = device
        self.pool = KVPool.allocate((HELD,), 4, 16, device=device)
        random = np.random.default_rng(1)
        for layer in self.pool.segments[0].blocks:
            for block in layer:
                block.array()[:] = random.integers(0, 256, block.nbytes, np.uint8)
        self.ring = RingMemory(1 << 20)
        self.transport = LateTransport()
        self.cancel = CancelToken(Lease(1 << 62))
        self.buffers = StagingBuffers(1, 1)
        self.copier: Copier = NumpyCopier() if device is None else DeviceCopier(device.copies())

    def staging(self, count: int, nbytes: int = 4096) -> StagedPath:
        self.buffers.close()
        self.buffers = StagingBuffers(count, nbytes, self.device)
        return StagedPath(self.buffers, self.copier)

    def start(self, path: StagedPath, offset: int = 512, **changes: Any) -> Flight:
        order: dict[str, Any] = {
            "peer": "reader",
            "room": 1,
            "nonce": 1,
            "kind": PartKind.KV,
            "key": PartKey(0, 0, 0, 4),
            "path": "staged",
            "share": SHARE,
            "src_pages": PAGES,
            "dst_pages": PAGES,
            "grant": Grant(0, 0, 4, 1, offset, offset + PART.region_bytes, 0),
            "tag": b"tag",
            "cancel": self.cancel,
            "ready_ns": 1,
            "opened_ns": 1,
        }
        peer = changes.get("peer", "reader")
        connection = PeerConnection(peer, self.transport, self.pool, self.pool.addresses(), self.ring.addr)  # type: ignore[arg-type]
        return path.start(connection, Transfer(**{**order, **changes}))

    def view(self, offset: int, nbytes: int) -> Any:
        return self.ring.view(offset, nbytes).array

    def landed(self, offset: int = 512) -> bool:
        """Whether the region holds the whole part and the ring nothing else."""
        wanted = np.zeros(1 << 20, np.uint8)
        region = wanted[offset : offset + PART.region_bytes]
        for piece in PART.pieces():
            gather_piece(piece, RowIndex(self.pool.segments[0], PAGES, 1, 2), region[piece.offset :])
        return bool(np.array_equal(self.view(0, 1 << 20), wanted))


def close(bench: Bench) -> None:
    for closing in (bench.copier, bench.buffers, bench.ring, bench.pool):
        closing.close()


@pytest.fixture(params=["host", "device"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(None if request.param == "host" else HostDevice(slow=1))
    yield bench
    close(bench)


@pytest.fixture
def late() -> Iterator[Bench]:
    """A device that completes copies late."""
    bench = Bench(HostDevice(slow=3))
    yield bench
    close(bench)


def drive(bench: Bench, flight: Flight, pick: Callable[[list[LateWrite]], LateWrite]) -> list[LateWrite]:
    """Complete one open write at a time until the part has ended, and return the order of completion."""
    order: list[LateWrite] = []
    while not flight.advance():
        assert bench.transport.open, "the flight waits for nothing"
        order.append(pick(bench.transport.open))
        order[-1].complete()
    return order


STEPS = ["advance"] * 8 + ["complete"] * 4 + ["lapse", "renew", "renew", "fail", "refuse", "cancel"]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([None, 1, 3]), st.integers(1, 8), st.lists(st.sampled_from(STEPS), max_size=60), st.randoms())
def test_whatever_happens_meanwhile_nothing_is_used_too_early_and_all_comes_back(
    slow: int | None, count: int, steps: list[str], random: Random
) -> None:
    """Copies take their time, writes complete or fail in any order, the lease lapses, the room fails."""
    bench = Bench(None if slow is None else HostDevice(slow=slow))
    flight = bench.start(bench.staging(count))
    writes, lease = bench.transport.writes, bench.cancel.lease
    ended = failed = False

    def look() -> None:
        """Advances or, after a failure, gives up, and checks what may be posted and reused."""
        nonlocal ended, failed
        posted, may_post = len(writes), not (failed or bench.cancel.cancelled or lease.length_ns == 1)
        try:
            ended = flight.give_up() if failed else flight.advance()
        except PeerDisconnected:
            failed = True
        assert may_post or len(writes) == posted
        reading = [write.here for write in bench.transport.open if write.error is None]
        assert len(set(reading)) == len(reading) <= bench.buffers.in_use <= count
        assert not (ended and reading)
        for number, write in enumerate(writes):
            assert not write.tag or all(each.finished for each in writes[:number]), "the tag leaves last"

    for step in steps:
        waiting = [write for write in bench.transport.open if write.error is None]
        if step == "advance" and not ended:
            look()
        elif step == "complete" and waiting:
            random.choice(waiting).complete()
        elif step in ("lapse", "renew"):
            lease.length_ns = 1 if step == "lapse" else 1 << 62
        elif step == "fail" and waiting:
            random.choice(waiting).error = PeerDisconnected("gone")
        elif step in ("refuse", "cancel") and random.random() < 0.3:
            bench.transport.error = PeerDisconnected("gone") if step == "refuse" else bench.transport.error
            bench.cancel.cancelled |= step == "cancel"
    lease.length_ns = 1 << 62
    for _ in range(200):
        if ended:
            break
        for write in bench.transport.open:
            if write.error is None:
                write.complete()
        look()
    assert ended
    assert bench.buffers.in_use == 0
    told = [write.tag for write in writes if write.tag]
    assert told == [b"tag"] * len(told)
    if not (failed or bench.cancel.cancelled):
        assert (len(told), flight.posts, flight.descriptors) == (1, len(writes), len(PART.pieces(4096)))
        assert flight.gather_ns > 0
    assert bench.landed() == bool(told and writes[-1].finished)
    close(bench)


@pytest.mark.parametrize("shares_tags", [False, True])
@pytest.mark.parametrize("at_once", [2, 3, 5])
def test_pieces_gathered_together_are_one_write(at_once: int, shares_tags: bool) -> None:
    bench = Bench()
    bench.copier = NumpyCopier()
    bench.copier.pieces_at_once = at_once
    bench.transport.shares_tags = shares_tags
    flight = bench.start(bench.staging(64))
    for _ in range(1000):
        if flight.advance():
            break
        for write in bench.transport.open:
            write.complete()
    count = len(PART.pieces(4096))
    writes = bench.transport.writes
    assert [write.descriptors for write in writes[:-2]] == [at_once] * (len(writes) - 2)
    assert sum(write.descriptors for write in writes) == flight.descriptors == count
    if not shares_tags:
        assert [write.tag for write in writes] == [None] * (len(writes) - 1) + [b"tag"]
        assert writes[-1].descriptors == 1, "a transport may divide a write with a tag"
    assert bench.landed()
    assert bench.buffers.in_use == 0
    close(bench)


def test_writes_that_share_the_tag_wait_for_none(bench: Bench) -> None:
    bench.transport.shares_tags = True
    flight = bench.start(bench.staging(32))
    for _ in range(64):
        assert not flight.advance()
    count = len(PART.pieces(4096))
    assert len(bench.transport.open) == 4 < count, "as many as may be in flight"
    drive(bench, flight, lambda writes: writes[-1])
    assert [write.tag for write in bench.transport.writes] == [SharedTag(b"tag", 1, count)] * count
    assert bench.landed()
    assert bench.buffers.in_use == 0


def test_without_a_free_buffer_a_part_waits_its_turn_and_posts_nothing(bench: Bench) -> None:
    path = bench.staging(2)
    taken = [bench.buffers.acquire("a"), bench.buffers.acquire("b")]
    flight = bench.start(path)
    for _ in range(3):
        assert not flight.advance()
    assert bench.transport.writes == []
    for buffer in taken:
        assert buffer is not None
        bench.buffers.release(buffer)
    drive(bench, flight, lambda writes: writes[0])
    assert bench.landed()


@pytest.mark.parametrize("count", [2, 3, 8, 32])
def test_a_stopped_peer_leaves_buffers_for_the_others(bench: Bench, count: int) -> None:
    path = bench.staging(count)
    stopped = [bench.start(path, peer="stopped") for _ in range(16)]
    for _ in range(8):
        assert not any(flight.advance() for flight in stopped)
    blocked = bench.transport.open
    assert 0 < len(blocked) < count
    flight = bench.start(path, offset=1 << 16)
    while not flight.advance():
        posted = [write for write in bench.transport.open if write not in blocked]
        assert posted, "the flight waits for the stopped peer"
        for write in posted:
            write.complete()
    assert bench.landed(1 << 16)
    for each in stopped:
        each.give_up()


def test_a_part_of_one_piece_is_one_tagged_write(bench: Bench) -> None:
    flight = bench.start(bench.staging(2, 1 << 20))
    assert not flight.advance()
    assert [write.tag for write in bench.transport.writes] == [b"tag"]
    drive(bench, flight, lambda writes: writes[0])
    assert bench.landed()


class TestFailure:
    def test_a_failed_gather_returns_its_buffer(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*args: Any) -> None:
            raise MemoryLayoutError("a page is gone")

        monkeypatch.setattr(bench.copier, "gather", broken)
        flight = bench.start(bench.staging(2))
        with pytest.raises(MemoryLayoutError, match="a page is gone"):
            flight.advance()
        assert flight.give_up()
        assert bench.buffers.in_use == 0


class TestCopiesThatTakeTheirTime:
    def advance(self, flight: Flight, times: int) -> None:
        for _ in range(times):
            assert not flight.advance()

    def test_a_piece_is_posted_when_its_gather_is_done(self, late: Bench) -> None:
        flight = late.start(late.staging(4))
        self.advance(flight, 2)
        assert late.device is not None
        assert (len(late.device.begun), late.transport.writes, late.buffers.in_use) == (1, [], 1)
        self.advance(flight, 1)
        assert len(late.transport.writes) == 1
        assert len(late.device.begun) == 2, "the next one is gathered while it is on the wire"
        while not flight.advance():
            for write in late.transport.open:
                write.complete()
        assert late.landed()
        assert late.buffers.in_use == 0
        assert flight.gather_ns > 0

    def test_a_device_that_fails_fails_the_part(self, late: Bench) -> None:
        assert late.device is not None
        late.device.fail_next = 1
        flight = late.start(late.staging(4))
        self.advance(flight, 2)
        with pytest.raises(DeviceError, match="told to fail"):
            flight.advance()
        assert flight.give_up()
        assert late.buffers.in_use == 0

    def test_and_is_silent_of_one_that_was_given_up(self, late: Bench) -> None:
        assert late.device is not None
        late.device.fail_next = 1
        flight = late.start(late.staging(4))
        self.advance(flight, 1)
        late.cancel.cancelled = True
        assert not flight.give_up()
        assert flight.give_up()
        assert late.buffers.in_use == 0


class TestRefusal:
    def test_a_grant_that_is_too_small(self, bench: Bench) -> None:
        small = Grant(0, 0, 4, 1, 512, 512 + PART.region_bytes - 256, 0)
        with pytest.raises(MemoryLayoutError, match=r"writer 0 chunk 0 layers 0-3 needs \d+ bytes, its grant"):
            bench.start(bench.staging(2), grant=small)
        assert bench.buffers.in_use == 0

    @pytest.mark.parametrize("missing", ["share", "grant"])
    def test_no_grant_or_nothing_owed(self, bench: Bench, missing: str) -> None:
        with pytest.raises(MemoryLayoutError, match="has no staging grant"):
            bench.start(bench.staging(2), **{missing: None})

    def test_pages_outside_the_pool(self, bench: Bench) -> None:
        with pytest.raises(MemoryLayoutError, match="16"):
            bench.start(bench.staging(2), src_pages=np.where(PAGES == 15, 16, PAGES).astype(np.int32))
        assert bench.buffers.in_use == 0
