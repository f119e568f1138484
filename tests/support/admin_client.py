"""A short private socket directory, a client that sends raw frames, and handlers with fixed answers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import zmq

from kvctl_agent.contract.admin import MAGIC
from kvctl_agent.contract.commands import COMMANDS
from kvctl_agent.contract.snapshots import Hello
from kvctl_agent.observer.server import SERVED_HERE, Handler
from tests.support.admin_server import AdminServer


class Client:
    """A DEALER that fails after a few seconds instead of hanging."""

    def __init__(self, path: Path, receive_queue: int = 1000) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.RCVHWM, receive_queue)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self.socket.setsockopt(zmq.SNDTIMEO, 10_000)
        self.socket.connect(f"ipc://{path}")
        self._ids = itertools.count()

    def ask(self, cmd: str, **args: Any) -> dict[str, Any]:
        wanted = str(next(self._ids)).encode()
        self.send(MAGIC, wanted, orjson.dumps({"cmd": cmd, "args": args}))
        magic, request_id, body = self.receive()
        assert (magic, request_id) == (MAGIC, wanted)
        return body

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self) -> tuple[bytes, bytes, Any]:
        magic, request_id, body = self.socket.recv_multipart()
        return magic, request_id, orjson.loads(body)

    def close(self) -> None:
        self._context.destroy(linger=0)


def hello(name: str = "decode-0") -> Hello:
    return {
        "name": name,
        "role": "decode",
        "host": "node-3",
        "pid": os.getpid(),
        "version": "0",
        "protocol": [1, 1],
        "incarnation": "i",
        "level": "",
        "capabilities": [],
        "uptime_ns": 1,
        "draining": False,
        "now_ns": 2,
        "ended_age_ns": None,
        "ended_why": None,
        "process_state": None,
        "turn_age_ns": None,
        "observer": "thread",
    }


def handlers(**own: Handler) -> dict[str, Handler]:
    """Returns handlers in which every command answers its own name and arguments, except the given ones."""

    def echo(name: str) -> Handler:
        return lambda args: {"command": name, "args": args}

    return {c.name: own.get(c.name, echo(c.name)) for c in COMMANDS if c.name not in SERVED_HERE}


@pytest.fixture
def directory(socket_dir: Path) -> Path:
    """A socket directory that does not exist yet."""
    return socket_dir / "s"


@pytest.fixture
def serve(directory: Path) -> Iterator[Callable[..., AdminServer]]:
    """Starts servers and stops them after the test."""
    servers: list[AdminServer] = []

    def start(name: str = "decode-0", own: dict[str, Handler] | None = None, **options: Any) -> AdminServer:
        server = AdminServer(name, handlers(**(own or {})), lambda: hello(name), directory, **options)
        servers.append(server)
        return server.start()

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def connect() -> Iterator[Callable[..., Client]]:
    """Opens clients and closes them after the test."""
    clients: list[Client] = []

    def to(server: AdminServer | Path, **options: int) -> Client:
        path = server if isinstance(server, Path) else server.path
        assert path is not None
        clients.append(Client(path, **options))
        return clients[-1]

    yield to
    for client in clients:
        client.close()


def ask_relay(relay: Client, name: bytes, body: bytes = b'{"cmd": "hello"}') -> Any:
    """Returns the reply of one agent."""
    relay.send(MAGIC, b"7", body, name)
    _, _, ((request_id, reply),) = relay.receive()
    assert request_id == "7.0.0"
    return reply
