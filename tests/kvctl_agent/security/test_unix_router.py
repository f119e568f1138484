"""A ROUTER of our own on a Unix socket: with libzmq's DEALERs, with hostile clients, and out of descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvctl_agent.security.unix_router import UnixRouter

Context = zmq.Context[zmq.Socket[bytes]]
Make = Callable[..., UnixRouter]
Dealer = Callable[..., zmq.Socket[bytes]]
WAIT_MS = 60_000


@pytest.fixture
def make(socket_dir: Path) -> Iterator[Make]:
    made: list[UnixRouter] = []

    def start(**options: Any) -> UnixRouter:
        made.append(UnixRouter(socket_dir / f"r{len(made)}", 1 << 20, **options))
        return made[-1]

    yield start
    for router in made:
        router.close()
        Path(router.address.removeprefix("ipc://")).unlink(missing_ok=True)


@pytest.fixture
def dealer(zmq_context: Context) -> Iterator[Dealer]:
    clients: list[zmq.Socket[bytes]] = []

    def connect(router: UnixRouter, name: bytes = b"") -> zmq.Socket[bytes]:
        client = zmq_context.socket(zmq.DEALER)
        clients.append(client)
        client.linger = 0
        if name:
            client.setsockopt(zmq.IDENTITY, name)
        client.connect(router.address)
        return client

    yield connect
    for client in clients:
        client.close()


def raw(router: UnixRouter) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(router.address.removeprefix("ipc://"))
    return client


def hung_up(client: socket.socket) -> bool:
    try:
        return not client.recv(4096)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def echo(router: UnixRouter, client: zmq.Socket[bytes], *frames: bytes) -> list[bytes]:
    """Sends `frames` to the router and back."""
    client.send_multipart(frames)
    assert router.poll(WAIT_MS)
    router.send_multipart(router.recv_multipart())
    return read(router, client)


def read(router: UnixRouter, client: zmq.Socket[bytes]) -> list[bytes]:
    """The router's owner goes on while the client waits: what is queued leaves in its turns."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not client.poll(1):
        assert time.monotonic() < deadline, "the client gets nothing"
        router.poll(0)
    return client.recv_multipart()


def _admitted(router: UnixRouter, count: int) -> None:
    deadline = time.monotonic() + WAIT_MS / 1000
    while router.connections < count:
        assert time.monotonic() < deadline, f"{router.connections} of {count} clients have connected"
        router.poll(10)


