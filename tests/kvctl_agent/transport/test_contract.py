"""Guarantees of every transport, between this process and another one."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pytest

from kvctl_agent.errors import TransportError
from kvctl_agent.runtime.waiting import PolledDescriptors, turns_of_loop
from kvctl_agent.transport import Arrival
from kvctl_agent.transport.base import MAX_TAG_BYTES
from tests.kvctl_agent.transport.conftest import ODD_NAME, WITH_THREADS, Pair, sizes

pytestmark = WITH_THREADS


def fill(agent: Any) -> None:
    agent.pool[:] = np.frombuffer(secrets.token_bytes(len(agent.pool)), np.uint8)


def test_a_write_puts_bytes_where_it_says_and_tells_the_tag(pair: Pair) -> None:
    agent, peer = pair
    fill(agent)
    tag = b"\x00\xff\xfe not utf-8 \x00"
    write = agent.transport.write("peer", agent.at(0, 8192), peer.at(4096, 0), np.array([1000, 4096], np.uint64), tag)
    assert (write.bytes, write.descriptors) == (5096, 2)
    agent.finish(write)
    landed = peer.collect(1)
    assert [(a["peer"], a["tag"]) for a in landed] == [("writer", tag.hex())]
    assert peer.read(4096, 1000) == agent.pool[:1000].tobytes()
    assert peer.read(0, 4096) == agent.pool[8192:12288].tobytes()


def test_nothing_beside_the_descriptors_is_touched(pair: Pair) -> None:
    agent, peer = pair
    before = peer.read(1 << 20, 4096)
    agent.finish(agent.transport.write("peer", agent.at(0), peer.at((1 << 20) + 1024), sizes(512), b"t"))
    peer.collect(1)
    after = peer.read(1 << 20, 4096)
    assert (after[:1024], after[1536:]) == (before[:1024], before[1536:])


def test_the_bytes_are_there_when_the_tag_is_seen(pair: Pair) -> None:
    agent, peer = pair
    for value in range(1, 51):
        agent.pool[:] = value
        peer.send("collect", count=1, timeout_s=60)
        agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(1 << 20), bytes([value])))
        (landed,) = peer.answer()["arrivals"]
        assert (landed["tag"], landed["first"]) == (bytes([value]).hex(), value)


def test_a_write_without_a_tag_tells_nothing(pair: Pair) -> None:
    agent, peer = pair
    fill(agent)
    agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), None))
    assert peer.read(0, 4096) == agent.pool[:4096].tobytes()
    assert peer.collect(1, timeout_s=0.05) == []


def test_a_write_carries_any_permutation_of_rows(pair: Pair) -> None:
    agent, peer = pair
    fill(agent)
    rows = np.arange(1024) * 512
    chosen = np.random.default_rng(1).permutation(1024)[:700]
    targets = np.sort(np.random.default_rng(2).permutation(1024)[:700])
    here, there = agent.at(*rows[chosen]), peer.at(*rows[targets])
    write = agent.transport.write("peer", here, there, sizes(512, 700), b"rows")
    assert (write.bytes, write.descriptors) == (700 * 512, 700)
    agent.finish(write)
    peer.collect(1)
    there = np.frombuffer(peer.read(0, 1024 * 512), np.uint8).reshape(1024, 512)
    assert (there[targets] == agent.pool[: 1024 * 512].reshape(1024, 512)[chosen]).all()


def test_tags_survive_any_bytes_in_both_directions(pair: Pair) -> None:
    agent, peer = pair
    tags = [secrets.token_bytes(n) for n in (1, 2, 64, 500, MAX_TAG_BYTES)]
    tags += [bytes([value]) * 7 for value in (0, 10, 124, 255)]
    for tag in tags:
        agent.transport.tell("peer", tag)
        assert [a["tag"] for a in peer.collect(1)] == [tag.hex()]
        peer.ask("tell", peer="writer", tag=tag.hex())
        assert agent.collect(1) == [Arrival("peer", tag)]


def test_only_native_code_waits_for_tags(pair: Pair, engine: str) -> None:
    """tests/kvctl_agent/transport/test_wait_for_tags.py has what such a wait does."""
    waited = pair.agent.transport.wait_for_tags(PolledDescriptors([]).polled, turns_of_loop(), 0.001, 1e-4)
    assert (waited is not None) == (engine.split()[0] in ("nixl", "nixl+pool"))


def test_a_sender_we_did_not_connect_goes_by_the_name_it_gave_itself(crew: Any, engine: str) -> None:
    sender, receiver = crew.agent(engine, ODD_NAME), crew.agent(engine, "receiver")
    sender.transport.connect("receiver", receiver.transport.metadata())
    sender.transport.tell("receiver", b"hello")
    assert receiver.collect(1) == [Arrival(ODD_NAME, b"hello")]


def test_several_agents_of_one_process_write_to_each_other(crew: Any, engine: str) -> None:
    one, two = crew.agent(engine, "same name"), crew.agent(engine, "same name")
    one.transport.connect("two", two.transport.metadata())
    two.transport.connect("one", one.transport.metadata())
    fill(one)
    one.finish(one.transport.write("two", one.at(0), two.at(0), sizes(1 << 20), b"across"))
    assert two.collect(1) == [Arrival("one", b"across")]
    assert (two.pool[: 1 << 20] == one.pool[: 1 << 20]).all()


def test_a_released_write_still_tells_its_tag(pair: Pair) -> None:
    agent, peer = pair
    writes = [
        agent.transport.write("peer", agent.at(0), peer.at(0), sizes(64 << 10), f"r{n}".encode()) for n in range(8)
    ]
    for write in writes:
        write.release()
    peer.send("collect", count=8, timeout_s=60)
    agent.collect(1, timeout_s=0.3)
    assert sorted(a["tag"] for a in peer.answer()["arrivals"]) == sorted(f"r{n}".encode().hex() for n in range(8))
    assert all(write.release() for write in writes)


def test_progress_takes_no_arrivals_away(pair: Pair) -> None:
    agent, peer = pair
    for number in range(20):
        peer.ask("tell", peer="writer", tag=(b"%02d" % number).hex())  # waiting for the answer lets our engine work
    for _ in range(3):
        agent.transport.progress()
    assert [arrival.tag for arrival in agent.collect(20)] == [b"%02d" % number for number in range(20)]
    assert agent.transport.arrivals() == []


def test_misuse_is_named_and_changes_nothing(pair: Pair) -> None:
    agent, peer = pair
    transport = agent.transport
    for wrong, said in [
        (lambda: transport.write("nobody", agent.at(0), peer.at(0), sizes(8), None), "'nobody' is not connected"),
        (lambda: transport.write("peer", agent.at(0), peer.at(1 << 40), sizes(8), None), "registered memory"),
        (lambda: transport.write("peer", agent.at(1 << 40), peer.at(0), sizes(8), None), "registered memory"),
        (lambda: transport.write("peer", agent.at(0), peer.at((4 << 20) - 4), sizes(8), None), "registered memory"),
        (lambda: transport.write("peer", agent.at(), peer.at(), sizes(8, 0), None), "at least one"),
        (lambda: transport.write("peer", agent.at(0, 1), peer.at(0), sizes(8), None), "2 addresses, 1 sizes"),
        (lambda: transport.tell("peer", b""), "1 to 4096 bytes"),
        (lambda: transport.tell("peer", b"x" * (MAX_TAG_BYTES + 1)), "1 to 4096 bytes"),
        (lambda: transport.connect("other", b""), "peer 'other'"),
        (lambda: transport.connect("other", peer.metadata[:-7]), "peer 'other'"),
        (lambda: transport.connect("other", secrets.token_bytes(500)), "peer 'other'"),
    ]:
        with pytest.raises(TransportError, match=said):
            wrong()
    assert peer.collect(1, timeout_s=0.05) == []
    agent.finish(transport.write("peer", agent.at(0), peer.at(0), sizes(8), b"still works"))
    assert len(peer.collect(1)) == 1


def test_damaged_metadata_never_reaches_the_engine(pair: Pair) -> None:
    random = np.random.default_rng(3)
    for _ in range(50):
        damaged = bytearray(pair.peer.metadata)
        damaged[random.integers(len(damaged))] ^= 1 << int(random.integers(8))
        try:
            pair.agent.transport.connect("damaged", bytes(damaged))
        except TransportError as error:
            assert "'damaged'" in str(error)  # noqa: PT017 - a flipped digit of an address is another valid metadata
        pair.agent.transport.disconnect("damaged")


def test_what_was_told_just_before_closing_arrives(crew: Any, engine: str) -> None:
    agent, peer = crew.agent(engine), crew.peer(engine)
    agent.transport.connect("peer", peer.metadata)
    # A busy machine may take longer to set up the connection than closing waits.
    peer.send("collect", count=1, timeout_s=60)
    agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(8), b"first"))
    assert len(peer.answer()["arrivals"]) == 1
    peer.send("collect", count=20, timeout_s=60)
    for number in range(20):
        agent.transport.tell("peer", bytes([number]))
    agent.transport.close()
    crew.forget(agent)
    assert [landed["tag"] for landed in peer.answer()["arrivals"]] == [bytes([n]).hex() for n in range(20)]


def test_close_is_final_and_idempotent(crew: Any, engine: str) -> None:
    transport = crew.agent(engine, "short lived").transport
    transport.close()
    transport.close()
    for call in (transport.arrivals, transport.progress, transport.metadata, lambda: transport.tell("x", b"t")):
        with pytest.raises(TransportError, match=r"closed"):
            call()


def test_it_says_what_it_runs_on(pair: Pair, engine: str) -> None:
    told = pair.agent.transport.describe()
    name = engine.partition(" ")[0].partition("+")[0]
    assert name in told["engine"]
    assert told["backend"]
    assert told["lanes"]
    assert pair.agent.transport.name == name
