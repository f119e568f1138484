"""The bootstrap registry's sockets: served inside the first prefill rank, asked by all others.

Both ends run in their control loops: no thread of their own, no blocking call.
"""

from __future__ import annotations

import contextlib

import zmq

from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.protocol import roster
from kvctl_agent.runtime import endpoints

_REQUESTS_A_TURN = 64
_ASK_EVERY_NS = 200_000_000
_REPEAT_EVERY_NS = 5_000_000_000  # a registry that was restarted hears of us again


class RegistryServer:
    """Answers registrations and look-ups."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._registry = roster.Registry()
        self.socket = endpoints.bind(context, zmq.ROUTER, endpoint, roster.MAX_REQUEST_BYTES)

    def turn(self) -> None:
        for _ in range(_REQUESTS_A_TURN):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            if len(frames) != 2:
                continue
            try:
                answer = self._registry.answer(roster.decode_request(frames[1]))
                self.socket.send_multipart([frames[0], roster.encode(answer)], zmq.NOBLOCK)
            except (RemoteProtocolError, zmq.ZMQError):
                continue  # a stranger, or somebody who has gone; who needs an answer asks again

    def close(self) -> None:
        endpoints.close(self.socket)


class RegistryClient:
    """Registers or looks up, again and again until the answer is complete, then seldom."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, name: str, request: roster.Request
    ) -> None:
        self.endpoint = endpoint
        self.roster = roster.Roster([], 0, f"no answer from the registry at {endpoint}")
        self._request = roster.encode(request)
        self.socket = endpoints.connect(context, endpoint, name.encode(), roster.MAX_REQUEST_BYTES << 8)
        self.due_ns = 0

    @property
    def complete(self) -> bool:
        return bool(self.roster.size) and not self.roster.missing and not self.roster.refused

    def hurry(self) -> None:
        """Ask again at once: a peer was lost and may be back elsewhere."""
        self.due_ns = 0

    def turn(self, now_ns: int) -> bool:
        """Read answers and ask when it is time; True when the roster has changed."""
        changed = False
        while True:
            try:
                answer = roster.decode_roster(self.socket.recv(zmq.NOBLOCK))
            except RemoteProtocolError:
                continue
            except zmq.ZMQError:
                break
            changed |= answer != self.roster
            self.roster = answer
        if now_ns >= self.due_ns:
            self.due_ns = now_ns + (_REPEAT_EVERY_NS if self.complete else _ASK_EVERY_NS)
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send(self._request, zmq.NOBLOCK)
        return changed

    def close(self) -> None:
        self.socket.close(0)
