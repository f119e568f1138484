"""The bootstrap registry's sockets: served inside the first prefill rank, asked by all others.

Both ends run in their control loops: no thread of their own, no blocking call.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Set
from typing import Any

import zmq

from kvctl_agent.contract.keys import KeyPair
from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.protocol import registry
from kvctl_agent.runtime import control_endpoints

_REQUESTS_A_TURN = 64
_ASK_EVERY_NS = 200_000_000
_REPEAT_EVERY_NS = 1_000_000_000  # a registry that was restarted hears of us again


class RegistryServer:
    """Answers registrations and look-ups."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: KeyPair | None = None) -> None:
        """Nothing is bound before `serve`."""
        self._context = context
        self._endpoint = endpoint
        self._keys = keys
        self._registry = registry.Registry()
        self._socket: control_endpoints.Router | None = None

    def serve(self) -> RegistryServer:
        """Bind the socket.

        Raises:
            ConfigError: the address is taken or cannot be bound.
        """
        self._socket = control_endpoints.bind(self._context, self._endpoint, registry.MAX_REQUEST_BYTES, self._keys)
        return self

    @property
    def socket(self) -> control_endpoints.Router:
        """The bound socket."""
        assert self._socket is not None
        return self._socket

    def turn(self) -> None:
        for _ in range(_REQUESTS_A_TURN):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            if len(frames) != 2:
                continue
            try:
                answer = self._registry.answer(registry.decode_request(frames[1]), time.monotonic_ns())
                self.socket.send_multipart([frames[0], registry.encode(answer)], zmq.NOBLOCK)
            except (RemoteProtocolError, zmq.ZMQError):
                continue  # a stranger, or somebody who has gone; who needs an answer asks again

    def close(self) -> None:
        if self._socket is not None:
            control_endpoints.close(self._socket)


class RegistryClient:
    """Registers or looks up, again and again until the answer is complete, then seldom."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        request: registry.Request,
        keys: KeyPair | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.roster = registry.Roster([], 0, f"no answer from the registry at {endpoint}")
        self._request = registry.encode(request)
        # Nobody else can know this name: whoever connects to a ROUTER under a name of ours leaves us deaf.
        identity = secrets.token_hex(16).encode()
        self.socket = control_endpoints.connect(context, endpoint, identity, registry.MAX_REQUEST_BYTES << 8, keys)
        self.due_ns = 0

    @property
    def complete(self) -> bool:
        return bool(self.roster.size) and not self.roster.missing and not self.roster.refused

    def turn(self, now_ns: int) -> bool:
        """Read answers and ask when it is time; True when the roster has changed."""
        changed = False
        while True:
            try:
                answer = registry.decode_roster(self.socket.recv(zmq.NOBLOCK))
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


class Registries:
    """The registries that one agent asks: its own instance's, or those of every prefill instance it serves.

    Attributes:
        request: sent to each registry that is asked from now on.
        changes: grows whenever `sockets` gives others than before.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], request: registry.Request, keys: KeyPair | None = None
    ) -> None:
        self._context = context
        self.request: registry.Request = request
        self._keys = keys
        self._clients: dict[str, RegistryClient] = {}
        self.changes = 0

    def ask(self, endpoint: str) -> None:
        """Ask this one too, from now on; again changes nothing."""
        if endpoint not in self._clients:
            self._clients[endpoint] = RegistryClient(self._context, endpoint, self.request, self._keys)
            self.changes += 1

    def asked(self, endpoint: str) -> bool:
        """Whether this one is asked."""
        return endpoint in self._clients

    def roster(self, endpoint: str) -> registry.Roster:
        """What a registry that is asked has said so far."""
        return self._clients[endpoint].roster

    def complete(self, endpoint: str) -> bool:
        """Whether all ranks of its instance are there."""
        return self._clients[endpoint].complete

    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [client.socket for client in self._clients.values()]

    def hurry(self) -> None:
        """Ask all of them again at once: a peer was lost and may be back elsewhere."""
        for client in self._clients.values():
            client.due_ns = 0

    def turn(self, ready: Set[Any], now_ns: int) -> Iterator[str]:
        """Read answers and ask where it is time; the endpoints whose roster has changed."""
        for endpoint, client in list(self._clients.items()):
            if (client.socket in ready or now_ns >= client.due_ns) and client.turn(now_ns):
                yield endpoint

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
