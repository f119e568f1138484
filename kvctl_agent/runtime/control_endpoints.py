"""Where control sockets bind, and why a bind is refused.

`ipc://` endpoints live in a directory only we can enter, and the kernel names the user of each connection: keys would
add nothing there, so they are for TCP. TCP stays on the loopback unless there are keys, or `insecure` says otherwise:
without keys anybody who can reach the port could open rooms.
"""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import socket as socketlib
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from kvctl_agent.contract.admin import MAX_SOCKET_PATH_BYTES
from kvctl_agent.contract.keys import KeyPair
from kvctl_agent.contract.values import shown
from kvctl_agent.errors import ConfigError
from kvctl_agent.security import curve
from kvctl_agent.security.unix_router import UnixRouter

_LINGER_MS = 0
_LONGEST = 1024
_HIGH_WATER = 20_000
_MAX_PEERS = 256  # of a Unix socket, so on one host

Router = zmq.Socket[bytes] | UnixRouter


def control_address(bootstrap: str, name: str) -> str:
    """Where a rank's control socket binds, next to the registry it belongs to: same directory, or any free port.

    Raises:
        ConfigError: the bootstrap endpoint is neither ipc:// nor tcp://, or its directory makes the path too long.
    """
    if bootstrap.startswith("ipc://"):
        # Names may be long and sockets' paths may not, so the file name is a checksum of the name.
        checksum = hashlib.blake2s(name.encode(), digest_size=6).hexdigest()
        path = Path(bootstrap.removeprefix("ipc://")).parent / f"c-{checksum}"
        return f"ipc://{path}"
    return f"tcp://{_tcp(bootstrap)[0]}:*"


def check_endpoint(endpoint: str, *, insecure: bool, keys: bool = False) -> None:
    """Refuse what must not be bound; `keys`: whether there are any.

    Raises:
        ConfigError: it is no printable text or longer than 1024 characters; an unknown scheme, a path
            over the limit, or a public address without keys or `insecure`.
    """
    if not isinstance(endpoint, str) or not endpoint.isprintable() or len(endpoint) > _LONGEST:
        raise ConfigError(f"{shown(endpoint)} is no endpoint: write ipc:///path or tcp://address:port")
    if endpoint.startswith("ipc://"):
        path = endpoint.removeprefix("ipc://")
        if not path.startswith("/"):
            raise ConfigError(f"{endpoint}: an ipc endpoint needs an absolute path")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"{endpoint}: the path exceeds {MAX_SOCKET_PATH_BYTES} bytes, the limit of a Unix socket")
        return
    host, _ = _tcp(endpoint)
    if not keys and not insecure and not _loopback(host):
        raise ConfigError(
            f"{endpoint}: {host} is not a loopback address and there are no keys; anybody who reaches it could open "
            "rooms. Set fleet_key (kvctl key new), or use ipc:// or 127.0.0.1, or set insecure = true on a network you "
            "trust"
        )


def bind(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, max_bytes: int, keys: KeyPair | None = None) -> Router:
    """A bound ROUTER with our options; over TCP with keys only owners of the same ones are let in.

    Raises:
        ConfigError: the address is taken or cannot be bound; says so.
    """
    try:
        if endpoint.startswith("ipc://"):
            path = Path(endpoint.removeprefix("ipc://"))
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_unused(path)
            return UnixRouter(path, max_bytes, _MAX_PEERS, peers_choose_names=True)
        socket = context.socket(zmq.ROUTER)
        try:
            _options(socket, max_bytes)
            curve.configure_server(socket, keys)
            socket.bind(endpoint)
        except zmq.ZMQError:
            socket.close(_LINGER_MS)
            raise
    except (zmq.ZMQError, OSError) as error:
        raise ConfigError(f"cannot bind {endpoint}: {error}; is another agent using it?") from None
    return socket


def address(router: Router) -> str:
    """Where a bound socket can be reached, with the port that was found."""
    return router.address if isinstance(router, UnixRouter) else router.getsockopt_string(zmq.LAST_ENDPOINT)


def poll_key(router: Router) -> zmq.Socket[bytes] | int:
    """What to register with a poller, and what the poller returns where there is something to do."""
    return router.fileno() if isinstance(router, UnixRouter) else router


def close(router: Router, linger_ms: int = _LINGER_MS) -> None:
    """Close a bound socket, and remove its path; while we hold it nobody else can.

    `linger_ms`: how long what was sent may still take to leave, once the context ends.
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
    """A DEALER connected to `endpoint`, which need not exist yet; over TCP with keys only to an owner of the same ones.

    Raises:
        zmq.ZMQError: there is no descriptor for it.
    """
    socket = context.socket(zmq.DEALER)
    _options(socket, max_bytes)
    if not endpoint.startswith("ipc://"):
        curve.configure_client(socket, keys)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(endpoint)
    return socket


def _remove_unused(path: Path) -> None:
    """Removes what a dead agent left at `path`: its socket refuses connections, that of a living one does not."""
    with socketlib.socket(socketlib.AF_UNIX, socketlib.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(str(path))
    if code not in (errno.ENOENT, errno.ECONNREFUSED):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    if path.is_socket():
        path.unlink(missing_ok=True)


def _options(socket: zmq.Socket[bytes], max_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if socket.type == zmq.ROUTER:
        # A restarted peer comes back under its name and takes its place; a send to nobody is an error, not a loss.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)


def _tcp(endpoint: str) -> tuple[str, str]:
    parts = urlsplit(endpoint)
    try:
        host, port = parts.hostname, parts.netloc.rpartition(":")[2]
    except ValueError:
        host, port = None, ""
    if parts.scheme != "tcp" or not host or not (_is_port(port) or port == "*"):
        raise ConfigError(f"{endpoint!r} is no endpoint: write ipc:///path or tcp://address:port")
    return (f"[{host}]" if ":" in host else host), port


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 1 << 16


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
