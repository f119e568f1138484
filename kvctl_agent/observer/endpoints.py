"""Sockets of the admin server: a Unix socket for the agent's user, and optionally a TCP socket with CURVE keys.

Each received request has the client's level and a description of the client for the flight recorder.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from kvctl_agent.contract.addresses import AddressError, parse_listening
from kvctl_agent.contract.admin import MAGIC, MAX_REQUEST_BYTES
from kvctl_agent.contract.commands import Level
from kvctl_agent.errors import AdminError, ConfigError
from kvctl_agent.host.keys import KeyFileError, KeyPair
from kvctl_agent.security.curve import Clients, ZapAuthenticator, configure_server
from kvctl_agent.security.unix_router import UnixRouter

SEND_TIMEOUT_MS = 20  # other workers' clients wait as well
# Queued replies and requests per client: a client that does not read must not use much of the agent's memory.
_SEND_QUEUE = 64
_RECEIVE_QUEUE = 64
# A request between MAX_REQUEST_BYTES and this limit is refused with an error; a larger frame closes the connection.
FRAME_LIMIT = 2 * MAX_REQUEST_BYTES
_MOST_STALLED = 1024
_BATCH_BYTES, _MOST_PARTS = 32 << 10, 1 << 14
_MOST_FRAMES = 4  # one more than a request has, so that a longer one is recognised
# Limits how long a half-open handshake, or a client whose machine is down, occupies a descriptor.
_HANDSHAKE_MS = 10_000
_PING_MS = 10_000
_PONG_MS = 30_000


class ClientRequest(NamedTuple):
    """One received request, not yet parsed.

    Attributes:
        identity: routing id of the client, to which `AdminEndpoint.send` replies.
        frames: frames of the request, without the identity.
        level: the client's level; None if the client is no longer permitted.
        origin: description of the client: "socket", or "key" and the first 8 hexadecimal digits of its public key.
    """

    identity: bytes
    frames: list[bytes]
    level: Level | None
    origin: str


class AdminEndpoint(ABC):
    """One socket of the admin server, used by the server's thread only."""

    def __init__(self) -> None:
        self._stalled: set[bytes] = set()

    level_triggered = True
    """Whether the descriptor is readable as long as requests wait; otherwise `receive` is called until it has none."""

    @abstractmethod
    def fileno(self) -> int:
        """Returns the descriptor that is readable when requests have arrived."""

    @property
    def max_wait_ms(self) -> int | None:
        """Longest time in ms between calls of `receive`, even if nothing arrives; None: no limit."""
        return None

    @abstractmethod
    def receive(self) -> list[ClientRequest]:
        """Returns requests that have arrived, without waiting; drops frames after the fourth of a request."""

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        """Sends a reply; drops it if the client has disconnected or its queue is full.

        Returns:
            False for the first reply that a client does not read, so that the caller reports it once; else True.
        """
        # Wait only once for a client that does not read; after that its full queue delays no other client.
        try:
            self._send([identity, *frames], 0 if identity in self._stalled else SEND_TIMEOUT_MS)
        except zmq.Again:
            if len(self._stalled) >= _MOST_STALLED:
                self._stalled.clear()
            known = identity in self._stalled
            self._stalled.add(identity)
            return known
        except zmq.ZMQError:  # the client has disconnected
            pass
        self._stalled.discard(identity)
        return True

    def is_behind(self, identity: bytes) -> bool:
        """Returns whether a client has so much to read that its further requests wait until it has."""
        return False

    @abstractmethod
    def _send(self, frames: list[bytes], timeout_ms: int) -> None: ...


class UnixEndpoint(AdminEndpoint):
    """Unix socket for clients on this machine: its mode 0600 admits only the agent's user, who has every permission."""

    def __init__(self, router: UnixRouter, most_unread: int | None = None) -> None:
        """Creates the endpoint; a client with more than `most_unread` bytes to read is behind (None: never)."""
        super().__init__()
        self._router = router
        self._most_unread = most_unread

    def fileno(self) -> int:
        return self._router.fileno()

    @property
    def max_wait_ms(self) -> int | None:
        return self._router.max_wait_ms

    def receive(self) -> list[ClientRequest]:
        return [
            ClientRequest(identity, frames[:_MOST_FRAMES], Level.ADMIN, "socket")
            for identity, *frames in self._router.recv_all()
        ]

    def is_behind(self, identity: bytes) -> bool:
        return self._most_unread is not None and self._router.unread_bytes(identity) > self._most_unread

    def close(self) -> None:
        self._router.close()

    def _send(self, frames: list[bytes], timeout_ms: int) -> None:
        self._router.send_multipart(frames, timeout_ms=timeout_ms)


class BatchEndpoint(UnixEndpoint):
    """Unix socket for requests to many agents at once, see `RELAY_SOCKET`; anything else that arrives is dropped.

    Each agent's part of such a request is a `ClientRequest` of its own, with a fourth frame, the agent's name. Replies
    to one client wait for `flush`, or until they have 32 KiB: then they take one message, and wake the client once.
    """

    def __init__(self, router: UnixRouter, most_unread: int) -> None:
        super().__init__(router, most_unread)
        self._held: dict[bytes, list[bytes]] = {}
        self._held_bytes: dict[bytes, int] = {}

    def receive(self) -> list[ClientRequest]:
        return [
            ClientRequest(identity, part, Level.ADMIN, "socket")
            for identity, *frames in self._router.recv_all()
            for part in _parts(frames)
        ]

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        _, number, reply = frames
        self._held.setdefault(identity, []).append(b'["%b",%b]' % (number, reply))
        size = self._held_bytes[identity] = self._held_bytes.get(identity, 0) + len(reply)
        return size < _BATCH_BYTES or self._release(identity)

    def flush(self) -> None:
        """Sends the replies that are held."""
        for identity in tuple(self._held):
            self._release(identity)

    def _release(self, identity: bytes) -> bool:
        del self._held_bytes[identity]
        return super().send(identity, [MAGIC, b"", b"[%b]" % b",".join(self._held.pop(identity))])


