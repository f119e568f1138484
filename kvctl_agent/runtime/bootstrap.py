"""Sockets of the bootstrap registry: the server in the first prefill rank, and the clients in all ranks.

Server and clients run in their agent's control loop, without threads of their own and without blocking calls.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Set
from typing import Any

import zmq
from msgspec.structs import replace

from kvctl_agent.contract.addresses import parse_endpoint
from kvctl_agent.contract.admin import MAGIC
from kvctl_agent.errors import ConfigError, DeadlineExceeded, RemoteProtocolError
from kvctl_agent.host.keys import KeyPair
from kvctl_agent.host.sockets import shortage
from kvctl_agent.protocol import bootstrap_registry as registry
from kvctl_agent.runtime import control_endpoints
from kvctl_agent.runtime.control_endpoints import NamedDealer
from kvctl_agent.security.curve import REGISTRY_DOMAIN, Clients
from kvctl_agent.security.unix_dealer import UnixDealer
from kvctl_agent.security.unix_router import UnixRouter

_REQUESTS_A_TURN = 64
_QUEUE = 16  # replies to a client that does not read; a list has megabytes, and anybody may ask for it without keys
_DECLINE_POLL_S = 0.01
_DESCRIPTORS = 32  # more than a context with one socket needs; libzmq aborts the process if it gets only some of them
_ASK_EVERY_NS = 200_000_000
_REPEAT_EVERY_NS = 1_000_000_000  # so that a restarted registry learns of this rank again


class RegistryServer:
    """Server of the bootstrap registry: answers registrations and look-ups of ranks, and operators' tools.

    Attributes:
        endpoint: the endpoint to bind, and from `serve` on the bound one, with the port that was chosen.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: KeyPair | None = None,
        clients: Clients | None = None,
        refused: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Creates the server without a socket; `serve` binds the socket.

        Args:
            keys: the fleet's keys, with which ranks register over TCP.
            clients: owners of other keys that may ask for the list of agents.
            refused: called with a description of a request that is not permitted.
        """
        self._context = context
        self.endpoint = endpoint
        self._keys = keys
        self._clients = clients
        self._refused = refused
        self._registry = registry.Registry()
        self._declined: list[registry.Decline] = []
        self._socket: control_endpoints.Router | None = None

    def serve(self) -> RegistryServer:
        """Binds the socket and returns the server; raises ConfigError if the address is taken or cannot be bound."""
        self._socket = control_endpoints.bind(
            self._context, self.endpoint, registry.MAX_REQUEST_BYTES, self._keys, REGISTRY_DOMAIN, _QUEUE
        )
        if control_endpoints.any_port(self.endpoint):
            port = parse_endpoint(control_endpoints.address(self._socket), bound=True).port
            self.endpoint = str(parse_endpoint(self.endpoint, bound=True)._replace(port=port))
        return self

    @property
    def socket(self) -> control_endpoints.Router:
        """The bound socket; `serve` must have been called."""
        assert self._socket is not None
        return self._socket

    def turn(self) -> list[registry.Decline]:
        """Answers the requests received so far, up to a limit per call; returns those that decline a room."""
        self._declined = []
        for _ in range(_REQUESTS_A_TURN):
            try:
                frames, address, key = _receive(self.socket)
            except zmq.ZMQError:
                break
            if (reply := self._reply(frames[1:], address, key)) is not None:
                with contextlib.suppress(zmq.ZMQError):  # the client has disconnected, or asks again
                    self.socket.send_multipart([frames[0], *reply], zmq.NOBLOCK)
        return self._declined

    def _reply(self, frames: list[bytes], address: str, key: bytes | None) -> list[bytes] | None:
        """Returns the reply to a request; None if it is malformed or not permitted.

        Args:
            address: IP address of the client; "" over a Unix socket.
            key: public key of the client; None over a Unix socket, empty without keys.
        """
        is_rank = self._keys is None or key is None or key == self._keys.public
        now = time.monotonic_ns()
        if frames and frames[0] == MAGIC:
            may_ask = is_rank or (key and self._clients is not None and self._clients.level(key) is not None)
            refusal = "" if may_ask else "this key has been removed from the agent's admin_clients"
            return self._registry.reply(frames, now, time.time_ns(), refusal)
        if key is not None and not is_rank:
            self._refused(f"refused a registration by client key {key.hex()}: only the fleet's key may register")
            return None
        if len(frames) != 1:
            return None
        try:
            request = registry.decode_request(frames[0])
        except RemoteProtocolError:  # not a rank
            return None
        if isinstance(request, registry.Decline):
            self._declined.append(request)
        return [registry.encode(self._registry.answer(request, now, address))]

    def close(self) -> None:
        if self._socket is not None:
            control_endpoints.close(self._socket)


def _receive(socket: control_endpoints.Router) -> tuple[list[bytes], str, bytes | None]:
    """Returns the frames of the next message, its sender's IP address and its public key.

    Over a Unix socket the address is "" and the key None; the key is empty if the client has shown none.

    Raises:
        zmq.Again: no message is available.
    """
    if isinstance(socket, UnixRouter):
        return socket.recv_multipart(), "", None
    frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
    last = frames[-1]
    try:
        key = bytes.fromhex(str(last.get("User-Id")))
    except zmq.ZMQError:  # a socket without keys
        key = b""
    return [frame.bytes for frame in frames], str(last.get("Peer-Address")), key


class RegistryClient:
    """Client of one registry: sends its request every 200 ms until the roster is complete, then once per second.

    Attributes:
        roster: the last answer; its `refused` is a whole sentence, also if this client refuses the registry.
        answered: whether the registry has answered.
        identity: random name under which the registry addresses this client.
        key: socket or descriptor for a poller.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        request: registry.Request,
        keys: KeyPair | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.roster = self._silent = registry.Roster([], 0, f"no answer from the registry at {endpoint}")
        self._request = registry.encode(request)
        # A random identity: another client with the same identity would receive the answers instead of this one.
        self.identity = secrets.token_hex(16).encode()
        self._socket = control_endpoints.connect_to_peer(
            context, endpoint, self.identity, registry.MAX_REQUEST_BYTES << 8, keys
        )
        self.key = control_endpoints.poll_key(self._socket)
        self.answered = False
        self.due_ns = 0

    def turn(self, now_ns: int) -> bool:
        """Reads answers, and sends the request if it is due; returns whether the roster has changed."""
        before = self.roster
        for frames in control_endpoints.received(self._socket):
            with contextlib.suppress(RemoteProtocolError):
                answer = registry.decode_roster(frames[-1])
                self.answered = True
                if answer.refused:
                    answer = replace(answer, refused=f"the registry refuses {answer.refused}")
                if answer != self.roster:
                    self.roster = registry.checked(answer)
        if now_ns >= self.due_ns:
            self.due_ns = now_ns + (_REPEAT_EVERY_NS if self.roster.complete else _ASK_EVERY_NS)
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(self._request, zmq.NOBLOCK)
            if isinstance(self._socket, UnixDealer) and (refused := self._socket.refused):
                self.roster = registry.Roster([], 0, "", f"the registry at {self.endpoint} is refused: {refused}")
        if isinstance(self._socket, NamedDealer):
            self._socket.turn(now_ns)
            if self.roster.missing.startswith(self._silent.missing):
                error = self._socket.error
                self.roster = replace(self._silent, missing=f"{self._silent.missing}{': ' * bool(error)}{error}")
        return self.roster != before

    def close(self) -> None:
        self._socket.close(0)


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
        self._asked: set[str] = set()  # with rosters that are to be yielded once more
        self.changes = 0

    def ask(self, endpoint: str) -> None:
        """Adds a client of the registry at `endpoint`; if there is one, the next `turn` yields its complete roster."""
        client = self._clients.get(endpoint)
        if client is None:
            self._clients[endpoint] = RegistryClient(self._context, endpoint, self.request, self._keys)
            self.changes += 1
        elif client.roster.complete:
            self._asked.add(endpoint)

    def forget(self, endpoint: str) -> None:
        """Closes the client of the registry at `endpoint`, if there is one."""
        self._asked.discard(endpoint)
        if (client := self._clients.pop(endpoint, None)) is not None:
            client.close()
            self.changes += 1

    def roster(self, endpoint: str) -> registry.Roster | None:
        """Returns the last answer of a registry; None if it has no client here."""
        client = self._clients.get(endpoint)
        return None if client is None else client.roster

    def sockets(self) -> list[zmq.Socket[bytes] | int]:
        return [client.key for client in self._clients.values()]

    def hurry(self) -> None:
        """Makes all requests due now: a lost peer may have registered again at another endpoint."""
        for client in self._clients.values():
            client.due_ns = 0

    def turn(self, ready: Set[Any], now_ns: int) -> Iterator[str]:
        """Reads answers and sends due requests; yields the registries whose roster has changed or was asked for.

        The caller may forget any registry meanwhile.

        Args:
            ready: sockets that are readable.
            now_ns: monotonic time.
        """
        asked, self._asked = self._asked, set()
        for endpoint, client in list(self._clients.items()):
            if self._clients.get(endpoint) is not client:
                continue
            changed = (client.key in ready or now_ns >= client.due_ns) and client.turn(now_ns)
            if changed or endpoint in asked:
                yield endpoint

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def decline(endpoint: str, room: int, reason: str, keys: KeyPair | None, timeout_s: float) -> None:
    """Tells the prefill instance of a registry that its engine will not send a room; returns once it is known there.

    Raises:
        ConfigError: too few file descriptors are left.
        DeadlineExceeded: the registry has not answered within `timeout_s`; the text says what it waited for.
    """
    if (text := shortage(_DESCRIPTORS)) is not None:
        raise ConfigError(f"room {room} was not declined: {text}")
    deadline = time.monotonic() + timeout_s
    with zmq.Context() as context:
        client = RegistryClient(context, endpoint, registry.Decline(room, reason), keys)
        try:
            while not client.answered:
                client.turn(time.monotonic_ns())
                if time.monotonic() >= deadline:
                    why = client.roster.refused or client.roster.missing
                    raise DeadlineExceeded(f"room {room} was not declined within {timeout_s:g} s: {why}")
                time.sleep(_DECLINE_POLL_S)
        finally:
            client.close()
