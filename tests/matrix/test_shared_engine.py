"""A facade behaves like a transport of its own, and nothing of one rank reaches another."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvctl_agent.errors import PeerDisconnected, TransportError
from kvctl_agent.memory.allocations import HugePageMemory
from kvctl_agent.memory.region import Region
from kvctl_agent.transport.base import Arrival
from kvctl_agent.transport.registry import open_transport
from tests.matrix.matrix_rig.shared_engine import Facade, SharedEngine
from tests.support.mooncake import start_mooncake

pytestmark = pytest.mark.sample
BYTES = 1 << 16

Start = Callable[[], tuple[SharedEngine, HugePageMemory]]


@pytest.fixture(scope="module", params=["loopback", "nixl", "mooncake"])
def transport(request: pytest.FixtureRequest) -> str:
    """Each in turn."""
    if request.param == "mooncake":
        start_mooncake()
    return str(request.param)


@pytest.fixture
def start(transport: str) -> Iterator[Start]:
    """Starts an engine over some memory; several stand for several processes."""
    started: list[tuple[SharedEngine, HugePageMemory]] = []

    def make() -> tuple[SharedEngine, HugePageMemory]:
        slab = HugePageMemory(BYTES)
        engine = SharedEngine(open_transport(transport, "shared"), secrets.token_hex(8), [Region(*slab.region)])
        started.append((engine, slab))
        return started[-1]

    yield make
    for engine, slab in started:
        engine.close()
        slab.close()


def u64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


def collect(engines: list[SharedEngine], *facades: Facade, wanted: int) -> list[list[Arrival]]:
    """What lands at each facade until `wanted` tags have, all engines being polled meanwhile."""
    landed: list[list[Arrival]] = [[] for _ in facades]
    deadline = time.monotonic() + 60
    while sum(map(len, landed)) < wanted and time.monotonic() < deadline:
        for engine in engines:
            engine.sort_arrivals()
        for own, facade in zip(landed, facades, strict=True):
            own += facade.arrivals()
    return landed


def finish(write: object, *engines: SharedEngine) -> None:
    deadline = time.monotonic() + 60
    while not write.poll():
        assert time.monotonic() < deadline
        for engine in engines:
            engine.sort_arrivals()


def test_tags_and_bytes_reach_the_rank_they_are_for(start: Start) -> None:
    (here, ours), (there, theirs) = start(), start()
    writer, (first, second) = here.open("writer", {}), [there.open(f"reader-{i}", {}) for i in range(2)]
    ours.array[:8], theirs.array[:] = 7, 0
    for name, reader in (("a", first), ("b", second)):
        writer.connect(name, reader.metadata())
    write = writer.write("b", u64(ours.addr), u64(theirs.addr + 64), u64(8), b"bytes")
    finish(write, here, there)
    writer.tell("a", b"bare")
    landed = collect([here, there], first, second, wanted=2)
    assert landed == [[Arrival("writer", b"bare")], [Arrival("writer", b"bytes")]]
    assert (theirs.array[64:72] == 7).all()
    assert int(theirs.array.sum()) == 56
    assert (write.bytes, write.descriptors) == (8, 1)


def test_a_sender_is_known_by_the_name_it_was_connected_under(start: Start) -> None:
    (here, _), (there, _) = start(), start()
    writer, reader = here.open("writer", {}), there.open("reader", {})
    reader.connect("my writer", writer.metadata())
    writer.connect("my reader", reader.metadata())
    writer.tell("my reader", b"hello")
    assert collect([here, there], reader, wanted=1) == [[Arrival("my writer", b"hello")]]


def test_the_engine_is_connected_while_any_rank_is(start: Start) -> None:
    (here, _), (there, _) = start(), start()
    writers = [here.open(f"writer-{i}", {}) for i in range(2)]
    reader = there.open("reader", {})
    for writer in writers:
        writer.connect("r", reader.metadata())
        writer.connect("r", reader.metadata())
    writers[0].disconnect("r")
    writers[0].disconnect("r")
    with pytest.raises(TransportError, match="not connected"):
        writers[0].tell("r", b"gone")
    writers[1].tell("r", b"still there")
    assert collect([here, there], reader, wanted=1) == [[Arrival("writer-1", b"still there")]]
    writers[1].close()
    assert here._users == {there.name: 0}


def test_a_rank_that_closed_hears_nothing_and_its_peers_go_on(start: Start) -> None:
    (here, _), (there, _) = start(), start()
    writer, gone, stays = here.open("writer", {}), there.open("gone", {}), there.open("stays", {})
    writer.connect("gone", gone.metadata())
    writer.connect("stays", stays.metadata())
    gone.close()
    gone.close()
    writer.tell("gone", b"for nobody")
    writer.tell("stays", b"for somebody")
    assert collect([here, there], stays, wanted=1) == [[Arrival("writer", b"for somebody")]]
    with pytest.raises(TransportError, match="closed"):
        gone.arrivals()


def test_an_unfinished_write_ends_when_its_peer_is_disconnected(start: Start) -> None:
    (here, ours), (there, theirs) = start(), start()
    writer, reader = here.open("writer", {}), there.open("reader", {})
    writer.connect("r", reader.metadata())
    write = writer.write("r", u64(ours.addr), u64(theirs.addr), u64(8), b"tag")
    write._write = type("Stuck", (), {"poll": lambda self: False, "release": write._write.release})()
    assert not write.poll()
    writer.disconnect("r")
    with pytest.raises(PeerDisconnected):
        write.poll()
    deadline = time.monotonic() + 60
    while not write.release() and time.monotonic() < deadline:
        there.sort_arrivals()


def test_memory_outside_the_shared_and_foreign_metadata_are_refused(start: Start) -> None:
    engine, slab = start()
    facade = engine.open("rank", {})
    facade.register([Region(slab.addr, BYTES)])
    with pytest.raises(TransportError, match="outside the memory"):
        facade.register([Region(slab.addr + 1, BYTES)])
    for metadata in (b"", b"x" * 40):
        with pytest.raises(TransportError):
            facade.connect("r", metadata)