def _parts(frames: list[bytes]) -> list[list[bytes]]:
    """Returns the frames of the request to each agent; none if it is no such request, or has too many parts."""
    if len(frames) != 4 or frames[0] != MAGIC or not frames[1].isdigit():
        return []
    number, bodies, names = frames[1], frames[2].split(b"\0"), frames[3].split(b"\0")
    if len(bodies) * len(names) > _MOST_PARTS:
        return []
    return [
        [MAGIC, b"%b.%d.%d" % (number, agent, place), body, name]
        for agent, name in enumerate(names)
        for place, body in enumerate(bodies)
    ]


class CurveEndpoint(AdminEndpoint):
    """TCP socket for clients on other machines, identified by their CURVE keys."""

    level_triggered = False  # libzmq's descriptor tells of changes, which a call that sends may use up

    def __init__(self, socket: zmq.Socket[bytes], level: Callable[[bytes], Level | None]) -> None:
        """Configures an unbound ROUTER; `level` returns the level of a public key, or None if it is not permitted."""
        super().__init__()
        self.socket = socket
        self._level = level
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT)
        socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        socket.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        # Without it a full queue drops replies silently, and a client that does not read is not noticed.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_MS)

    def fileno(self) -> int:
        return self.socket.FD

    def receive(self) -> list[ClientRequest]:
        try:
            identity = self.socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return []
        user = ""
        frames: list[bytes] = []
        while self.socket.getsockopt(zmq.RCVMORE):
            frame = self.socket.recv(copy=False)
            user = str(frame.get("User-Id"))
            if len(frames) < _MOST_FRAMES:
                frames.append(frame.bytes)
        return [ClientRequest(identity, frames, self._level(bytes.fromhex(user)), f"key {user[:8]}")]

    def _send(self, frames: list[bytes], timeout_ms: int) -> None:
        self.socket.setsockopt(zmq.SNDTIMEO, timeout_ms)
        self.socket.send_multipart(frames)


class RemoteEndpoint(NamedTuple):
    """Configuration of the TCP admin endpoint.

    Attributes:
        endpoint: its address, with a trailing + for the first free port upwards.
        keys: the fleet's key pair.
        clients: absolute path of the client file.
    """

    endpoint: str
    keys: KeyPair
    clients: str


def remote_endpoint(settings: Mapping[str, Any], keys: KeyPair | None) -> RemoteEndpoint | None:
    """Returns the configuration of the TCP admin endpoint; None if `admin_endpoint` is not set.

    Raises:
        ConfigError: the address is not tcp://, its port is not a number, or `fleet_key` or `admin_clients` is missing.
            They are required even with `insecure`, because a client of this socket can stop the service.
    """
    endpoint: str = settings["admin_endpoint"]
    if not endpoint:
        return None
    scheme, _, place = endpoint.partition("://")
    if scheme != "tcp":
        raise ConfigError(f"admin_endpoint = {endpoint!r}: write tcp://address:port; the Unix socket is always there")
    try:
        parse_listening(place)
    except AddressError as error:
        raise ConfigError(f"admin_endpoint = {endpoint!r}: {error}") from None
    if keys is None:
        raise ConfigError(f"admin_endpoint = {endpoint} needs fleet_key: create one with kvctl key new")
    if not settings["admin_clients"]:
        raise ConfigError(
            f"admin_endpoint = {endpoint} needs admin_clients, a file with the keys of the permitted clients"
        )
    return RemoteEndpoint(endpoint, keys, str(Path(settings["admin_clients"]).expanduser().absolute()))


def open_remote_endpoint(
    context: zmq.Context[zmq.Socket[bytes]],
    remote: RemoteEndpoint,
    name: str,
    refused: Callable[[str], None],
    complain: Callable[[str], None],
) -> tuple[CurveEndpoint, ZapAuthenticator]:
    """Binds the TCP endpoint; the caller closes the authenticator, then destroys the context.

    Args:
        context: context for the socket and the authenticator.
        remote: the endpoint's configuration.
        name: the agent's name, for the name of the authenticator's thread.
        refused: called with a description of each refused client.
        complain: called with an error text if a changed client file cannot be used.

    Raises:
        AdminError: the address cannot be bound, or the client file cannot be used.
    """
    try:
        clients = Clients(Path(remote.clients), complain)
    except KeyFileError as error:
        raise AdminError(f"admin_clients: {error}") from None
    authenticator = ZapAuthenticator(
        context, f"kvctl-admin-keys-{name}", lambda key, _: clients.level(key) is not None, refused
    )
    try:
        endpoint = CurveEndpoint(context.socket(zmq.ROUTER), clients.level)
        endpoint.socket.ipv6 = "[" in remote.endpoint
        configure_server(endpoint.socket, remote.keys)
        _bind(endpoint.socket, remote.endpoint)
    except zmq.ZMQError as error:
        authenticator.close()
        raise AdminError(f"cannot bind admin_endpoint {remote.endpoint}: {error.strerror}") from None
    except BaseException:
        authenticator.close()
        raise
    return endpoint, authenticator


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Binds to `endpoint`; with a trailing + to its first free port upwards. Raises zmq.ZMQError."""
    addresses = parse_listening(endpoint.removeprefix("tcp://"))
    for address in addresses:
        try:
            socket.bind(str(address))
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or address == addresses[-1]:
                raise
        else:
            return
