"""Sockets of the bootstrap registry: the server in the first prefill rank, and the clients in all ranks.

Server and clients run in their agent's control loop, without threads of their own and without blocking calls.
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
from kvctl_agent.protocol import bootstrap_registry as registry
from kvctl_agent.runtime import control_endpoints

_REQUESTS_A_TURN = 64
_ASK_EVERY_NS = 200_000_000
_REPEAT_EVERY_NS = 1_000_000_000  # so that a restarted registry learns of this rank again


class RegistryServer:
    """Server of the bootstrap registry: answers registrations and look-ups from its socket.

    Attributes:
        endpoint: the endpoint to bind, and from `serve` on the bound one, with the port that was chosen.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: KeyPair | None = None) -> None:
        """Creates the server without a socket; `serve` binds the socket."""
        self._context = context
        self.endpoint = endpoint
        self._keys = keys
        self._registry = registry.Registry()
        self._socket: control_endpoints.Router | None = None

    def serve(self) -> RegistryServer:
        """Binds the socket and returns the server; raises ConfigError if the address is taken or cannot be bound."""
        self._socket = control_endpoints.bind(self._context, self.endpoint, registry.MAX_REQUEST_BYTES, self._keys)
        if control_endpoints.any_port(self.endpoint):
            port = control_endpoints.address(self._socket).rpartition(":")[2]
            self.endpoint = f"{self.endpoint.rpartition(':')[0]}:{port}"
        return self

    @property
    def socket(self) -> control_endpoints.Router:
        """The bound socket; `serve` must have been called."""
        assert self._socket is not None
        return self._socket

    def turn(self) -> None:
        """Answers the requests received so far, up to a limit per call."""
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
                continue  # not a rank, or a rank that has disconnected; a rank without an answer asks again

    def close(self) -> None:
        if self._socket is not None:
            control_endpoints.close(self._socket)


class RegistryClient:
    """Client of one registry: sends its request every 200 ms until the roster is complete, then once per second."""

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
        # A random identity: another client with the same identity would receive the answers instead of this one.
        identity = secrets.token_hex(16).encode()
        self.socket = control_endpoints.connect(context, endpoint, identity, registry.MAX_REQUEST_BYTES << 8, keys)
        self.due_ns = 0

    def turn(self, now_ns: int) -> bool:
        """Reads answers, and sends the request if it is due; returns whether the roster has changed."""
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
            self.due_ns = now_ns + (_REPEAT_EVERY_NS if self.roster.complete else _ASK_EVERY_NS)
            with contextlib.suppress(zmq.ZMQError):
                self.socket.send(self._request, zmq.NOBLOCK)
        return changed

    def close(self) -> None:
        self.socket.close(0)


class Registries:
    """Registry clients of one agent: of its own instance, or on a decode rank of several prefill instances.

    Attributes:
        request: request that registries added later will be sent.
        changes: incremented whenever the result of `sockets` changes.
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
        """Adds a client of the registry at `endpoint`, unless there is one."""
        if endpoint not in self._clients:
            self._clients[endpoint] = RegistryClient(self._context, endpoint, self.request, self._keys)
            self.changes += 1

    def forget(self, endpoint: str) -> None:
        """Closes the client of the registry at `endpoint`, if there is one."""
        if (client := self._clients.pop(endpoint, None)) is not None:
            client.close()
            self.changes += 1

    def roster(self, endpoint: str) -> registry.Roster | None:
        """Returns the last answer of a registry; None if it has no client here."""
        client = self._clients.get(endpoint)
        return None if client is None else client.roster

    def sockets(self) -> list[zmq.Socket[bytes]]:
        return [client.socket for client in self._clients.values()]

    def hurry(self) -> None:
        """Makes all requests due now: a lost peer may have registered again at another endpoint."""
        for client in self._clients.values():
            client.due_ns = 0

    def turn(self, ready: Set[Any], now_ns: int) -> Iterator[str]:
        """Reads answers and sends due requests; yields the endpoints of the registries whose roster has changed.

        Args:
            ready: sockets that are readable.
            now_ns: monotonic time.
        """
        for endpoint, client in list(self._clients.items()):
            if (client.socket in ready or now_ns >= client.due_ns) and client.turn(now_ns):
                yield endpoint

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
