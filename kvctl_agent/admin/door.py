"""One ROUTER of the admin server: who asks by it, with what right, and how answers leave without anybody waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import zmq

from kvctl_agent.contract.admin import MAX_REQUEST_BYTES
from kvctl_agent.contract.commands import Level

SEND_TIMEOUT_MS = 250
# Per client: few queued replies and requests, so that one that does not read holds little of our memory.
_SEND_QUEUE = 64
_RECEIVE_QUEUE = 64
# Between the limit and this a request is refused with words; above it libzmq drops the connection.
_FRAME_LIMIT = 2 * MAX_REQUEST_BYTES
_MOST_STALLED = 1024
_MOST_FRAMES = 4  # as many as tell a request of three frames from a longer one
# A stranger's half-open handshake, and a client whose machine has gone, hold a descriptor of ours so long.
_HANDSHAKE_MS = 10_000
_PING_MS = 10_000
_PONG_MS = 30_000


class Asked(NamedTuple):
    """One request; `level` is None where the client is not let in any more, `who` says how it came in."""

    identity: bytes
    frames: list[bytes]
    level: Level | None
    who: str


class Door:
    """A ROUTER and what its clients may do; used by one thread."""

    def __init__(self, socket: zmq.Socket[bytes], level: Callable[[bytes], Level | None] | None = None) -> None:
        """Takes a socket that is not bound yet.

        Args:
            level: what the owner of a public key may do. None where there are no keys: a Unix socket of mode 0600
                lets in our own uid only, which may do everything.
        """
        self.socket = socket
        self._level = level
        self._stalled: set[bytes] = set()
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, _FRAME_LIMIT)
        socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        socket.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        # Without it a full queue would drop replies silently and a stalled client could not be told.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if level is not None:
            socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
            socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_MS)

    def receive(self) -> Asked | None:
        """A request, if one is there; frames beyond what a request can have are read and dropped."""
        try:
            identity = self.socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return None
        user = ""
        frames: list[bytes] = []
        while self.socket.getsockopt(zmq.RCVMORE):
            frame = self.socket.recv(copy=self._level is None)
            if isinstance(frame, zmq.Frame):
                user = str(frame.get("User-Id"))
                frame = frame.bytes
            if len(frames) < _MOST_FRAMES:
                frames.append(frame)
        if self._level is None:
            return Asked(identity, frames, Level.ADMIN, "socket")
        return Asked(identity, frames, self._level(bytes.fromhex(user)), f"key {user[:8]}")

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        """Sends a reply, or drops it; False when with it the client is found not to read any more."""
        # A client gets one chance to catch up; from then on its full queue costs nobody else time.
        self.socket.setsockopt(zmq.SNDTIMEO, 0 if identity in self._stalled else SEND_TIMEOUT_MS)
        try:
            self.socket.send_multipart([identity, *frames])
            self._stalled.discard(identity)
        except zmq.Again:
            if len(self._stalled) >= _MOST_STALLED:
                self._stalled.clear()
            found = identity not in self._stalled
            self._stalled.add(identity)
            return not found
        except zmq.ZMQError:  # it is gone
            self._stalled.discard(identity)
        return True
