"""Who is let in: owners of a known key, and nobody by an error; the thread ends with the gatekeeper."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from zmq.utils import z85

from kvctl_agent.host.keys import KeyPair
from kvctl_agent.runtime import control_endpoints
from kvctl_agent.security.curve import ZapAuthenticator
from tests.support.names import Names

Context = zmq.Context[zmq.Socket[bytes]]
WAIT_MS = 60_000
A_WHILE_MS = 300


def try_to_send(client: zmq.Socket[bytes]) -> None:
    """Sends, unless the client has been refused before it could say anything."""
    with contextlib.suppress(zmq.Again):
        client.send(b"let me in", zmq.NOBLOCK)


def pair() -> KeyPair:
    return KeyPair(*(z85.decode(half) for half in zmq.curve_keypair()))


FLEET, STRANGER = pair(), pair()


class Guarded:
    """A ROUTER behind a gatekeeper that knows the fleet's key only."""

    def __init__(self, admits: Callable[[bytes, bytes], bool] = lambda key, _: key == FLEET.public) -> None:
        self.context: Context = zmq.Context()
        self.refusals: list[str] = []
        self.refused = threading.Event()
        self.gatekeeper = ZapAuthenticator(self.context, "gate", admits, self._refused)
        router = control_endpoints.bind(self.context, "tcp://127.0.0.1:*", 1 << 20, FLEET)
        assert isinstance(router, zmq.Socket)
        self.router: zmq.Socket[bytes] = router
        self.address = control_endpoints.address(router)

    def _refused(self, text: str) -> None:
        self.refusals.append(text)
        self.refused.set()

    def close(self) -> None:
        self.router.close(0)
        self.gatekeeper.close()
        self.context.term()


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    made = Guarded()
    yield made
    made.close()


def test_an_owner_of_the_fleets_key_is_heard(guarded: Guarded, zmq_context: Context) -> None:
    client = control_endpoints.connect(zmq_context, guarded.address, b"friend", 1 << 20, FLEET)
    client.send(b"hello")
    assert guarded.router.poll(WAIT_MS)
    assert guarded.router.recv() == b"friend"
    frame = guarded.router.recv(copy=False)
    assert (frame.bytes, frame.get("User-Id")) == (b"hello", FLEET.public.hex())
    client.close()


def test_an_owner_of_the_fleets_key_is_heard_from_a_host_name(
    guarded: Guarded, zmq_context: Context, names: Names
) -> None:
    names.known["prefill.test"] = ["127.0.0.1"]
    endpoint = guarded.address.replace("127.0.0.1", "prefill.test")
    client = control_endpoints.connect_to_peer(zmq_context, endpoint, b"friend", 1 << 20, FLEET)
    assert isinstance(client, control_endpoints.NamedDealer)
    deadline = time.monotonic() + WAIT_MS / 1000
    while not guarded.router.poll(5):
        assert time.monotonic() < deadline
        client.turn(time.monotonic_ns())
        with contextlib.suppress(zmq.Again):
            client.send(b"hello")
    assert guarded.router.recv_multipart()[0] == b"friend"
    client.close()


def test_a_strangers_key_is_refused_and_told(guarded: Guarded, zmq_context: Context) -> None:
    client = zmq_context.socket(zmq.DEALER)
    client.curve_publickey, client.curve_secretkey = STRANGER.public, STRANGER.secret
    client.curve_serverkey = FLEET.public
    client.connect(guarded.address)
    try_to_send(client)
    assert guarded.refused.wait(WAIT_MS / 1000)
    assert not guarded.router.poll(A_WHILE_MS)
    assert STRANGER.public.hex() in guarded.refusals[0]
    assert "127.0.0.1" in guarded.refusals[0]
    client.close(0)


def test_a_client_without_any_key_is_not_heard(guarded: Guarded, zmq_context: Context) -> None:
    client = control_endpoints.connect(zmq_context, guarded.address, b"friend", 1 << 20)
    try_to_send(client)
    assert not guarded.router.poll(A_WHILE_MS)
    client.close()


def test_a_stolen_public_key_does_not_help(guarded: Guarded, zmq_context: Context) -> None:
    """Public keys are public: without the secret half the handshake does not get to the gatekeeper."""
    client = zmq_context.socket(zmq.DEALER)
    client.curve_publickey, client.curve_secretkey = FLEET.public, STRANGER.secret
    client.curve_serverkey = FLEET.public
    client.connect(guarded.address)
    try_to_send(client)
    assert not guarded.router.poll(A_WHILE_MS)
    assert guarded.refusals == []
    client.close(0)


def test_an_error_while_deciding_lets_nobody_in_and_does_not_end_the_gatekeeper(zmq_context: Context) -> None:
    calls: list[bytes] = []

    def admits(key: bytes, domain: bytes) -> bool:
        calls.append(key)
        if len(calls) == 1:
            raise OSError("the file of keys is gone")
        return True

    guarded = Guarded(admits)
    first = control_endpoints.connect(zmq_context, guarded.address, b"first", 1 << 20, FLEET)
    try_to_send(first)
    assert guarded.refused.wait(WAIT_MS / 1000)
    assert guarded.refusals[0].endswith("OSError: the file of keys is gone")
    first.close()
    second = control_endpoints.connect(zmq_context, guarded.address, b"second", 1 << 20, FLEET)
    second.send(b"hello")
    assert guarded.router.poll(WAIT_MS)
    second.close()
    guarded.close()


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(64),
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + b"\x01" + bytes(31),  # greeting, then silence
        b"\xff"
        + bytes(8)
        + b"\x7f\x03\x00CURVE"
        + bytes(15)
        + b"\x00"
        + bytes(31)
        + b"\x06"
        + b"\xff" * 8
        + b"x" * 200,
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + b"\x00" + bytes(31) + b"\x04\xc8\x05HELLO" + bytes(194),
    ],
)
def test_junk_on_the_wire_harms_nobody(guarded: Guarded, zmq_context: Context, junk: bytes) -> None:
    with socket.create_connection(("127.0.0.1", int(guarded.address.rpartition(":")[2]))) as stranger:
        stranger.sendall(junk)
        test_an_owner_of_the_fleets_key_is_heard(guarded, zmq_context)


def test_closing_twice_and_after_the_context_is_fine() -> None:
    context: Context = zmq.Context()
    gatekeeper = ZapAuthenticator(context, "gate", lambda *_: True, lambda _: None)
    gatekeeper.close()
    gatekeeper.close()
    context.term()
    context = zmq.Context()
    gatekeeper = ZapAuthenticator(context, "gate", lambda *_: True, lambda _: None)
    context.term()
    gatekeeper.close()
    assert "gate" not in {thread.name for thread in threading.enumerate()}
