"""NIXL's known defects, each with a measurement that fails if its workaround is lost."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from kvctl_agent.errors import ConfigError, TransportUnavailable
from kvctl_agent.layout.page_indices import FEW
from kvctl_agent.transport import open_transport
from kvctl_agent.transport.nixl.transport import _total
from tests.support.engines import run_with_engines

IDLE_SHARE = 0.03


def sizes(nbytes: int, count: int = 1) -> np.ndarray:
    return np.full(count, nbytes, np.uint64)


def test_an_idle_agent_takes_less_than_three_percent_of_a_core(crew: Any, at_best: Any) -> None:
    agent, peer = crew.agent("nixl"), crew.peer("nixl")
    agent.transport.connect("peer", peer.metadata)
    peer.ask("connect", peer="writer", metadata=agent.transport.metadata().hex())
    agent.transport.tell("peer", b"wired up")
    assert len(peer.collect(1)) == 1
    # Without a thread that polls, nothing at all runs in a process that does not call.
    at_best(lambda: peer.ask("idle", seconds=0.5, poll_s=0.0)["share"], IDLE_SHARE / 10)
    at_best(lambda: peer.ask("idle", seconds=0.5, poll_s=0.005)["share"], IDLE_SHARE)


def test_a_first_write_wires_up_with_a_target_that_looks_every_five_milliseconds(crew: Any) -> None:
    agent, peer = crew.agent("nixl"), crew.peer("nixl")
    agent.transport.connect("peer", peer.metadata)
    started = time.monotonic()
    agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"t"))
    assert time.monotonic() - started < 20  # 25 to 40 ms; without its looks it never completes
    assert len(peer.collect(1)) == 1


def test_a_target_that_calls_nothing_holds_up_writes_until_it_calls_again(crew: Any) -> None:
    agent, peer = crew.agent("nixl"), crew.peer("nixl")
    agent.transport.connect("peer", peer.metadata)
    agent.finish(agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"wired up"))
    peer.ask("rest")  # until it is asked again
    writes = [agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"%d" % n) for n in range(8)]
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        assert not any([write.poll() for write in writes])  # noqa: C419 - each is to be driven
        time.sleep(0.001)
    peer.send("collect", count=0, timeout_s=0)
    peer.answer()
    for write in writes:
        agent.finish(write)
    assert len(peer.collect(9)) == 9


def test_a_tag_leaves_only_while_its_write_is_polled_or_drained(crew: Any) -> None:
    agent, peer = crew.agent("nixl"), crew.peer("nixl")
    # A peer that stands still while the first write is posted keeps it in progress: nothing is wired up yet.
    os.kill(peer.process.pid, signal.SIGSTOP)
    agent.transport.connect("peer", peer.metadata)
    write = agent.transport.write("peer", agent.at(0), peer.at(0), sizes(4096), b"t")
    in_flight = agent.transport._in_flight
    assert in_flight.reach(write.peer)
    os.kill(peer.process.pid, signal.SIGCONT)
    assert peer.collect(1, timeout_s=0.5) == []
    until = time.monotonic() + 60
    while not write.release():
        agent.transport.arrivals()
        assert time.monotonic() < until
    assert len(peer.collect(1)) == 1
    assert not in_flight.reach(write.peer)


def test_a_process_with_an_unclosed_agent_exits_cleanly_and_says_nothing_on_stdout() -> None:
    done = run_with_engines(
        "pool = np.zeros(4096, np.uint8)\n"
        "a, b = open_transport('nixl', 'a'), open_transport('nixl', 'b')\n"
        "a.register([Region(pool.ctypes.data, 4096)]); b.register([Region(pool.ctypes.data, 4096)])\n"
        "a.connect('b', b.metadata()); a.tell('b', b'x')\n"
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_what_the_engine_logs_goes_to_stderr_at_every_level() -> None:
    done = run_with_engines(
        "import logging\n"
        "t = open_transport('nixl', 'a')\n"
        "logging.getLogger('nixl.api').warning('from python'); t.close()\n",
        NIXL_LOG_LEVEL="INFO",
        UCX_LOG_LEVEL="info",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "from python" in done.stderr


def test_parameters_are_checked_against_the_backend() -> None:
    with pytest.raises(ConfigError, match=r"no parameter 'nmu_threads'; allowed: .*num_threads"):
        open_transport("nixl", "a", {"nmu_threads": "2"})
    with pytest.raises(TransportUnavailable, match=r"no backend 'UCCX'; it has .*UCX"):
        open_transport("nixl", "a", {"backend": "UCCX"})


def test_a_backend_parameter_reaches_the_backend() -> None:
    transport = open_transport("nixl", "a", {"backend": "UCX", "num_threads": "1"})
    assert transport.describe()["backend"] == "UCX"
    transport.close()


@pytest.mark.parametrize("length", [0, 1, 2, FEW, FEW + 1, 3 * FEW])
def test_sizes_are_added(length: int) -> None:
    assert _total(np.arange(length, dtype=np.uint64)) == length * (length - 1) // 2