class TestMessages:
    def test_frames_go_both_ways(self, make: Make, dealer: Dealer) -> None:
        router = make()
        client = dealer(router)
        for frames in ((b"a",), (b"", b"b" * 255, b"c" * 256), (b"d" * (1 << 19), b"")):
            assert echo(router, client, *frames) == list(frames)
        client.close()

    def test_its_descriptor_is_readable_as_long_as_messages_wait(self, make: Make, dealer: Dealer) -> None:
        router = make()
        client = dealer(router)
        poller = zmq.Poller()
        poller.register(router.fileno(), zmq.POLLIN)
        for number in range(50):
            client.send(b"%d" % number)
        found = []
        while len(found) < 50:
            assert poller.poll(WAIT_MS), "messages wait, and the descriptor does not say so"
            try:
                found.append(router.recv_multipart()[1])
            except zmq.Again:  # no message is complete yet
                continue
        assert found == [b"%d" % number for number in range(50)]
        assert not poller.poll(50)
        client.close()

    def test_all_messages_at_once(self, make: Make, dealer: Dealer) -> None:
        router = make()
        client = dealer(router)
        for number in range(50):
            client.send(b"%d" % number)
        assert router.poll(WAIT_MS)
        found = [router.recv_multipart()[1]]
        while len(found) < 50:
            assert router.poll(WAIT_MS)
            found += [frames[1] for frames in router.recv_all()]
        assert found == [b"%d" % number for number in range(50)]
        assert router.recv_all() == []
        poller = zmq.Poller()
        poller.register(router.fileno(), zmq.POLLIN)
        assert not poller.poll(0)
        client.close()

    def test_a_limited_call_leaves_the_rest_readable(self, make: Make, dealer: Dealer) -> None:
        router = make()
        client = dealer(router)
        for number in range(5):
            client.send(b"%d" % number)
        found: list[bytes] = []
        poller = zmq.Poller()
        poller.register(router.fileno(), zmq.POLLIN)
        while len(found) < 5:
            assert poller.poll(WAIT_MS)
            messages = router.recv_all(2)
            assert len(messages) <= 2
            found += [frames[1] for frames in messages]
        assert found == [b"%d" % number for number in range(5)]
        assert not poller.poll(0)
        client.close()

    def test_a_new_connection_takes_the_name_of_an_older_one(self, make: Make, dealer: Dealer) -> None:
        router = make(peers_choose_names=True)
        for _ in range(2):
            client = dealer(router, b"decode-0")
            client.send(b"here")
            assert router.poll(WAIT_MS)
            assert router.recv_multipart() == [b"decode-0", b"here"]
            router.send_multipart([b"decode-0", b"you"])
            assert read(router, client) == [b"you"]
            assert router.connections == 1

    def test_names_that_clients_choose_count_only_where_they_may(self, make: Make, dealer: Dealer) -> None:
        router = make()
        clients = [dealer(router, b"same") for _ in range(2)]
        assert [echo(router, client, b"1") for client in clients] == [[b"1"], [b"1"]]

    def test_a_send_to_nobody_is_an_error(self, make: Make) -> None:
        with pytest.raises(zmq.ZMQError, match="Host unreachable"):
            make().send_multipart([b"nobody", b"x"])

    def test_a_peer_that_does_not_read_is_waited_for_no_longer_than_said(self, make: Make, dealer: Dealer) -> None:
        router = make()
        client = raw(router)
        client.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48))
        client.sendall(b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x00\x01x")
        assert router.poll(WAIT_MS)
        name, _ = router.recv_multipart()
        for _ in range(16):
            router.send_multipart([name, bytes(1 << 20)])
        with pytest.raises(zmq.Again):
            router.send_multipart([name, bytes(1 << 20)], timeout_ms=10)
        client.close()

    def test_a_full_queue_takes_more_when_its_peer_has_read(self, make: Make) -> None:
        router = make()
        with raw(router) as client:
            client.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48))
            client.sendall(b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x00\x01x")
            assert router.poll(WAIT_MS)
            name, _ = router.recv_multipart()
            with contextlib.suppress(zmq.Again):
                while True:
                    router.send_multipart([name, bytes(1 << 16)])
            client.setblocking(False)
            for _ in range(1000):  # without an event of the router in between
                with contextlib.suppress(BlockingIOError):
                    while client.recv(1 << 20):
                        pass
                router.send_multipart([name, bytes(1 << 16)])

    def test_what_is_queued_leaves_before_the_close(self, make: Make, dealer: Dealer) -> None:
        router = make()
        client = dealer(router)
        echo(router, client, b"hello")
        client.send(b"more")
        assert router.poll(WAIT_MS)
        router.send_multipart([router.recv_multipart()[0], bytes(1 << 22)])
        router.close(WAIT_MS)
        assert client.poll(WAIT_MS)
        assert len(client.recv()) == 1 << 22
        client.close()


class TestAdmission:
    def test_the_path_is_ours_alone(self, make: Make, socket_dir: Path) -> None:
        make()
        assert stat.S_IMODE((socket_dir / "r0").stat().st_mode) == 0o600

    def test_connections_of_other_users_are_closed(
        self, make: Make, dealer: Dealer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refusals: list[str] = []
        router = make(refused=refusals.append)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        monkeypatch.setattr("kvctl_agent.security.unix_router._ROOT", -1)
        client = raw(router)
        router.poll(200)
        assert client.recv(1) == b""
        assert router.connections == 0
        assert "uid" in refusals[0]
        client.close()

    def test_a_client_is_heard_behind_many_that_say_nothing(self, make: Make, dealer: Dealer) -> None:
        router = make(limit=8)
        silent = []
        for _ in range(40):
            silent.append(raw(router))
            router.poll(0)
        client = dealer(router)
        assert echo(router, client, b"1") == [b"1"]
        silent += [raw(router) for _ in range(40)]
        assert echo(router, client, b"2") == [b"2"]  # the same connection: it has spoken, the others have not
        assert router.connections <= 8
        for each in silent:
            each.close()
        client.close()

    def test_junk_costs_its_sender_the_connection(self, make: Make) -> None:
        router = make()
        client = raw(router)
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        client.setblocking(False)
        deadline = time.monotonic() + WAIT_MS / 1000
        while not hung_up(client):
            assert time.monotonic() < deadline, "the connection stays open"
            router.poll(10)
        assert router.connections == 0
        client.close()


class TestOutOfDescriptors:
    @pytest.fixture
    def hog(self) -> Iterator[Callable[[], list[int]]]:
        """Uses up all descriptors of this process."""
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken: list[int] = []

        def all_of_them() -> list[int]:
            resource.setrlimit(resource.RLIMIT_NOFILE, (_highest() + 8, before[1]))
            while True:
                try:
                    taken.append(os.dup(2))
                except OSError:
                    return taken

        yield all_of_them
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)

    def test_one_client_after_the_other_is_answered(
        self, make: Make, dealer: Dealer, hog: Callable[[], list[int]]
    ) -> None:
        router = make()
        clients = [dealer(router) for _ in range(2)]
        unused = [socket.socket(socket.AF_UNIX) for _ in range(20)]
        _admitted(router, 2)  # the clients' own descriptors are this process's, too
        hog()
        for client in clients:
            assert echo(router, client, b"1") == [b"1"]
        for each in unused:  # far more than there are descriptors in reserve
            each.connect(router.address.removeprefix("ipc://"))
            router.poll(0)
        assert echo(router, clients[0], b"2") == [b"2"]
        for each in unused:
            each.close()

    def test_a_client_that_got_the_last_one_stays(self, make: Make, hog: Callable[[], list[int]]) -> None:
        """accept() fails for want of a descriptor before it looks whether anybody waits."""
        router = make()
        client = socket.socket(socket.AF_UNIX)
        hog()
        while len(router._reserve) > 1:  # as if other threads had been quicker
            os.close(router._reserve.pop())
        hog()
        client.connect(router.address.removeprefix("ipc://"))
        for _ in range(3):
            router.poll(0)
        assert router.connections == 1
        client.close()

    def test_without_any_it_waits_until_some_are_free(
        self, make: Make, dealer: Dealer, hog: Callable[[], list[int]]
    ) -> None:
        router = make()
        first = socket.socket(socket.AF_UNIX)
        taken = hog()
        for spare in router._reserve:  # as if other threads had been quicker each time
            os.close(spare)
        router._reserve.clear()
        hog()
        first.connect(router.address.removeprefix("ipc://"))
        begun = time.process_time()
        assert not router.poll(300)
        assert time.process_time() - begun < 0.25, "it does not sleep"
        assert router.max_wait_ms is not None
        for _ in range(10):
            os.close(taken.pop())
        deadline = time.monotonic() + WAIT_MS / 1000
        while not router.connections:
            assert time.monotonic() < deadline, "the client is not accepted"
            router.poll(10)
        assert router.max_wait_ms is None
        first.close()


def _highest() -> int:
    return max(int(path.name) for path in Path("/proc/self/fd").iterdir())
