"""TCP from one host to another: whether a port answers, and whether large packets pass.

A connection begins with the token of the preflight, then has messages: eight bytes with a size, and as many bytes. The
token and each message are acknowledged with one byte.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

from kvctl_agent.contract.addresses import ip_address
from kvctl_agent.host.resolver import resolve

LARGE_BYTES = 64 << 10
_SIZE = struct.Struct("!Q")
_DONE = b"k"
_ROUNDS = 5
_IP_MTU, _IPV6_MTU = 14, 24  # of linux/in.h, which the module socket does not name


class Listener:
    """Answers connections on TCP ports until the process ends.

    Attributes:
        refused: why it cannot listen on the others, by port.
    """

    def __init__(self, ports: Iterable[int], token: str) -> None:
        self.ports: list[int] = []
        self.refused: dict[str, str] = {}
        self._token = bytes.fromhex(token)
        for port in tuple(ports) or (0,):
            try:
                dual = socket.has_dualstack_ipv6()
                family = socket.AF_INET6 if dual else socket.AF_INET
                listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
            except OSError as error:
                self.refused[str(port)] = os.strerror(error.errno) if error.errno else str(error)
                continue
            self.ports.append(listener.getsockname()[1])
            threading.Thread(target=self._accept, args=(listener,), name="preflight-port", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection,), name="preflight-tcp", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _receive(connection, len(self._token)) != self._token:
                return
            connection.sendall(_DONE)
            while True:
                (nbytes,) = _SIZE.unpack(_receive(connection, _SIZE.size))
                if nbytes > LARGE_BYTES:
                    return
                _receive(connection, nbytes)
                connection.sendall(_DONE)


def reach(address: str, port: int, token: str, timeout_s: float) -> dict[str, Any]:
    """Connects to the listener of another host, and exchanges messages.

    Args:
        timeout_s: longest time of the connection, and of each message.

    Returns:
        `state`: "ok", or the first step that failed: "unresolved", "refused", "no answer" (of the connection), "silent"
        (a small message) or "large lost"; `error`; `rtt_ns`; and `mtu`, as the kernel knows it for this path.
    """
    found: dict[str, Any] = {"port": port, "state": "no answer", "error": "", "rtt_ns": None, "mtu": None}
    place = f"{address} port {port}"
    step, answer = f"connecting to {place}", resolve(address)
    if not answer.addresses:
        return {**found, "state": "unresolved", "error": answer.error}
    try:
        with socket.create_connection((answer.addresses[0], port), timeout_s) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found["state"], step = "silent", f"a small message to {place}"
            connection.sendall(bytes.fromhex(token))
            _receive(connection, len(_DONE))
            found["rtt_ns"] = min(_send(connection, 0) for _ in range(_ROUNDS))
            found["mtu"] = _mtu(connection)
            found["state"], step = "large lost", f"a message of {LARGE_BYTES >> 10} KiB to {place}"
            _send(connection, LARGE_BYTES)
        found["state"] = "ok"
    except TimeoutError:
        found["error"] = f"{step}: no answer within {timeout_s:g} s"
    except ConnectionRefusedError:
        found["state"], found["error"] = "refused", f"{step}: refused"
    except (OSError, EOFError) as error:
        found["error"] = f"{step}: {error}"
    return found


def own_address(given: str) -> str:
    """Returns the address at which other hosts probably reach this one.

    Returns:
        `given`, if it is an address; else the one that the SSH client has connected to; else that of the default route;
        else `given`.
    """
    if ip_address(given) is not None:
        return given
    words = os.environ.get("SSH_CONNECTION", "").split()
    if len(words) == 4 and ip_address(words[2]) is not None:
        return words[2]
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # nothing is sent there
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    return given


def _send(connection: socket.socket, nbytes: int) -> int:
    """Sends a message; returns the nanoseconds until it is acknowledged."""
    began = time.monotonic_ns()
    connection.sendall(_SIZE.pack(nbytes) + bytes(nbytes))
    _receive(connection, len(_DONE))
    return time.monotonic_ns() - began


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    """Receives so many bytes within the connection's timeout."""
    data, until = bytearray(), time.monotonic() + (connection.gettimeout() or math.inf)
    while len(data) < nbytes:
        if time.monotonic() > until:
            raise TimeoutError
        more = connection.recv(nbytes - len(data))
        if not more:
            raise EOFError("the connection was closed")
        data += more
    return bytes(data)


def _mtu(connection: socket.socket) -> int | None:
    ipv4 = connection.family == socket.AF_INET
    level, option = (socket.IPPROTO_IP, _IP_MTU) if ipv4 else (socket.IPPROTO_IPV6, _IPV6_MTU)
    with contextlib.suppress(OSError):
        return connection.getsockopt(level, option)
    return None
