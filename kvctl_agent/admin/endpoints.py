"""The two sockets of the admin server, on a Unix path and over TCP: who asks by them, and with what right."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import zmq

from kvctl_agent.contract.admin import MAX_REQUEST_BYTES
from kvctl_agent.contract.commands import Level
from kvctl_agent.security.unix_router import UnixRouter

SEND_TIMEOUT_MS = 250
# Per client: few queued replies and requests, so that one that does not read holds little of our memory.
_SEND_QUEUE = 64
_RECEIVE_QUEUE = 64
# Between the limit and this a request is refused with words; above it libzmq drops the connection.
FRAME_LIMIT = 2 * MAX_REQUEST_BYTES
_MOST_STALLED = 1024
_MOST_FRAMES = 4  # as many as tell a request of three frames from a longer one
# A stranger's half-open handshake, and a client whose machine has gone, hold a descriptor of ours so long.
_HANDSHAKE_MS = 10_000
_PING_MS = 10_000
_PONG_MS = 30_000


class ClientRequest(NamedTuple):
    """One request; `level` is None where the client is not let in any more, `who` says how it came in."""

    identity: bytes
    frames: list[bytes]
    level: Level | None
    who: str


class AdminEndpoint(Protocol):
    """One socket of the admin server; used by one thread.

    Attributes:
        poll_key: what to register with a poller, and what the poller returns where there is something to do.
    """

    @property
    def poll_key(self) -> zmq.Socket[bytes] | int: ...

    @property
    def max_wait_ms(self) -> int | None:
        """How long `receive` may stay uncalled although nothing arrives; None: for ever."""

    def receive(self) -> ClientRequest | None:
        """A request, if one is there; frames beyond what a request can have are dropped."""

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        """Sends a reply, or drops it; False when with it the client is found not to read any more."""


class UnixEndpoint:
    """Clients on this machine: mode 0600 lets in our own user only, who may do everything."""

    def __init__(self, router: UnixRouter) -> None:
        self._router = router
        self._stalled: set[bytes] = set()

    @property
    def poll_key(self) -> int:
        return self._router.fileno()

    @property
    def max_wait_ms(self) -> int | None:
        return self._router.max_wait_ms

    def receive(self) -> ClientRequest | None:
        try:
            identity, *frames = self._router.recv_multipart()
        except zmq.Again:
            return None
        return ClientRequest(identity, frames[:_MOST_FRAMES], Level.ADMIN, "socket")

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        # A client gets one chance to catch up; from then on its full queue costs nobody else time.
        timeout_ms = 0 if identity in self._stalled else SEND_TIMEOUT_MS
        try:
            self._router.send_multipart([identity, *frames], timeout_ms=timeout_ms)
            self._stalled.discard(identity)
        except zmq.Again:
            return not _mark(self._stalled, identity)
        except zmq.ZMQError:  # it is gone
            self._stalled.discard(identity)
        return True


class CurveEndpoint:
    """Clients on other machines, known by their keys."""

    max_wait_ms = None

    def __init__(self, socket: zmq.Socket[bytes], level: Callable[[bytes], Level | None]) -> None:
        """Takes a ROUTER that is not bound yet; `level`: what the owner of a public key may do."""
        self.socket = socket
        self._level = level
        self._stalled: set[bytes] = set()
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT)
        socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        socket.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        # Without it a full queue would drop replies silently and a stalled client could not be told.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_MS)

    @property
    def poll_key(self) -> zmq.Socket[bytes]:
        return self.socket

    def receive(self) -> ClientRequest | None:
        try:
            identity = self.socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return None
        user = ""
        frames: list[bytes] = []
        while self.socket.getsockopt(zmq.RCVMORE):
            frame = self.socket.recv(copy=False)
            user = str(frame.get("User-Id"))
            if len(frames) < _MOST_FRAMES:
                frames.append(frame.bytes)
        return ClientRequest(identity, frames, self._level(bytes.fromhex(user)), f"key {user[:8]}")

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        self.socket.setsockopt(zmq.SNDTIMEO, 0 if identity in self._stalled else SEND_TIMEOUT_MS)
        try:
            self.socket.send_multipart([identity, *frames])
            self._stalled.discard(identity)
        except zmq.Again:
            return not _mark(self._stalled, identity)
        except zmq.ZMQError:  # it is gone
            self._stalled.discard(identity)
        return True


def _mark(stalled: set[bytes], identity: bytes) -> bool:
    """Remembers a client that does not read; True the first time."""
    if len(stalled) >= _MOST_STALLED:
        stalled.clear()
    found = identity not in stalled
    stalled.add(identity)
    return found
