"""NIXL with threads: parameters, order of bytes and tags, idle cost, a peer that is stopped before it is wired up."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvctl_agent.errors import ConfigError, PeerDisconnected, TransportError
from kvctl_agent.memory.host_copier import CopyPool
from kvctl_agent.transport import Region, open_transport
from kvctl_agent.transport.nixl.binding import Engine, load
from kvctl_agent.transport.nixl.native_requests import open_library
from kvctl_agent.transport.nixl.threads import (
    DESCRIPTORS_PER_THREAD,
    SLICE_BYTES,
    SliceTags,
    thread_count,
    with_threads,
)
from kvctl_agent.transport.nixl.transport import NixlTransport

THREADS = 4
POOL = f"nixl+pool num_threads={THREADS},split_batch_size=128"
ALTERNATING = f"nixl+alternating num_threads={THREADS},split_batch_size=128"
ALL = pytest.mark.parametrize("engine", [POOL, ALTERNATING])
ROWS, ROW_BYTES = 2048, 512


def rows(agent: Any, order: Any) -> Any:
    return agent.at(*(order * ROW_BYTES))


def post(agent: Any, peer: Any, tag: bytes | None = b"t") -> Any:
    """Posts a write of random rows, which is divided among the threads."""
    order = np.random.default_rng(5).permutation(ROWS)
    sizes = np.full(ROWS, ROW_BYTES, np.uint64)
    return agent.transport.write("peer", rows(agent, order), rows(peer, order), sizes, tag)


@pytest.mark.parametrize(
    ("configured", "automatic", "complete"),
    [
        ({}, 0, {}),
        ({}, 4, {"num_threads": "4"}),
        ({"num_threads": "2"}, 4, {"num_threads": "2"}),
        ({"num_threads": "2"}, 0, {"num_threads": "2"}),
        ({"num_threads": "0"}, 4, {"num_threads": "0"}),
        ({"split_batch_size": "9"}, 4, {"num_threads": "4", "split_batch_size": "9"}),
        ({"backend": "UCX"}, 4, {"backend": "UCX", "num_threads": "4"}),
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


def test_only_threads_of_a_copy_pool_post(crew: Any) -> None:
    assert crew.agent(POOL).transport.describe()["threads"] == THREADS
    assert crew.agent(f"nixl num_threads={THREADS}").transport.describe()["threads"] == 0


def test_a_nixl_that_native_code_cannot_call_is_named_and_called_through_its_binding(
    crew: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvctl_agent.transport.nixl.binding._version", lambda package: "1.6.0")
    one, two = crew.agent("nixl"), crew.agent("nixl")
    described = one.transport.describe()
    assert described["posts"] == "binding"
    assert described["why_binding"] == (
        "NIXL 1.6.0 is another version; kvctl calls NIXL 1.5 natively: pip install 'nixl~=1.5.0'"
    )
    one.transport.connect("peer", two.transport.metadata())
    one.pool[:] = 7
    one.finish(post(one, two))
    assert [arrival.tag for arrival in two.collect(1)] == [b"t"]
    assert (two.pool[: ROWS * ROW_BYTES] == 7).all()


def test_a_binding_without_pybind11s_conduit_is_named() -> None:
    binding, version = load()
    with pytest.raises(TransportError, match=r"cannot be called \(.*_pybind11_conduit_v1_.*pip install 'nixl~=1.5.0'"):
        open_library(Engine(binding, object(), version, (), lambda: None))


def test_threads_that_post_nothing_have_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker takes ten descriptors, and every call of the transport polls all workers."""

    def descriptors(params: dict[str, str], pool: CopyPool) -> int:
        before = len(list(Path("/proc/self/fd").iterdir()))
        transport = NixlTransport("a", params, copy_pool=pool)
        opened = len(list(Path("/proc/self/fd").iterdir())) - before
        assert transport.describe()["posts"] == "binding"
        transport.close()
        return opened

    monkeypatch.setattr("kvctl_agent.transport.nixl.binding._version", lambda package: "1.6.0")
    with contextlib.closing(CopyPool(THREADS, 0).start()) as pool:
        descriptors({}, pool)  # the first agent opens some that stay
        assert descriptors({"num_threads": str(THREADS)}, pool) <= descriptors({}, pool) + DESCRIPTORS_PER_THREAD // 2


