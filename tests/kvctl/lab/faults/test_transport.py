"""A bad engine: what it fails, it fails as an engine may; what it does not fail arrives as without it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.specification import parse_fault
from kvctl.lab.faults.transport import FaultyTransport
from kvctl_agent.errors import TransportError
from kvctl_agent.memory.region import Region
from kvctl_agent.runtime.waiting import PolledDescriptors, turns_of_loop
from kvctl_agent.transport.base import Arrival, Write
from kvctl_agent.transport.registry import open_transport
from tests.support.polling import until

BYTES = 4096


class Pair:
    """A writer and a reader, both under faults of their own."""

    def __init__(self, engine: str) -> None:
        self.pools = {name: np.zeros(BYTES, np.uint8) for name in ("writer", "reader")}
        self.faults = {name: FaultInjector(name, seed=2) for name in self.pools}
        self.ends = {}
        for name, pool in self.pools.items():
            self.ends[name] = FaultyTransport(open_transport(engine, name), self.faults[name])
            self.ends[name].register([Region(pool.ctypes.data, BYTES)])
        self.ends["writer"].connect("reader", self.ends["reader"].metadata())
        self.pools["writer"][:] = 7

    def write(self, tag: bytes = b"t") -> Write:
        here, there = (np.array([pool.ctypes.data], np.uint64) for pool in self.pools.values())
        sizes = np.array([BYTES], np.uint64)
        return self.ends["writer"].write("reader", here, there, sizes, tag)

    @property
    def landed(self) -> bool:
        return bool((self.pools["reader"] == 7).all())

    def finish(self, write: Write) -> None:
        deadline = time.monotonic() + 60
        while not write.poll():
            assert time.monotonic() < deadline, "the write does not complete"
            self.ends["reader"].progress()

    def arrivals(self, count: int, timeout_s: float = 60.0, waiting: bool = False) -> list[Arrival]:
        """Collects tags; `waiting` in waits for tags, where the engine has such."""
        deadline = time.monotonic() + timeout_s
        heard: list[Arrival] = []
        reader = self.ends["reader"]
        while len(heard) < count and time.monotonic() < deadline:
            self.ends["writer"].progress()
            waited = (
                reader.wait_for_tags(PolledDescriptors([]).polled, turns_of_loop(), 0.001, 0.0005) if waiting else None
            )
            heard += reader.arrivals() if waited is None else waited.arrivals
            time.sleep(0.0005)
        return heard

    def close(self) -> None:
        for end in self.ends.values():
            end.close()


@pytest.fixture(params=["loopback", "nixl"])
def pair(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.close()


def test_without_a_fault_it_is_the_engine(pair: Pair) -> None:
    for number in range(2):
        pair.finish(pair.write(b"%d" % number))
    assert [arrival.tag for arrival in pair.arrivals(2)] == [b"0", b"1"]
    assert pair.landed
    assert pair.ends["writer"].name in ("loopback", "nixl")
    assert pair.ends["writer"].describe()["engine"]


def test_a_refused_post_lands_nothing(pair: Pair) -> None:
    pair.faults["writer"].set(parse_fault("write-error=100%"))
    with pytest.raises(TransportError, match="injected fault write-error"):
        pair.write()
    assert pair.arrivals(1, timeout_s=0.05) == []
    assert not pair.landed
    pair.faults["writer"].clear()
    pair.finish(pair.write())
    assert pair.landed


def test_a_doubtful_write_fails_and_lands_later(pair: Pair) -> None:
    pair.faults["writer"].set(parse_fault("write-doubt=100%"))
    write = pair.write()
    assert write.descriptors == 1
    with pytest.raises(TransportError, match="injected fault write-doubt"):
        write.poll()
    assert not pair.landed
    deadline = time.monotonic() + 60
    while not write.release():
        assert time.monotonic() < deadline, "the write is never let go"
        pair.ends["reader"].progress()
    assert [arrival.tag for arrival in pair.arrivals(1)] == [b"t"]
    assert pair.landed
    assert write.release()
    assert pair.faults["writer"].counts() == {"write-doubt": 1}


def test_a_doubtful_write_to_a_peer_that_has_gone_is_over(pair: Pair) -> None:
    pair.faults["writer"].set(parse_fault("write-doubt=100%"))
    write = pair.write()
    pair.ends["writer"].disconnect("reader")
    until(lambda: write.release(), "the write is never let go")
    assert not pair.landed


def test_a_slow_writer_is_late_to_know(pair: Pair) -> None:
    pair.faults["writer"].set(parse_fault("slow-writer=80ms"))
    began = time.monotonic()
    write = pair.write()
    assert write.bytes == BYTES
    pair.finish(write)
    assert time.monotonic() - began >= 0.08
    assert write.release()


def test_a_slow_reader_looks_seldom(pair: Pair) -> None:
    reader = pair.ends["reader"]
    pair.faults["reader"].set(parse_fault("slow-reader=30s"))
    assert reader.arrivals() == []  # the look that is allowed
    pair.finish(pair.write())
    assert pair.arrivals(1, timeout_s=0.1) == []
    pair.faults["reader"].clear()
    assert [arrival.tag for arrival in pair.arrivals(1)] == [b"t"]


def test_tags_are_lost_and_doubled_but_bytes_land(pair: Pair) -> None:
    pair.faults["reader"].set(parse_fault("notify-loss=100%"))
    pair.finish(pair.write(b"lost"))
    assert pair.arrivals(1, timeout_s=0.1) == []
    assert pair.landed
    pair.faults["reader"].clear()
    pair.faults["reader"].set(parse_fault("notify-dup=100%"))
    pair.finish(pair.write(b"twice"))
    assert [arrival.tag for arrival in pair.arrivals(2)] == [b"twice", b"twice"]
    assert pair.faults["reader"].counts() == {"notify-loss": 1, "notify-dup": 1}


def test_tags_that_a_wait_finds_are_lost_and_doubled_too(pair: Pair) -> None:
    pair.faults["reader"].set(parse_fault("notify-loss=100%"))
    pair.ends["writer"].tell("reader", b"lost")
    deadline = time.monotonic() + 60
    while not pair.faults["reader"].counts() and time.monotonic() < deadline:
        assert pair.arrivals(1, timeout_s=0.01, waiting=True) == []
    pair.faults["reader"].clear()
    pair.faults["reader"].set(parse_fault("notify-dup=100%"))
    pair.ends["writer"].tell("reader", b"twice")
    assert [arrival.tag for arrival in pair.arrivals(2, waiting=True)] == [b"twice", b"twice"]
    assert pair.faults["reader"].counts() == {"notify-loss": 1, "notify-dup": 1}


def test_a_corrupt_write_lands_with_a_wrong_byte_and_leaves_its_source_as_it_was(pair: Pair) -> None:
    pair.faults["writer"].set(parse_fault("corrupt-write=100%"))
    pair.finish(pair.write())
    assert len(pair.arrivals(1)) == 1
    assert np.flatnonzero(pair.pools["reader"] != 7).tolist() == [0]
    assert (pair.pools["writer"] == 7).all()
    pair.faults["writer"].clear()
    pair.finish(pair.write())
    assert pair.landed


def test_a_late_write_lands_whole_but_not_before_its_time(pair: Pair) -> None:
    pair.faults["writer"].set(parse_fault("slow-lane=60s"))
    write = pair.write()
    assert write.descriptors == 1
    assert not write.poll()
    assert not pair.landed
    assert write.release()  # given up before the engine had it
    pair.faults["writer"].set(parse_fault("slow-lane=30ms"))
    pair.finish(pair.write())
    assert len(pair.arrivals(1)) == 1
    assert pair.landed
    assert pair.faults["writer"].counts() == {"slow-lane": 2}
