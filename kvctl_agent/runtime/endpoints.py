"""Where control sockets bind, and why a bind is refused.

`ipc://` endpoints live in a directory only we can enter. TCP stays on the loopback unless there are keys, or `insecure`
says otherwise: without keys anybody who can reach the port could open rooms.
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

_LINGER_MS = 0
_LONGEST = 1024
_HIGH_WATER = 20_000


def control_address(bootstrap: str, name: str) -> str:
    """Where a rank's control socket binds, next to the registry it belongs to: same directory, or any free port.

    Raises:
        ConfigError: the bootstrap endpoint is neither ipc:// nor tcp://, or its directory makes the path too long.
    """
    if bootstrap.startswith("ipc://"):
        # Names may be long and sockets' paths may not, so the file name is a digest of the name.
        digest = hashlib.blake2s(name.encode(), digest_size=6).hexdigest()
        path = Path(bootstrap.removeprefix("ipc://")).parent / f"c-{digest}"
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


def bind(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, max_bytes: int, keys: KeyPair | None = None
) -> zmq.Socket[bytes]:
    """A bound socket with our options; with keys only owners of the same ones are let in.

    Raises:
        ConfigError: the address is taken or cannot be bound; says so.
    """
    socket = context.socket(kind)
    try:
        _options(socket, max_bytes)
        curve.guard(socket, keys)
        if endpoint.startswith("ipc://"):
            path = Path(endpoint.removeprefix("ipc://"))
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_taken(path)
            socket.bind(endpoint)
            path.chmod(0o600)
        else:
            socket.bind(endpoint)
    except (zmq.ZMQError, OSError) as error:
        socket.close(_LINGER_MS)
        raise ConfigError(f"cannot bind {endpoint}: {error}; is another agent using it?") from None
    return socket


def close(socket: zmq.Socket[bytes], linger_ms: int = _LINGER_MS) -> None:
    """Close a bound socket, and remove its path, which libzmq leaves behind; while we hold it nobody else can.

    `linger_ms`: how long what was sent may still take to leave, once the context ends.
    """
    if socket.closed:
        return
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    if endpoint.startswith("ipc://"):
        Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
    socket.close(linger_ms)


def connect(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    identity: bytes,
    max_bytes: int,
    keys: KeyPair | None = None,
) -> zmq.Socket[bytes]:
    """A DEALER connected to `endpoint` (which need not exist yet), and with keys only to an owner of the same ones."""
    socket = context.socket(zmq.DEALER)
    _options(socket, max_bytes)
    curve.introduce(socket, keys)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(endpoint)
    return socket


def _refuse_taken(path: Path) -> None:
    """libzmq would take the path from a living holder without a word; a dead one's socket refuses connections."""
    with socketlib.socket(socketlib.AF_UNIX, socketlib.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(str(path))
    if code not in (errno.ENOENT, errno.ECONNREFUSED):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


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
