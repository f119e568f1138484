"""NIXL with threads: parameters, order of bytes and tags, idle cost, a peer that is stopped before it is wired up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvctl_agent.errors import ConfigError, PeerDisconnected
from kvctl_agent.transport import open_transport
from kvctl_agent.transport.nixl.threads import thread_count, with_threads

THREADS = 4
ENGINE = f"nixl num_threads={THREADS},split_batch_size=128"
ROWS, ROW_BYTES = 2048, 512


def rows(agent: Any, order: Any) -> Any:
    return agent.at(*(order * ROW_BYTES))


def post(agent: Any, peer: Any, tag: bytes | None = b"t") -> Any:
    """Posts a write of random rows, which NIXL divides among its threads."""
    order = np.random.default_rng(5).permutation(ROWS)
    sizes = np.full(ROWS, ROW_BYTES, np.uint64)
    return agent.transport.write("peer", rows(agent, order), rows(peer, order), sizes, tag)


@pytest.mark.parametrize(
    ("configured", "automatic", "complete"),
    [
        ({}, 0, {}),
        ({}, 4, {"num_threads": "4", "split_batch_size": "128"}),
        ({"num_threads": "2"}, 4, {"num_threads": "2", "split_batch_size": "128"}),
        ({"num_threads": "2"}, 0, {"num_threads": "2", "split_batch_size": "128"}),
        ({"num_threads": "0"}, 4, {"num_threads": "0"}),
        ({"split_batch_size": "9"}, 4, {"num_threads": "4", "split_batch_size": "9"}),
        ({"backend": "UCX"}, 4, {"backend": "UCX", "num_threads": "4", "split_batch_size": "128"}),
        ({"backend": "POSIX"}, 4, {"backend": "POSIX"}),
    ],
)
def test_configured_parameters_win(configured: dict[str, str], automatic: int, complete: dict[str, str]) -> None:
    assert with_threads(configured, automatic) == complete


@pytest.mark.parametrize("text", ["", "-1", "two", "1.5", "²"])
def test_a_wrong_number_of_threads_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="num_threads is"):
        thread_count({"num_threads": text})
    with pytest.raises(ConfigError, match="num_threads is"):
        open_transport("nixl", "a", {"num_threads": text})


def test_the_threads_live_as_long_as_the_transport(no_leaks: None) -> None:
    before = len(list(Path("/proc/self/task").iterdir()))
    transport = open_transport("nixl", "a", {"num_threads": str(THREADS)})
    assert len(list(Path("/proc/self/task").iterdir())) >= before + THREADS
    assert transport.describe()["threads"] == THREADS
    transport.close()


@pytest.mark.parametrize("lanes", ["all", "tcp,self"])
def test_the_bytes_of_all_threads_are_there_when_the_tag_is_seen(
    crew: Any, lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", lanes)
    one, two = crew.agent(ENGINE), crew.agent(ENGINE)
    one.transport.connect("peer", two.transport.metadata())
    for value in range(1, 41):
        one.pool[:] = value
        write = post(one, two, bytes([value]))
        landed: list[Any] = []
        until = time.monotonic() + 60
        while not landed and time.monotonic() < until:
            write.poll()
            landed = two.transport.arrivals()
            if landed:
                assert (two.pool[: ROWS * ROW_BYTES] == value).all()
        assert [arrival.tag for arrival in landed] == [bytes([value])]
        one.finish(write)


def test_idle_threads_sleep(crew: Any, at_best: Callable[[Callable[[], float], float], None]) -> None:
    agent, peer = crew.agent(ENGINE), crew.peer(ENGINE)
    agent.transport.connect("peer", peer.metadata)
    agent.finish(post(agent, peer))
    assert len(peer.collect(1)) == 1

    def share() -> float:
        started, cpu = time.monotonic(), time.process_time()
        time.sleep(0.5)
        return (time.process_time() - cpu) / (time.monotonic() - started)

    at_best(share, 0.01)
    at_best(lambda: peer.ask("idle", seconds=0.5, poll_s=0.0)["share"], 0.01)


def test_disconnecting_a_stopped_peer_ends_its_writes_and_the_polling_of_the_threads(
    crew: Any, at_best: Callable[[Callable[[], float], float], None]
) -> None:
    agent, peer = crew.agent(ENGINE), crew.peer(ENGINE)
    os.kill(peer.process.pid, signal.SIGSTOP)  # before anything is wired up, so that the write cannot complete
    agent.transport.connect("peer", peer.metadata)
    write = post(agent, peer)
    assert not write.poll()
    agent.transport.disconnect("peer")
    with pytest.raises(PeerDisconnected):
        agent.finish(write)

    def share() -> float:
        started, cpu = time.monotonic(), time.process_time()
        time.sleep(0.2)
        return (time.process_time() - cpu) / (time.monotonic() - started)

    at_best(share, 0.1)
    peer.kill()
