"""TCP of a preflight within this host: ports that answer, refuse, belong to others, or are silent."""

from __future__ import annotations

import socket
import struct

import pytest

from kvctl.lab.preflight.reach import LARGE_BYTES, Listener, own_address, reach
from kvctl_agent.host.resolver import Answer

TOKEN = "00ff" * 8


@pytest.fixture(scope="module")
def port() -> int:
    (port,) = Listener((), TOKEN).ports
    return port


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Override: a listener lives as long as its process."""


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_port_that_answers(port: int, address: str) -> None:
    found = reach(address, port, TOKEN, 30.0)
    assert (found["state"], found["error"]) == ("ok", "")
    assert found["rtt_ns"] > 0
    assert found["mtu"] >= 65535


def test_a_port_on_which_nobody_listens_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    found = reach("127.0.0.1", free, TOKEN, 30.0)
    assert (found["state"], found["error"]) == ("refused", f"connecting to 127.0.0.1 port {free}: refused")


def test_a_service_that_says_nothing_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        found = reach("127.0.0.1", taken, TOKEN, 0.5)
    assert (found["state"], found["error"]) == (
        "silent",
        f"a small message to 127.0.0.1 port {taken}: no answer within 0.5 s",
    )


def test_a_host_without_an_address_is_unresolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl.lab.preflight.reach.resolve", lambda host: Answer((), f"host {host}: no answer"))
    found = reach("gpu1", 1, TOKEN, 30.0)
    assert (found["state"], found["error"]) == ("unresolved", "host gpu1: no answer")


@pytest.mark.parametrize("sent", [b"x" * 16, bytes.fromhex(TOKEN) + struct.pack("!Q", LARGE_BYTES + 1)])
def test_connections_of_others_and_sizes_beyond_the_limit_are_closed(port: int, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), 30.0) as client:
        client.sendall(sent)
        assert client.recv(2) in (b"", b"k")
        assert client.recv(2) == b""


def test_a_port_that_is_taken_is_told(port: int) -> None:
    listener = Listener((port,), TOKEN)
    assert (listener.ports, listener.refused) == ([], {str(port): "Address already in use"})


def test_the_address_is_the_one_that_was_given_or_that_ssh_has_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 50000 10.0.0.9 22")
    assert own_address("10.0.0.5") == "10.0.0.5"
    assert own_address("gpu1") == "10.0.0.9"
