"""A ZMQ ROUTER on a Unix socket that accepts its connections itself.

libzmq 4.3.5 accepts on a Unix socket with an assertion that fails on EMFILE (`ipc_listener.cpp`), so that whoever may
connect can end the process. Here connections are limited in number, come from our own user only, and descriptors are
kept in reserve, so that a client is still answered when the rest of the process has used up its own.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.security import zmtp

MAX_CONNECTIONS = 128
_RESERVE = 3
# Of the descriptors that the process may have, one socket's connections take an eighth, or a few.
_SHARE = 8
_FEWEST = 16
# With fewer descriptors left than this, connections that have not said anything for so long are closed.
_SCARCE = 32
_SOON_NS = 500_000_000
_BACKLOG = 128
_ACCEPTS_A_TURN = 64
_READ_BYTES = 256 << 10
# Of one peer that does not read; one message may always be queued, however large.
_MAX_QUEUED_BYTES = 16 << 20
_REPLENISH_MS = 1000
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_ROOT = 0


class _Connection:
    def __init__(self, client: socket.socket, name: bytes, max_bytes: int) -> None:
        self.socket = client
        self.fd = client.fileno()
        self.name = name
        self.decoder = zmtp.Decoder(max_bytes)
        self.queue: collections.deque[memoryview] = collections.deque()
        self.queued_bytes = 0
        self.waits = False  # for room in the peer's socket
        self.spoken = False  # has sent a message
        self.active_ns = time.monotonic_ns()


class UnixRouter:
    """Has those methods of a `zmq.Socket` that a ROUTER's owner needs; used by one thread.

    Attributes:
        address: ipc:// and the path.
        closed: whether `close` was called.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        limit: int = MAX_CONNECTIONS,
        refused: Callable[[str], None] | None = None,
        *,
        peers_choose_names: bool = False,
    ) -> None:
        """Binds and listens; nothing may be at `path`.

        Args:
            max_bytes: of one frame from a peer; one that sends a larger one is disconnected.
            limit: connections at one time, fewer where the process may have few descriptors. One more closes the
                one that has been quiet longest.
            refused: told, in words, of each connection that is refused or closed.
            peers_choose_names: a peer is known by the routing id that it brings, and a new connection takes the place
                of an older one of the same name. Without it each connection gets a name of its own.

        Raises:
            OSError: the path cannot be bound, or there are too few descriptors.
        """
        self.address = f"ipc://{path}"
        self.closed = False
        self._max_bytes = max_bytes
        self._limit = limit
        self._refused = refused or (lambda _: None)
        self._peers_choose_names = peers_choose_names
        self._by_fd: dict[int, _Connection] = {}
        self._by_name: dict[bytes, _Connection] = {}
        self._arrived: collections.deque[list[bytes]] = collections.deque()
        self._signalled = False
        self._accepted = 0
        self._muted = False
        self._reserve: list[int] = []
        with contextlib.ExitStack() as undo:
            self._listener = undo.enter_context(
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            )
            self._epoll = undo.enter_context(select.epoll())
            # Readable while messages wait that were read together with one that has been given out.
            self._signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._signal)
            undo.callback(self._release_reserve)
            for _ in range(_RESERVE):
                self._reserve.append(_spare())
            self._listener.bind(os.fspath(path))
            undo.callback(path.unlink, missing_ok=True)
            path.chmod(0o600)  # before anybody can connect
            self._listener.listen(_BACKLOG)
            self._epoll.register(self._listener, select.EPOLLIN)
            self._epoll.register(self._signal, select.EPOLLIN)
            undo.pop_all()

    def fileno(self) -> int:
        """A descriptor that is readable when there is something to do here: for pollers."""
        return self._epoll.fileno()

    @property
    def patience_ms(self) -> int | None:
        """How long the owner may wait for `fileno` before it calls `recv_multipart` anyway; None: for ever."""
        return _REPLENISH_MS if len(self._reserve) < _RESERVE else None

    @property
    def connections(self) -> int:
        return len(self._by_fd)

    def poll(self, timeout_ms: int) -> bool:
        """Waits until `recv_multipart` has a message; False when `timeout_ms` is over."""
        deadline = time.monotonic() + timeout_ms / 1000
        while not self._arrived:
            left = deadline - time.monotonic()
            self._turn(max(0, left))
            if left <= 0:
                break
        self._tell()
        return bool(self._arrived)

    def recv_multipart(self, flags: int = zmq.NOBLOCK) -> list[bytes]:
        """The peer's name and the frames of its message.

        Raises:
            zmq.Again: there is none; never waits.
        """
        if not self._arrived:
            self._turn(0)
            if not self._arrived:
                raise zmq.Again
        message = self._arrived.popleft()
        self._tell()
        return message

    def send_multipart(self, frames: Sequence[bytes], flags: int = zmq.NOBLOCK, timeout_ms: int = 0) -> None:
        """Sends to the peer that the first frame names.

        Args:
            timeout_ms: how long to wait where the peer does not read.

        Raises:
            zmq.Again: it has not read so much that no more is queued for it.
            zmq.ZMQError: nobody of that name is connected.
        """
        connection = self._by_name.get(frames[0])
        if connection is None:
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        data = zmtp.encode(frames[1:])
        deadline = time.monotonic() + timeout_ms / 1000
        while connection.queue and connection.queued_bytes + len(data) > _MAX_QUEUED_BYTES:
            left = deadline - time.monotonic()
            if left <= 0 or not self._wait_writable(connection, left):
                raise zmq.Again
            self._write(connection)
        self._queue(connection, data)
        if connection.fd not in self._by_fd:
            raise zmq.ZMQError(errno.EHOSTUNREACH)

    def close(self, linger_ms: int = 0) -> None:
        """Closes all connections, after at most `linger_ms` for what is queued; leaves the path. Idempotent."""
        if self.closed:
            return
        self.closed = True
        deadline = time.monotonic() + linger_ms / 1000
        for connection in list(self._by_fd.values()):
            while connection.queue and (left := deadline - time.monotonic()) > 0:
                if not self._wait_writable(connection, left):
                    break
                self._write(connection)
            self._drop(connection)
        self._listener.close()
        self._epoll.close()
        os.close(self._signal)
        self._release_reserve()

    def _turn(self, timeout_s: float) -> None:
        for fd, events in self._epoll.poll(timeout_s):
            if fd == self._listener.fileno():
                self._accept()
                continue
            connection = self._by_fd.get(fd)
            if connection is None:  # the signal, or one that was closed in this turn
                continue
            if events & select.EPOLLOUT:
                self._write(connection)
            if events & ~select.EPOLLOUT:
                self._read(connection)
        self._replenish()

    def _tell(self) -> None:
        """Keep the signal readable exactly while messages wait."""
        if bool(self._arrived) != self._signalled:
            self._signalled = not self._signalled
            if self._signalled:
                os.eventfd_write(self._signal, 1)
            else:
                os.eventfd_read(self._signal)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                client, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    continue  # that client has gone
                if not self._free_descriptor():
                    # Another thread took all of them. The listener stays readable, so that it must not be watched.
                    self._watch_listener(False)
                    return
                continue
            self._admit(client)

    def _admit(self, client: socket.socket) -> None:
        try:
            _, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid not in (_ROOT, os.geteuid()):
                client.close()
                self._refused(f"refused a connection of uid {uid} to {self.address}")
                return
            client.setblocking(False)
            self._accepted += 1
            connection = _Connection(client, b"\0%d" % self._accepted, self._max_bytes)
            self._epoll.register(connection.fd, select.EPOLLIN)
        except OSError:
            client.close()
            return
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = self._limit
        if descriptors != resource.RLIM_INFINITY:
            limit = min(limit, max(_FEWEST, descriptors // _SHARE))
            # The kernel gives out the lowest free number.
            if connection.fd >= descriptors - _SCARCE:
                since_ns = connection.active_ns - _SOON_NS
                for silent in [each for each in self._by_fd.values() if not each.spoken and each.active_ns < since_ns]:
                    self._drop(silent)
        if len(self._by_fd) >= limit:
            self._drop(self._quietest())
            self._refused(f"more than {limit} connections to {self.address}: closed the quietest")
        self._by_fd[connection.fd] = connection
        self._queue(connection, zmtp.OPENING)

    def _quietest(self) -> _Connection:
        """What is closed first: connections that have said nothing, the oldest of them; then the longest quiet one."""
        return min(self._by_fd.values(), key=lambda each: (each.spoken, each.active_ns))

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_READ_BYTES)
            messages = connection.decoder.feed(data) if data else None
        except BlockingIOError:
            return
        except (OSError, RemoteProtocolError):
            messages = None
        if messages is None:
            self._drop(connection)
            return
        if connection.decoder.identity is not None and connection.name not in self._by_name:
            self._name(connection, connection.decoder.identity)
        if connection.decoder.answers:
            answers, connection.decoder.answers = connection.decoder.answers, b""
            if connection.queued_bytes < _MAX_QUEUED_BYTES:
                self._queue(connection, answers)
        if messages:
            connection.spoken = True
            connection.active_ns = time.monotonic_ns()
            self._arrived.extend([connection.name, *frames] for frames in messages)

    def _name(self, connection: _Connection, identity: bytes) -> None:
        if self._peers_choose_names and identity and identity[0]:
            connection.name = identity
            older = self._by_name.get(identity)
            if older is not None:
                self._drop(older)
        self._by_name[connection.name] = connection

    def _queue(self, connection: _Connection, data: bytes) -> None:
        idle = not connection.queue
        connection.queue.append(memoryview(data))
        connection.queued_bytes += len(data)
        if idle:
            self._write(connection)
            if connection.queue:
                connection.waits = True
                self._epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)

    def _write(self, connection: _Connection) -> None:
        try:
            while connection.queue:
                data = connection.queue[0]
                sent = connection.socket.send(data)
                connection.queued_bytes -= sent
                if sent < len(data):
                    connection.queue[0] = data[sent:]
                else:
                    connection.queue.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        if connection.waits:
            connection.waits = False
            self._epoll.modify(connection.fd, select.EPOLLIN)

    def _wait_writable(self, connection: _Connection, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(connection.fd, select.POLLOUT)
        return bool(poller.poll(timeout_s * 1000))

    def _drop(self, connection: _Connection) -> None:
        if self._by_fd.get(connection.fd) is connection:
            del self._by_fd[connection.fd]
        if self._by_name.get(connection.name) is connection:
            del self._by_name[connection.name]
        connection.queue.clear()
        connection.socket.close()

    def _free_descriptor(self) -> bool:
        """Make a descriptor free for the connection that waits; False where there is nothing to close."""
        if self._reserve:
            os.close(self._reserve.pop())
        elif self._by_fd:
            self._drop(self._quietest())
        else:
            return False
        return True

    def _replenish(self) -> None:
        while len(self._reserve) < _RESERVE:
            try:
                self._reserve.append(_spare())
            except OSError:
                break
        if self._muted and self._reserve:
            self._watch_listener(True)

    def _watch_listener(self, watched: bool) -> None:
        self._muted = not watched
        self._epoll.modify(self._listener, select.EPOLLIN if watched else 0)

    def _release_reserve(self) -> None:
        while self._reserve:
            os.close(self._reserve.pop())


def _spare() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
