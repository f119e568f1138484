"""HTTP with a deadline for all of an exchange and a limit on the answer.

`http.client` reads the answer from a stream whose every read has what is left of the time: with its own time limits,
those of single reads, a server that sends slowly would hold its caller.
"""

from __future__ import annotations

import io
import socket
import time
from http.client import HTTPResponse, IncompleteRead
from typing import Any

from kvctl_agent.host import resolver

_PIECE_BYTES = 1 << 16
_RECENT_NS = 10_000_000_000  # for which the addresses of a host name are used again
_LOOK_UP_S = 0.005


class LookupFailed(OSError):
    """A host name has no address; the text names the host and the reason."""


class AnswerTooLarge(Exception):
    """The answer and its headers exceed the limit."""


def left_s(deadline_s: float) -> float:
    """Returns the time until a monotonic deadline; raises TimeoutError if it has passed."""
    left = deadline_s - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def connect(host: str, port: int, deadline_s: float) -> socket.socket:
    """Connects to the first address of a host that accepts it before a monotonic deadline.

    Raises:
        LookupFailed: the host name has no address.
        OSError: no address accepts the connection.
        TimeoutError: the deadline has passed.
    """
    begun_ns = time.monotonic_ns()
    while (found := resolver.find(host, begun_ns, _RECENT_NS)) is None:
        time.sleep(min(_LOOK_UP_S, left_s(deadline_s)))
    failure: OSError = LookupFailed(found.error)
    for number, address in enumerate(found.addresses):
        try:
            return socket.create_connection((address, port), left_s(deadline_s) / (len(found.addresses) - number))
        except OSError as error:
            failure = error
    raise failure


def exchange(connection: socket.socket, request: bytes, deadline_s: float, most_bytes: int) -> tuple[int, Any, bytes]:
    """Sends a request; returns status, headers and body of the answer. The caller closes the connection.

    Raises:
        AnswerTooLarge: the answer and its headers exceed `most_bytes`.
        OSError, http.client.HTTPException: the connection failed or the answer is not HTTP.
        TimeoutError: no complete answer before the deadline.
    """
    connection.settimeout(left_s(deadline_s))
    connection.sendall(request)
    response = HTTPResponse(_Stream(connection, deadline_s, most_bytes))  # type: ignore[arg-type]
    response.begin()
    body = b"".join(iter(lambda: response.read(_PIECE_BYTES), b""))  # all at once, it allocates any Content-Length
    if response.length:
        raise IncompleteRead(b"", response.length)
    return response.status, response.headers, body


class _Stream(io.RawIOBase):
    """What HTTPResponse reads: a socket, until a deadline, and a limited number of bytes."""

    def __init__(self, connection: socket.socket, deadline_s: float, most_bytes: int) -> None:
        self._connection, self._deadline_s, self._left = connection, deadline_s, most_bytes

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self, _PIECE_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._connection.settimeout(left_s(self._deadline_s))
        nbytes = self._connection.recv_into(buffer)
        self._left -= nbytes
        if self._left < 0:
            raise AnswerTooLarge
        return nbytes
