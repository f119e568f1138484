"""A DEALER of our own on a Unix socket: with absent, slow, broken and restarted peers."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvctl_agent.security import unix_dealer
from kvctl_agent.security.unix_dealer import UnixDealer
from kvctl_agent.security.unix_router import OPENING, UnixRouter, encode_message
from tests.support.users import NOBODY, listen_as, needs_root

WAIT_S = 60.0
MAX_BYTES = 1 << 20
Open = Callable[..., UnixDealer]


@pytest.fixture
def path(socket_dir: Path) -> Iterator[Path]:
    yield socket_dir / "r"
    (socket_dir / "r").unlink(missing_ok=True)


@pytest.fixture
def dealer(path: Path) -> Iterator[Open]:
    opened: list[UnixDealer] = []

    def connect(limit: int = 1000) -> UnixDealer:
        opened.append(UnixDealer(os.fspath(path), b"decode-0", MAX_BYTES, limit))
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


@pytest.fixture
def router(path: Path) -> Iterator[UnixRouter]:
    bound = UnixRouter(path, MAX_BYTES, peers_choose_names=True)
    yield bound
    bound.close()


def readable(client: UnixDealer, timeout_s: float = 0.0) -> bool:
    poller = select.poll()
    poller.register(client.fileno(), select.POLLIN)
    return bool(poller.poll(timeout_s * 1000))


def received(client: UnixDealer, count: int) -> list[list[bytes]]:
    """Returns the next `count` messages, waiting for the descriptor before each read."""
    found: list[list[bytes]] = []
    while len(found) < count:
        assert readable(client, WAIT_S)
        found += client.recv_all()
    return found


def routed(router: UnixRouter, client: UnixDealer, count: int) -> list[list[bytes]]:
    """Returns the next `count` messages of a router, while the client sends what its socket had no space for."""
    found: list[list[bytes]] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < count:
        assert time.monotonic() < deadline
        assert client.recv_all() == []
        if router.poll(1):
            found.append(router.recv_multipart(zmq.NOBLOCK))
    return found


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_messages_go_both_ways(router: UnixRouter, dealer: Open) -> None:
    client = dealer()
    for size in (0, 1, 255, 256, 70_000):
        client.send(b"x" * size)
    sizes = [[name, len(frame)] for name, frame in routed(router, client, 5)]
    assert sizes == [[b"decode-0", size] for size in (0, 1, 255, 256, 70_000)]
    for size in (0, 300, 200_000):
        router.send_multipart([b"decode-0", b"y" * size])
    assert received(client, 3) == [[b""], [b"y" * 300], [b"y" * 200_000]]
    assert not readable(client)


@pytest.mark.parametrize("unread", [False, True], ids=["all was read there", "something was not"])
def test_the_last_words_of_a_router_are_read_after_a_send_that_fails(
    router: UnixRouter, dealer: Open, unread: bool
) -> None:
    client = dealer()
    client.send(b"hello")
    assert routed(router, client, 1)
    router.send_multipart([b"decode-0", b"goodbye"])
    if unread:
        client.send(b"not read")
    router.close()
    client.send(b"too late")
    assert client.connected
    assert received(client, 1) == [[b"goodbye"]]
    while client.connected:
        assert readable(client, WAIT_S)
        assert client.recv_all() == []


def test_the_last_words_of_a_dealer_are_read_after_a_send_that_fails(router: UnixRouter, dealer: Open) -> None:
    client = dealer()
    client.send(b"hello")
    assert routed(router, client, 1)
    client.send(b"goodbye")
    client.close()
    with pytest.raises(zmq.ZMQError):
        router.send_multipart([b"decode-0", b"too late"])
    poller = select.poll()
    poller.register(router.fileno(), select.POLLIN)
    assert poller.poll(WAIT_S * 1000), "the descriptor shows it"
    assert router.recv_multipart() == [b"decode-0", b"goodbye"]


def test_more_than_a_socket_holds_is_sent_as_the_peer_reads(router: UnixRouter, dealer: Open) -> None:
    client = dealer()
    frames = [bytes([number]) * 500_000 for number in range(20)]
    for frame in frames:
        client.send(frame)
    assert [message[1] for message in routed(router, client, 20)] == frames
    assert not readable(client), "nothing is left to send"


def test_the_newest_message_waits_for_a_peer_that_does_not_listen_yet(path: Path, dealer: Open) -> None:
    client = dealer(limit=2)
    assert not client.connected
    for number in range(10):
        client.send(b"message %d" % number)
    router = UnixRouter(path, MAX_BYTES, peers_choose_names=True)
    try:
        assert [frame for _, frame in routed(router, client, 1)] == [b"message 9"]
        client.send(b"another")
        assert routed(router, client, 1) == [[b"decode-0", b"another"]]
    finally:
        router.close()


def test_the_queue_of_a_peer_that_does_not_read_is_limited(path: Path, dealer: Open) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        client = dealer(limit=2)
        client.send(b"x" * 900_000)  # more than the socket holds
        client.send(b"second")
        with pytest.raises(zmq.Again):
            client.send(b"one too many")


def test_a_restarted_peer_gets_whole_messages(path: Path, dealer: Open) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    listener.listen()
    client = dealer()
    client.send(b"x" * 900_000)  # more than the socket holds
    with listener.accept()[0] as peer:
        assert peer.recv(4096)
    listener.close()
    path.unlink()
    while client.connected:
        assert readable(client, WAIT_S)
        client.recv_all()
    router = UnixRouter(path, MAX_BYTES, peers_choose_names=True)
    try:
        assert routed(router, client, 1) == [[b"decode-0", b"x" * 900_000]]
    finally:
        router.close()


@pytest.mark.parametrize("data", [b"HTTP/1.1 400\r\n", OPENING + encode_message([b"x" * (MAX_BYTES + 1)]), b""])
def test_a_peer_that_breaks_the_protocol_is_disconnected(path: Path, dealer: Open, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        client = dealer()
        with listener.accept()[0] as peer:
            peer.setblocking(False)
            peer.send(data)
            peer.shutdown(socket.SHUT_WR)
            while client.connected:
                assert readable(client, WAIT_S)
                assert client.recv_all() == []
        deadline = time.monotonic() + WAIT_S
        while not client.connected:
            assert client.recv_all() == []
            assert time.monotonic() < deadline


def test_closing_waits_for_a_peer_that_reads(router: UnixRouter, dealer: Open) -> None:
    client = dealer()
    client.send(b"0")
    assert routed(router, client, 1) == [[b"decode-0", b"0"]]
    for number in range(3):
        client.send(b"%d" % number)
    client.close(linger_ms=60_000)
    client.close()
    assert [frame for _, frame in arrived(router, 3)] == [b"0", b"1", b"2"]


def arrived(router: UnixRouter, count: int) -> Iterator[list[bytes]]:
    for _ in range(count):
        assert router.poll(60_000)
        yield router.recv_multipart()


def test_without_a_descriptor_nothing_is_left_open(
    router: UnixRouter, dealer: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files()

    def no_descriptor(*_: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(unix_dealer.socket, "socket", no_descriptor)
        with pytest.raises(OSError, match="too many"):
            dealer()
    assert open_files() == before


@needs_root
def test_a_peer_of_another_user_is_sent_nothing_until_the_right_one_listens(path: Path, dealer: Open) -> None:
    with listen_as(NOBODY, path) as impostor:
        client = dealer()
        client.send(b"secret")
        assert not client.connected
        assert client.refused.startswith(f"uid {NOBODY} listens on {path}")
        taken = impostor.accept()[0]
        assert taken.recv(1) == b""  # the connection was closed unused
        taken.close()
    path.unlink()
    right = UnixRouter(path, MAX_BYTES, peers_choose_names=True)
    try:
        assert routed(right, client, 1)[0][-1] == b"secret"
        assert client.refused == ""
    finally:
        right.close()
