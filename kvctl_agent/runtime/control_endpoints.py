"""Endpoints and sockets of the control channel and the registry: checks, binds and connects `ipc://` and `tcp://`.

`ipc://` endpoints are in a directory in which only this user and root can replace files, and the kernel reports the
user at the other end of each connection: both ends accept only this user and root. Keys are used for TCP only. TCP is
limited to loopback addresses unless there are keys or `insecure` is set: without keys anyone who can reach the port
could open rooms.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket as socketlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from kvctl_agent.contract.addresses import Address, parse_endpoint, parse_place
from kvctl_agent.contract.values import shown
from kvctl_agent.errors import ConfigError
from kvctl_agent.host import resolver
from kvctl_agent.host.keys import KeyPair
from kvctl_agent.host.sockets import UntrustedPathError, check_path
from kvctl_agent.security import curve
from kvctl_agent.security.unix_dealer import UnixDealer
from kvctl_agent.security.unix_router import UnixRouter

_LINGER_MS = 0
_HIGH_WATER = 20_000
_FRAMES_A_TURN = 256
_MAX_PEERS = 256  # connections to a Unix socket, so from one host
_PING_MS = 1_000
_PONG_MS = 5_000
_CONNECT_MS = 3_000
_HANDSHAKE_MS = 10_000
_LOOK_UP_NS = 4_000_000_000
_MONITORED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED


class NamedDealer:
    """DEALER to a host name, which is looked up on another thread, and again while there is no connection.

    libzmq only gets numeric addresses. If the name has other addresses than the one that was tried, the next is tried.

    Attributes:
        socket: the socket; without an address until the name is known, so that `send` raises zmq.Again.
        error: why the name has no address; "" if it has.
    """

    def __init__(self, socket: zmq.Socket[bytes], address: Address) -> None:
        self.socket = socket
        self.error = ""
        self._address = address
        self._tried = ""  # numeric address
        self._connected = False
        self._due_ns = 0
        self._since_ns = time.monotonic_ns() - _LOOK_UP_NS
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_MONITORED)
        self.turn(time.monotonic_ns())

    def turn(self, now_ns: int) -> None:
        """Connects once the name is known, and elsewhere if the connection has ended and the name has changed."""
        for event in self._events():
            self._connected = event == zmq.EVENT_CONNECTED
            self._due_ns, self._since_ns = 0, now_ns
        if self._connected or now_ns < self._due_ns:
            return
        answer = resolver.find(self._address.host, self._since_ns)
        if answer is None:
            return
        self.error = answer.error
        waited, self._due_ns, self._since_ns = self._due_ns > 0, now_ns + _LOOK_UP_NS, now_ns
        known = answer.addresses
        if not known or (self._tried in known and not waited):
            return  # libzmq tries the same address again
        following = known[(known.index(self._tried) + 1) % len(known)] if self._tried in known else known[0]
        if following != self._tried:
            if self._tried:
                self.socket.disconnect(str(self._address._replace(host=self._tried)))
            self._tried = following
            self.socket.setsockopt(zmq.IPV6, ":" in following)
            self.socket.connect(str(self._address._replace(host=following)))

    def _events(self) -> Iterator[int]:
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            yield int.from_bytes(self._monitor.recv_multipart(zmq.NOBLOCK)[0][:2], sys.byteorder)

    def send(self, frame: bytes, flags: int = zmq.NOBLOCK) -> None:
        """Sends a message of one frame; raises zmq.Again if the queue is full or the name is not known yet."""
        self.socket.send(frame, flags)

    def close(self, linger_ms: int = 0) -> None:
        # libzmq's thread waits for space in the monitor's queue of 1,000 events, and `disable_monitor` for that thread.
        for _ in self._events():
            pass
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(linger_ms)


Router = zmq.Socket[bytes] | UnixRouter
Dealer = zmq.Socket[bytes] | UnixDealer | NamedDealer


def control_address(bootstrap: str, name: str, listen: str = "") -> str:
    """Returns the endpoint to bind a rank's control socket to.

    Without `listen` it is in the directory of an ipc:// registry, or on a free port of the host of a tcp:// registry.

    Args:
        bootstrap: endpoint of the registry.
        name: name of the rank.
        listen: host or host:port of the endpoint, with an IPv6 address in brackets; "" for the default.

    Raises:
        ConfigError: `listen` is not an address, or peers cannot connect to the host.
    """
    if listen:
        try:
            address = parse_place(listen, default_port=0)
        except ConfigError:
            raise ConfigError(
                f"listen = {shown(listen)}: write address or address:port, such as 10.0.0.5 or [fd00::5]"
            ) from None
        if address.is_wildcard:
            raise ConfigError(
                f"listen = {listen}: peers cannot connect to {address.bracketed_host}; name an address of this host"
            )
        return str(address)
    registry = parse_endpoint(bootstrap, bound=True)
    if registry.scheme == "ipc":
        # Names may be longer than a socket's path, so the file name is a hash of the name.
        checksum = hashlib.blake2s(name.encode(), digest_size=6).hexdigest()
        return str(registry._replace(path=str(Path(registry.path).parent / f"c-{checksum}")))
    return str(registry._replace(port=0))


def check_endpoint(endpoint: str, *, insecure: bool, keys: bool = False, bound: bool = False) -> None:
    """Checks an endpoint before it is bound or connected to.

    Args:
        insecure: allow public TCP addresses without keys.
        keys: whether the fleet has keys.
        bound: whether this agent binds the endpoint, whose port may then be 0 or *.

    Raises:
        ConfigError: as for `parse_endpoint`, or a public address without keys or `insecure`.
    """
    address = parse_endpoint(endpoint, bound=bound)
    if not (keys or insecure or address.is_local):
        raise ConfigError(
            f"{endpoint}: {address.bracketed_host} is not a loopback address and there are no keys; anyone who reaches "
            "it could open rooms. Set fleet_key (kvctl key new), or use ipc:// or 127.0.0.1, or set insecure = true on "
            "a network you trust"
        )


def any_port(endpoint: str) -> bool:
    """Returns whether a valid endpoint leaves its port to the system, with port 0 or *."""
    address = parse_endpoint(endpoint, bound=True)
    return address.scheme == "tcp" and not address.port


def own_address(endpoint: str) -> str:
    """Returns the numeric address from which this host reaches a valid endpoint, also if the endpoint is its own.

    "" for an endpoint that only this host can reach, and if the host of the endpoint cannot be looked up or reached.
    """
    address = parse_endpoint(endpoint, bound=True)
    if address.is_local or not (known := resolver.resolve(address.host).addresses):
        return ""
    try:
        with socketlib.socket(
            socketlib.AF_INET6 if ":" in known[0] else socketlib.AF_INET, socketlib.SOCK_DGRAM
        ) as probe:
            probe.connect((known[0], 1))  # of UDP: asks the routing table, and sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def bind(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    max_bytes: int,
    keys: KeyPair | None = None,
    domain: bytes = curve.DOMAIN,
    queue: int = _HIGH_WATER,
) -> Router:
    """Binds a ROUTER; over TCP with keys the socket accepts only clients that the context's authenticator admits.

    Args:
        max_bytes: size limit of a received message.
        domain: passed to the authenticator with each client's key.
        queue: number of messages that wait for a client on TCP that does not read; further ones are dropped.

    Raises:
        ConfigError: the address is taken or cannot be bound, or other users could replace the Unix socket.
    """
    try:
        if endpoint.startswith("ipc://"):
            path = Path(endpoint.removeprefix("ipc://"))
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_path(path.parent)
            _remove_unused(path)
            return UnixRouter(path, max_bytes, _MAX_PEERS, peers_choose_names=True)
        socket = context.socket(zmq.ROUTER)
        try:
            _options(socket, endpoint, max_bytes)
            socket.setsockopt(zmq.SNDHWM, queue)
            curve.configure_server(socket, keys, domain)
            socket.bind(endpoint)
        except zmq.ZMQError:
            socket.close(_LINGER_MS)
            raise
    except UntrustedPathError as error:
        raise ConfigError(f"cannot bind {endpoint}: {error}") from None
    except (zmq.ZMQError, OSError) as error:
        foreign = error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV)
        hint = "set listen to an address of this host" if foreign else "is another agent using it?"
        raise ConfigError(f"cannot bind {endpoint}: {error}; {hint}") from None
    return socket


def address(router: Router) -> str:
    """Returns the endpoint of a bound socket, with the port that was chosen."""
    return router.address if isinstance(router, UnixRouter) else router.getsockopt_string(zmq.LAST_ENDPOINT)


def poll_key(socket: Router | Dealer) -> zmq.Socket[bytes] | int:
    """Returns the key to register a socket with a poller: the socket itself, or a descriptor if it is not libzmq's."""
    if isinstance(socket, UnixRouter | UnixDealer):
        return socket.fileno()
    return socket.socket if isinstance(socket, NamedDealer) else socket


