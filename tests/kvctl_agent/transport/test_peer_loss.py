"""Peers that die, stop or restart cause an error of kvctl, and neither a crash nor a blocking call."""

from __future__ import annotations

import os
import signal
import statistics
import time
from typing import Any

import numpy as np
import pytest

from kvctl_agent.errors import PeerDisconnected, TransportError
from kvctl_agent.runtime.control_loop import _LANDING_PAUSE_S, _LANDING_ROUNDS
from tests.kvctl_agent.transport.conftest import POOL_BYTES, WITH_THREADS

pytestmark = WITH_THREADS


def sizes(nbytes: int) -> np.ndarray:
    return np.full(1, nbytes, np.uint64)


def until_disconnected(attempt: Any) -> None:
    """Repeat `attempt` until it raises PeerDisconnected."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            attempt()
        except PeerDisconnected:
            return
        time.sleep(0.001)
    raise AssertionError("the death of the peer goes unnoticed")


def test_death_and_return_of_a_peer(crew: Any, engine: str) -> None:
    agent, peer = crew.agent(engine), crew.peer(engine)
    transport = agent.transport
    transport.connect("peer", peer.metadata)
    agent.finish(transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"alive"))
    peer.kill()

    def write() -> None:
        agent.finish(transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"dead"))

    until_disconnected(write)
    # Every later call says the same, the process lives on, and listening is not disturbed.
    for call in (write, lambda: transport.tell("peer", b"dead")):
        with pytest.raises(PeerDisconnected, match="'peer'"):
            call()
    assert transport.arrivals() == []

    reborn = crew.peer(engine)
    transport.connect("peer", reborn.metadata)
    agent.finish(transport.write("peer", agent.at(0), reborn.at(0), sizes(4096), b"again"))
    assert [a["tag"] for a in reborn.collect(1)] == [b"again".hex()]


def test_writes_in_flight_to_a_dying_peer_all_end(crew: Any, engine: str) -> None:
    agent, peer = crew.agent(engine), crew.peer(engine)
    agent.transport.connect("peer", peer.metadata)
    agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"warm"))
    os.kill(peer.process.pid, signal.SIGSTOP)
    writes = [agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"t" * 4000) for _ in range(200)]
    given_up = writes[100:]
    for write in given_up:
        write.release()
    peer.kill()
    for write in writes[:100]:
        until = time.monotonic() + 60
        try:
            while not write.poll():
                assert time.monotonic() < until
        except PeerDisconnected:
            pass
    until = time.monotonic() + 60
    while not all([write.release() for write in given_up]):  # noqa: C419 - each is to be driven
        assert time.monotonic() < until
        agent.transport.arrivals()


def test_a_stopped_peer_blocks_no_call_and_close_is_bounded(crew: Any, engine: str) -> None:
    agent, peer = crew.agent(engine), crew.peer(engine)
    agent.transport.connect("peer", peer.metadata)
    agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"warm"))
    os.kill(peer.process.pid, signal.SIGSTOP)
    taken: list[float] = []
    for _ in range(200):
        started = time.monotonic()
        agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"t" * 4000)
        agent.transport.tell("peer", b"t" * 4000)
        agent.transport.arrivals()
        taken.append(time.monotonic() - started)
    assert statistics.median(taken) < 0.1
    assert max(taken) < 20
    started = time.monotonic()
    agent.transport.close()
    assert time.monotonic() - started < 20
    peer.kill()


def test_what_was_told_and_written_to_a_stopped_peer_arrives_when_it_goes_on(crew: Any, engine: str) -> None:
    agent, peer = crew.agent(engine), crew.peer(engine)
    agent.transport.connect("peer", peer.metadata)
    agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"warm"))
    peer.collect(1)
    os.kill(peer.process.pid, signal.SIGSTOP)
    tags = {b"%04d" % number + b"x" * 4000 for number in range(2500)}  # 10 MB: more than a socket holds
    writes = []
    for tag in sorted(tags):
        if len(writes) < 200:
            writes.append(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), tag))
        else:
            agent.transport.tell("peer", tag)
    for write in writes:
        write.release()
    os.kill(peer.process.pid, signal.SIGCONT)
    # From here on this side calls nothing but progress(), every 5 ms.
    landed = peer.collect(len(tags), timeout_s=60)
    assert {bytes.fromhex(arrival["tag"]) for arrival in landed} == tags
    assert len(landed) == len(tags)


@pytest.mark.parametrize("again", [False, True], ids=["gone for good", "connected again"])
def test_a_write_in_flight_to_a_disconnected_peer_ends_when_it_has_landed(
    crew: Any, engine: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent peer is disconnected, and memory of its rooms is freed once nothing is in flight: not before."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # as between hosts
    agent, peer = crew.agent(engine), crew.peer(engine)
    agent.transport.connect("peer", peer.metadata)
    agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"warm"))
    peer.collect(1)
    os.kill(peer.process.pid, signal.SIGSTOP)
    wanted = np.frombuffer(os.urandom(POOL_BYTES), np.uint8)
    agent.pool[:] = wanted
    write = agent.transport.write("peer", agent.at(0), peer.at(0), sizes(POOL_BYTES), b"late")
    until = time.monotonic() + 60
    while getattr(write, "post_ns", None) == 0:  # threads of a copy pool post it, unless the peer is disconnected first
        assert time.monotonic() < until
        time.sleep(0.001)
    agent.transport.disconnect("peer")
    if engine != "loopback":  # which copies in the call itself
        assert not write.release()
    os.kill(peer.process.pid, signal.SIGCONT)
    if again:
        agent.transport.connect("peer", peer.metadata)
    until = time.monotonic() + 60
    while not write.release():
        assert time.monotonic() < until
        agent.wait()
    agent.pool[:] = 0  # the source has another owner now
    last = POOL_BYTES - 4096
    assert peer.read(last, 4096) == wanted[last:].tobytes()
    if again:
        agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"once more"))
        tag = b"late".hex()  # which an engine may drop with the connection
        while tag == b"late".hex():
            tag = peer.collect(1)[-1]["tag"]
        assert tag == b"once more".hex()


def test_what_a_killed_peer_had_sent_lands_within_a_few_polls(
    crew: Any, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control loop reports the end of a process after so many polls, and then its pages have new owners."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # bytes in sockets outlive the writer
    agent, peer = crew.agent(engine), crew.peer(engine)
    peer.ask("connect", peer="here", metadata=agent.transport.metadata().hex())
    peer.ask("flood", peer="here", addr=agent.addr)
    until = time.monotonic() + 60
    while not agent.transport.arrivals():
        assert time.monotonic() < until
        agent.wait()
    time.sleep(0.01)  # nobody polls: the sockets fill up
    peer.kill()
    for _ in range(_LANDING_ROUNDS):
        agent.transport.arrivals()
        time.sleep(_LANDING_PAUSE_S)
    landed = agent.pool.copy()
    for _ in range(200):
        agent.transport.arrivals()
        time.sleep(0.001)
    assert np.array_equal(landed, agent.pool)


def test_connecting_to_a_peer_that_is_gone_is_an_error_at_the_latest_when_writing(crew: Any, engine: str) -> None:
    agent, peer = crew.agent(engine), crew.peer(engine)
    peer.kill()

    def attempt() -> None:
        agent.transport.connect("peer", peer.metadata)
        agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"t"))

    until_disconnected(attempt)


def test_a_forgotten_peer_cannot_be_written_until_connected_again(crew: Any, engine: str) -> None:
    one, two = crew.agent(engine), crew.agent(engine)
    one.transport.connect("two", two.transport.metadata())
    one.transport.disconnect("two")
    one.transport.disconnect("two")
    with pytest.raises(TransportError, match="not connected"):
        one.transport.tell("two", b"t")
    one.transport.connect("two", two.transport.metadata())
    one.finish(one.transport.write("two", one.at(0), two.at(0), sizes(4096), b"back"))
    assert [arrival.tag for arrival in two.collect(1)] == [b"back"]


def test_memory_registered_later_is_reachable_after_connecting_anew(crew: Any, engine: str) -> None:
    from kvctl_agent.transport import Region

    one, two = crew.agent(engine), crew.agent(engine)
    one.transport.connect("two", two.transport.metadata())
    more = np.zeros(8192, np.uint8)
    two.transport.register([Region(more.ctypes.data, more.nbytes)])
    one.transport.connect("two", two.transport.metadata())
    one.pool[:4096] = 7
    target = np.array([more.ctypes.data], np.uint64)
    one.finish(one.transport.write("two", one.at(0), target, sizes(4096), b"t"))
    two.collect(1)
    assert more[:4096].tolist() == [7] * 4096
    two.transport.close()
