"""A client of the admin socket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import zmq

from kvctl_agent.contract.admin import MAGIC
from tests.support.rank_fleet import fleet

__all__ = ["fleet"]


class Client:
    """A DEALER that fails after a few seconds instead of hanging."""

    def __init__(self, path: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self._socket.setsockopt(zmq.SNDTIMEO, 10_000)
        self._socket.connect(f"ipc://{path}")
        self._ids = itertools.count()

    def ask(self, cmd: str, **args: Any) -> dict[str, Any]:
        self._socket.send_multipart([MAGIC, b"%d" % next(self._ids), orjson.dumps({"cmd": cmd, "args": args})])
        reply: dict[str, Any] = orjson.loads(self._socket.recv_multipart()[2])
        return reply

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def connect(no_leaks: None) -> Iterator[Callable[[Path], Client]]:
    """Opens clients and closes them after the test."""
    clients: list[Client] = []

    def to(path: Path) -> Client:
        clients.append(Client(path))
        return clients[-1]

    yield to
    for client in clients:
        client.close()
