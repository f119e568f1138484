"""A DEALER for a `UnixRouter`, implemented without libzmq as well.

libzmq passes every message through its I/O thread, in both directions, and its descriptor is readable only once for
several messages. Within a host each hand-over takes as long as a small transfer: a `UnixDealer` reads and writes the
socket on the thread that uses it, and its descriptor is readable as long as there is something to read.
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import time

import zmq

from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.host.sockets import UntrustedPathError, connect_unix
from kvctl_agent.security.unix_router import MessageDecoder, encode_message, opening

_RETRY_NS = 50_000_000
# What one call reads holds at most a few thousand messages, so that no peer keeps its caller busy for long.
_READ_BYTES = 64 << 10


class UnixDealer:
    """DEALER socket with the subset of `zmq.Socket`'s methods that the agent uses; one thread uses it.

    The peer need not listen yet, and may restart: each call connects again if the connection has ended, at most every
    50 ms. Only the newest message waits meanwhile: an agent repeats what is not answered, and a peer that comes back
    after an hour should not have to read an hour of it. A peer of another user is sent nothing.

    Attributes:
        refused: why the last connection was refused, as `UntrustedPathError` says; "" if it was not.
    """

    def __init__(self, path: str, identity: bytes, max_bytes: int, limit: int) -> None:
        """Connects to the UnixRouter at `path`.

        Args:
            identity: name under which the router addresses this socket; at most 255 bytes.
            max_bytes: maximum size of a received frame; a peer that sends a larger one is disconnected.
            limit: maximum number of queued messages.

        Raises:
            OSError: no file descriptor is left.
        """
        self.refused = ""
        self._path = path
        self._opening = opening(b"DEALER", identity)
        self._max_bytes = max_bytes
        self._limit = limit
        self._decoder = MessageDecoder(max_bytes)
        self._queue: collections.deque[bytes] = collections.deque()
        self._sent = 0  # bytes of the first message in the queue
        self._unsent = memoryview(b"")  # of the opening, which precedes the queue
        self._waits = False  # for space in the socket's send buffer
        self._closed_there = False  # the peer reads no more; what it has sent before is still to be read
        self._retry_ns = 0
        self._socket: socket.socket | None = None
        self._epoll = select.epoll()
        try:
            self._connect()
        except OSError:
            self._epoll.close()
            raise

    def fileno(self) -> int:
        """Returns a descriptor for a poller; it is readable when `recv_all` should be called."""
        return self._epoll.fileno()

    @property
    def connected(self) -> bool:
        """Whether a connection is open; without one, `recv_all` should be called from time to time."""
        return self._socket is not None

    def send(self, frame: bytes, flags: int = zmq.NOBLOCK) -> None:
        """Sends a message of one frame, or queues it until the peer reads.

        Raises:
            zmq.Again: the queue is full.
        """
        if self._socket is None:
            self._queue.clear()
        elif len(self._queue) >= self._limit:
            raise zmq.Again
        self._queue.append(encode_message([frame]))
        if self._socket is None:
            self._reconnect()
        elif not self._waits and not self._closed_there:
            self._write(self._socket)

    def recv_all(self) -> list[list[bytes]]:
        """Returns messages that have arrived, as lists of frames; never waits. Also sends queued messages."""
        if self._socket is None:
            self._reconnect()
        connection = self._socket
        if connection is None:
            return []
        try:
            data = connection.recv(_READ_BYTES)
            messages = self._decoder.feed(data) if data else None
            self._decoder.answers = b""  # a UnixRouter sends no PING
        except BlockingIOError:
            messages = []
        except (OSError, RemoteProtocolError):
            messages = None
        if messages is None:
            self._disconnect()
            return []
        if (self._queue or self._unsent) and not self._closed_there:
            self._write(connection)
        return messages

    def close(self, linger_ms: int = 0) -> None:
        """Sends queued messages for at most `linger_ms` if a connection is open, then closes it. Idempotent.

        Messages that arrive meanwhile are dropped.
        """
        deadline = time.monotonic() + linger_ms / 1000
        while self._socket is not None and self._queue and (left := deadline - time.monotonic()) > 0:
            self._epoll.poll(left)
            self.recv_all()
        self._disconnect()
        self._epoll.close()

    def _reconnect(self) -> None:
        if time.monotonic_ns() >= self._retry_ns:
            with contextlib.suppress(OSError):  # no descriptor is left
                self._connect()

    def _connect(self) -> None:
        """Connects if the peer listens; raises OSError if no file descriptor is left."""
        self._retry_ns = time.monotonic_ns() + _RETRY_NS
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.refused = ""
        try:
            connect_unix(connection, self._path)
            self._epoll.register(connection, select.EPOLLIN)
        except OSError as error:
            connection.close()
            if isinstance(error, UntrustedPathError):
                self.refused = str(error)
            return
        self._socket, self._waits, self._closed_there = connection, False, False
        self._decoder = MessageDecoder(self._max_bytes)
        self._unsent = memoryview(self._opening)
        self._write(connection)

    def _write(self, connection: socket.socket) -> None:
        """Sends what the socket has space for; a UnixRouter accepts messages right behind the handshake."""
        waits = False
        try:
            while self._unsent:
                self._unsent = self._unsent[connection.send(self._unsent) :]
            while self._queue:
                data = self._queue[0]
                self._sent += connection.send(memoryview(data)[self._sent :] if self._sent else data)
                if self._sent == len(data):
                    self._queue.popleft()
                    self._sent = 0
        except BlockingIOError:
            waits = True
        except OSError:
            # The last messages of a peer that has closed the connection, such as its Goodbye, may not be read yet.
            # `recv_all` disconnects when they are.
            self._closed_there = True
        if waits != self._waits:
            self._waits = waits
            self._epoll.modify(connection, select.EPOLLIN | select.EPOLLOUT if waits else select.EPOLLIN)

    def _disconnect(self) -> None:
        """Closes the connection; of the queued messages the last one is sent on the next connection."""
        if self._socket is not None:
            while len(self._queue) > 1:
                self._queue.popleft()
            self._socket.close()
            self._socket = None
            self._sent = 0