@ALL
@pytest.mark.parametrize("lanes", ["all", "tcp,self"])
def test_the_bytes_of_all_threads_are_there_when_the_tag_is_seen(
    crew: Any, engine: str, lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", lanes)
    one, two = crew.agent(engine), crew.agent(engine)
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


@ALL
@pytest.mark.parametrize("bad", [0, ROWS // THREADS // 2, ROWS - 1])
def test_a_copy_that_fails_in_any_slice_fails_the_write_and_its_tag_does_not_arrive(
    crew: Any, engine: str, bad: int
) -> None:
    one, two = crew.agent(engine), crew.agent(engine)
    page = mmap.PAGESIZE
    target = mmap.mmap(-1, ROWS * page)
    start = np.frombuffer(target, np.uint8).ctypes.data
    two.transport.register([Region(start, ROWS * page)])
    one.transport.connect("peer", two.transport.metadata())
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(start + bad * page, page, mmap.PROT_READ) == 0
    rows, nbytes = np.arange(ROWS), np.full(ROWS, 256, np.uint64)
    there = (start + rows * page).astype(np.uint64)
    with pytest.raises(PeerDisconnected):
        one.finish(one.transport.write("peer", one.at(*(rows * 512)), there, nbytes, b"t"))
    assert two.collect(1, timeout_s=0.1) == []


@pytest.mark.parametrize(
    ("pages", "tag", "few_cores", "on_threads"),
    [(65, b"t", False, True), (64, b"t", False, False), (65, None, False, False), (65, b"t", True, False)],
)
def test_the_threads_of_a_copy_pool_post_a_write_that_takes_longer_than_the_hand_over(
    crew: Any, pages: int, tag: bytes | None, few_cores: bool, on_threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that is posted by the control loop keeps it from everything else while it copies."""
    one, two = crew.agent(POOL), crew.agent(POOL)
    one.transport.connect("peer", two.transport.metadata())
    monkeypatch.setattr(one.transport._copy_pool, "considerate", few_cores)
    handed_over: list[int] = []
    run = one.transport._copy_pool.run
    monkeypatch.setattr(
        one.transport._copy_pool, "run", lambda count, owner: handed_over.append(count) or run(count, owner)
    )
    one.pool[:] = 7
    offsets, sizes = np.arange(pages) * 4096, np.full(pages, 4096, np.uint64)
    one.finish(one.transport.write("peer", one.at(*offsets), two.at(*offsets), sizes, tag))
    assert len(handed_over) == on_threads
    assert [arrival.tag for arrival in two.collect(1, timeout_s=60 if tag else 0.1)] == ([tag] if tag else [])
    assert (two.pool[: pages * 4096] == 7).all()


@ALL
def test_writes_share_a_tag_that_arrives_after_the_bytes_of_all(crew: Any, engine: str) -> None:
    one, two = crew.agent(engine), crew.agent(engine)
    one.transport.connect("peer", two.transport.metadata())
    sizes = np.full(8, SLICE_BYTES, np.uint64)
    offsets = np.arange(8) * SLICE_BYTES
    for value in range(1, 21):
        one.pool[:] = value
        shared = one.transport.share_tag(bytes([value]), 8)
        writes = []
        for lo, hi in ((0, 1), (1, 5), (5, 7)):
            writes.append(
                one.transport.write("peer", one.at(*offsets[lo:hi]), two.at(*offsets[lo:hi]), sizes[lo:hi], shared)
            )
        for write in writes:
            one.finish(write)
        assert two.collect(1, timeout_s=0.01) == [], "one descriptor is missing"
        one.finish(one.transport.write("peer", one.at(*offsets[7:]), two.at(*offsets[7:]), sizes[7:], shared))
        assert [arrival.tag for arrival in two.collect(1)] == [bytes([value])]
        assert (two.pool[: 8 * SLICE_BYTES] == value).all()


@ALL
def test_a_copy_that_fails_withholds_a_shared_tag(crew: Any, engine: str) -> None:
    one, two = crew.agent(engine), crew.agent(engine)
    page = mmap.PAGESIZE
    target = mmap.mmap(-1, 8 * SLICE_BYTES)
    start = np.frombuffer(target, np.uint8).ctypes.data
    two.transport.register([Region(start, 8 * SLICE_BYTES)])
    one.transport.connect("peer", two.transport.metadata())
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(start + 3 * SLICE_BYTES, page, mmap.PROT_READ) == 0
    shared = one.transport.share_tag(b"t", 8)
    failed = 0
    for number in range(8):
        here, there = one.at(number * SLICE_BYTES), np.array([start + number * SLICE_BYTES], np.uint64)
        write = one.transport.write("peer", here, there, np.array([SLICE_BYTES], np.uint64), shared)
        try:
            one.finish(write)
        except PeerDisconnected:
            failed += 1
    assert failed
    assert two.collect(1, timeout_s=0.1) == []


@ALL
def test_only_a_transport_with_threads_shares_tags(crew: Any, engine: str) -> None:
    assert crew.agent("nixl").transport.share_tag(b"t", 8) is None
    assert crew.agent(engine).transport.share_tag(b"t", 1) is None


@ALL
def test_released_writes_complete_and_tell_their_tags(crew: Any, engine: str) -> None:
    one, two = crew.agent(engine), crew.agent(engine)
    one.transport.connect("peer", two.transport.metadata())
    one.pool[:] = 7
    writes = [post(one, two, b"%d" % number) for number in range(8)]
    for write in writes:
        write.release()
    assert sorted(arrival.tag for arrival in two.collect(8)) == [b"%d" % number for number in range(8)]
    assert (two.pool[: ROWS * ROW_BYTES] == 7).all()
    until = time.monotonic() + 60
    while not all([write.release() for write in writes]):  # noqa: C419 - each is to be driven
        assert time.monotonic() < until
        one.wait()


@ALL
def test_all_writes_to_a_peer_that_dies_end(crew: Any, engine: str) -> None:
    agent, peer = crew.agent(engine), crew.peer(engine)
    agent.transport.connect("peer", peer.metadata)
    agent.finish(post(agent, peer))
    os.kill(peer.process.pid, signal.SIGSTOP)
    writes = [post(agent, peer) for _ in range(20)]
    peer.kill()
    for write in writes:
        with contextlib.suppress(PeerDisconnected):  # those that were complete before end without an error
            agent.finish(write)
    with pytest.raises(PeerDisconnected):
        agent.finish(post(agent, peer))


@ALL
def test_closing_with_writes_to_a_stopped_peer_is_bounded(crew: Any, engine: str) -> None:
    agent, peer = crew.agent(engine), crew.peer(engine)
    os.kill(peer.process.pid, signal.SIGSTOP)
    agent.transport.connect("peer", peer.metadata)
    write = post(agent, peer)
    started = time.monotonic()
    agent.transport.close()
    assert time.monotonic() - started < 20
    with pytest.raises(TransportError, match="when the transport was closed"):
        write.poll()
    peer.kill()


class TestSliceTags:
    def test_a_tag_arrives_with_the_last_slice(self) -> None:
        sender, target = SliceTags(), SliceTags()
        first, second = (sender.slice(sender.share(tag, 3), 1) for tag in (b"first", b"second"))
        received = [target.join("a", each) for each in (first, second, first, first, second, second)]
        assert received == [None, None, None, b"first", None, b"second"]

    def test_a_slice_counts_as_often_as_it_has_descriptors(self) -> None:
        sender, target = SliceTags(), SliceTags()
        shared = sender.share(b"t", 6)
        received = [target.join("a", sender.slice(shared, count)) for count in (1, 3, 2)]
        assert received == [None, None, b"t"]

    def test_whole_writes_and_other_senders_do_not_count(self) -> None:
        sender, target = SliceTags(), SliceTags()
        sent = sender.slice(sender.share(b"t", 2), 1)
        assert target.join("a", sent) is None
        assert target.join("b", sent) is None
        assert target.join("a", sender.whole(b"whole")) == b"whole"
        assert target.join("a", sent) == b"t"

    def test_slices_of_a_forgotten_sender_are_gone(self) -> None:
        sender, target = SliceTags(), SliceTags()
        sent = sender.slice(sender.share(b"t", 2), 1)
        assert target.join("a", sent) is None
        target.forget("a")
        assert target.join("a", sent) is None

    def test_writes_that_never_get_complete_take_bounded_memory(self) -> None:
        sender, target = SliceTags(), SliceTags()
        sent = [sender.slice(sender.share(b"t", 2), 1) for _ in range(5000)]
        assert all(target.join("a", each) is None for each in sent)
        assert target.join("a", sent[-1]) == b"t"
        assert target.join("a", sent[0]) is None

    @pytest.mark.parametrize("received", [b"", b"\1", b"\1" * 13])
    def test_what_no_agent_sends_is_ignored(self, received: bytes) -> None:
        assert SliceTags().join("a", received) is None


@ALL
def test_idle_threads_sleep(crew: Any, engine: str, at_best: Callable[[Callable[[], float], float], None]) -> None:
    agent, peer = crew.agent(engine), crew.peer(engine)
    agent.transport.connect("peer", peer.metadata)
    agent.finish(post(agent, peer))
    assert len(peer.collect(1)) == 1

    def share() -> float:
        started, cpu = time.monotonic(), time.process_time()
        time.sleep(0.5)
        return (time.process_time() - cpu) / (time.monotonic() - started)

    at_best(share, 0.01)
    at_best(lambda: peer.ask("idle", seconds=0.5, poll_s=0.0)["share"], 0.01)


@ALL
def test_a_write_to_a_stopped_peer_costs_nothing_and_ends_when_its_process_has_ended(
    crew: Any, engine: str, at_best: Callable[[Callable[[], float], float], None]
) -> None:
    agent, peer = crew.agent(engine), crew.peer(engine)
    os.kill(peer.process.pid, signal.SIGSTOP)  # before anything is wired up, so that the write cannot complete
    agent.transport.connect("peer", peer.metadata)
    write = post(agent, peer)
    assert not write.poll()

    def share() -> float:
        started, cpu = time.monotonic(), time.process_time()
        time.sleep(0.2)
        return (time.process_time() - cpu) / (time.monotonic() - started)

    at_best(share, 0.05)
    agent.transport.disconnect("peer")
    assert not write.poll()
    os.kill(peer.process.pid, signal.SIGKILL)
    agent.transport.ended(peer.metadata)
    with pytest.raises(PeerDisconnected):
        agent.finish(write)
    peer.kill()
