"""The local port of a port-forward carries connections of its user only."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvctl.client.discovery.pod_relay import Relay

GREETING = b"\xff of an agent"
NOBODY = 65534
ASK = """
import encodings.idna, os, socket, sys  # what another user cannot read
if sys.argv[2:]:
    os.setuid(int(sys.argv[2]))
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60) as client:
    print(client.recv(100))
"""


class Stream:
    """A forwarded connection to an agent, which speaks first, and then nothing until it is closed."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._greeted = False

    def receive(self) -> bytes:
        if not self._greeted:
            self._greeted = True
            return GREETING
        assert self._closed.wait(60), "nobody closes the connection"
        return b""

    def send(self, data: bytes) -> None: ...

    def close(self) -> None:
        self._closed.set()


@pytest.fixture
def port() -> Iterator[int]:
    made: Any = lambda timeout_s: Stream()  # noqa: E731
    relay = Relay(made, 60)
    yield int(relay.address.rpartition(":")[2])
    relay.close()


def asked_by(port: int, *user: int) -> str:
    command = [sys.executable, "-I", "-S", "-c", ASK, str(port), *map(str, user)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells whose a connection is")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_other_users_of_the_host_are_not_connected_to_the_pod(port: int) -> None:
    assert asked_by(port, NOBODY) == "b''"
    assert asked_by(port) == repr(GREETING), "the connection to the pod is still open for its user"


def test_a_connection_of_this_user_is_carried(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        assert client.recv(100) == GREETING