def close(router: Router, linger_ms: int = _LINGER_MS) -> None:
    """Closes a bound socket and removes its path, which no other agent can use until then.

    Args:
        linger_ms: longest time to send queued messages.
    """
    if router.closed:
        return
    if isinstance(router, UnixRouter):
        Path(router.address.removeprefix("ipc://")).unlink(missing_ok=True)
    router.close(linger_ms)


def connect(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    identity: bytes,
    max_bytes: int,
    keys: KeyPair | None = None,
) -> zmq.Socket[bytes]:
    """Connects a DEALER to `endpoint`, which need not exist yet; over TCP with keys the server must have the same keys.

    libzmq looks a host name up on its only I/O thread; `connect_to_peer` does not let it.

    Args:
        identity: name under which a ROUTER addresses this socket.
        max_bytes: size limit of a received message.

    Raises:
        zmq.ZMQError: no file descriptor is left.
    """
    socket = _dealer(context, endpoint, identity, max_bytes, keys)
    socket.connect(endpoint)
    return socket


def connect_to_peer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    identity: bytes,
    max_bytes: int,
    keys: KeyPair | None = None,
) -> Dealer:
    """Connects a DEALER as `connect` does, without libzmq within this host, and without waiting for a host name.

    The caller calls `NamedDealer.turn` from time to time.
    """
    address = parse_endpoint(endpoint)
    if address.scheme == "tcp" and address.ip is not None:
        return connect(context, endpoint, identity, max_bytes, keys)
    if address.scheme == "tcp":
        return NamedDealer(_dealer(context, endpoint, identity, max_bytes, keys), address)
    try:
        return UnixDealer(address.path, identity, max_bytes, _HIGH_WATER)
    except OSError as error:
        raise zmq.ZMQError(error.errno) from error


def _dealer(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes, max_bytes: int, keys: KeyPair | None
) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    _options(socket, endpoint, max_bytes)
    if not endpoint.startswith("ipc://"):
        curve.configure_client(socket, keys)
    socket.setsockopt(zmq.IDENTITY, identity)
    return socket


def received(socket: Router | Dealer) -> Iterator[list[bytes]]:
    """Yields the messages that have arrived at a readable socket; a few hundred, or what one read has brought."""
    if isinstance(socket, UnixRouter):
        yield from socket.recv_all(_FRAMES_A_TURN)
        return
    if isinstance(socket, UnixDealer):
        yield from socket.recv_all()
        return
    if isinstance(socket, NamedDealer):
        socket = socket.socket
    for _ in range(_FRAMES_A_TURN):
        # Asked first: the exception of an empty socket takes longer than most messages.
        if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            return


def _remove_unused(path: Path) -> None:
    """Removes the socket file of an agent that has ended, which refuses connections.

    Raises:
        OSError: the socket is in use.
    """
    with socketlib.socket(socketlib.AF_UNIX, socketlib.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(str(path))
    if code not in (errno.ENOENT, errno.ECONNREFUSED):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    if path.is_socket():
        path.unlink(missing_ok=True)


def _options(socket: zmq.Socket[bytes], endpoint: str, max_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if endpoint.startswith("tcp://"):
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        # A network that drops packets closes no connection. Without these, the kernel's timers decide: after an outage
        # of a minute a connection is silent for up to another minute, and for 15 until it is given up.
        socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    if socket.type == zmq.ROUTER:
        # A restarted peer replaces its old connection by name; a message to an unknown peer is an error, not lost.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
