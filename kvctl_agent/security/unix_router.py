"""A ZMQ ROUTER on a Unix socket, implemented without libzmq.

When libzmq 4.3.5 accepts a connection on a Unix socket, an assertion fails on EMFILE (`ipc_listener.cpp`): any client
that may connect can end the process. `UnixRouter` limits the number of connections, accepts only processes of the same
user (or root), and keeps descriptors in reserve so that it still answers when the process has used up all others.

The wire format is ZMTP 3.1 (ZeroMQ RFC 37) with mechanism NULL; `MessageDecoder` does no I/O. Peers may be DEALER, REQ
and ROUTER sockets of libzmq 4.0 and later.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import resource
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import zmq

from kvctl_agent import gil
from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.host.sockets import peer_uid

MAX_CONNECTIONS = 128
SPARE_DESCRIPTORS = 3
# One router uses at most an eighth of the process's descriptor limit, but always allows a few connections.
_SHARE = 8
_FEWEST = 16
# With fewer free descriptors than this, connections that have not sent a message within this time are closed.
_SCARCE = 32
_SOON_NS = 500_000_000
_BACKLOG = 128
_ACCEPTS_A_TURN = 64
_READ_BYTES = 256 << 10
# Limit per peer that does not read; one message of any size can always be queued.
_MAX_QUEUED_BYTES = 16 << 20
_REPLENISH_MS = 1000
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_ROOT = 0

_SIGNATURE_BYTES = 10
_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_MAX_ID_BYTES = 255
_MAX_COMMAND_BYTES = 4096
_PEERS = (b"DEALER", b"REQ", b"ROUTER")
# No message of the agent's protocols has more frames; further ones are dropped to bound the memory of a message.
MAX_FRAMES = 8


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def _command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return bytes([_COMMAND, len(content)]) + content


def opening(socket_type: bytes, identity: bytes = b"") -> bytes:
    """Returns what a socket sends first: its greeting and READY.

    Args:
        socket_type: ROUTER or DEALER.
        identity: routing id under which a ROUTER addresses the socket.
    """
    # Signature, version, mechanism, as-server flag 0, filler.
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    return greeting + _command(b"READY", _property(b"Socket-Type", socket_type) + _property(b"Identity", identity))


OPENING = opening(b"ROUTER")


def encode_message(frames: Sequence[bytes]) -> bytes:
    """Encodes the frames of one message in the ZMTP wire format."""
    wire: list[bytes] = []
    for index, frame in enumerate(frames):
        flags = _MORE if index < len(frames) - 1 else 0
        if len(frame) < 256:
            wire.append(bytes([flags, len(frame)]))
        else:
            wire.append(bytes([flags | _LONG]) + len(frame).to_bytes(8, "big"))
        wire.append(frame)
    return b"".join(wire)


class MessageDecoder:
    """Decodes the ZMTP bytes received from one peer into messages.

    Attributes:
        identity: routing id sent by the peer; None until the handshake is complete.
        answers: bytes to send to the peer (PONG); the caller sends and clears them.
    """

    def __init__(self, max_bytes: int) -> None:
        """Creates a decoder; `max_bytes` is the maximum size of a frame."""
        self.identity: bytes | None = None
        self.answers = b""
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._greeted = False
        self._frames: list[bytes] = []

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Adds received bytes; returns the messages, as lists of frames, that they complete.

        Raises:
            RemoteProtocolError: the peer violates the protocol or sends a frame that is too large. The decoder cannot
                be used afterwards.
        """
        self._buffer += data
        if not self._greeted and not self._greet():
            return []
        messages = []
        for flags, body in self._take_frames():
            if flags & _COMMAND:
                self._handle_command(body)
            elif self.identity is None:
                raise RemoteProtocolError("a message before the handshake")
            else:
                if len(self._frames) < MAX_FRAMES:
                    self._frames.append(body)
                if not flags & _MORE:
                    messages.append(self._frames)
                    self._frames = []
        return messages

    def _greet(self) -> bool:
        """Reads the peer's greeting; returns False while it is incomplete.

        Raises:
            RemoteProtocolError: the greeting is not ZMTP 3.0 or later with mechanism NULL.
        """
        buffer = self._buffer
        if (buffer and buffer[0] != 0xFF) or (len(buffer) >= _SIGNATURE_BYTES and not buffer[9] & 1):
            raise RemoteProtocolError("not ZMTP")
        if len(buffer) > _SIGNATURE_BYTES and buffer[10] < 3:
            raise RemoteProtocolError(f"ZMTP {buffer[10]}, older than 3.0")
        if len(buffer) < _GREETING_BYTES:
            return False
        mechanism = bytes(buffer[12:32]).rstrip(b"\0")
        if mechanism != b"NULL":
            raise RemoteProtocolError(f"security mechanism {mechanism!r}, not NULL")
        del buffer[:_GREETING_BYTES]
        self._greeted = True
        return True

    def _take_frames(self) -> Iterator[tuple[int, bytes]]:
        """Yields (flags, body) of each complete frame in the buffer, and removes these frames."""
        buffer, at = self._buffer, 0
        while len(buffer) - at >= 2:
            flags = buffer[at]
            header = 9 if flags & _LONG else 2
            if flags & ~(_MORE | _LONG | _COMMAND):
                raise RemoteProtocolError(f"frame flags {flags:#x}")
            if len(buffer) - at < header:
                break
            size = int.from_bytes(buffer[at + 1 : at + header], "big")
            if size > (_MAX_COMMAND_BYTES if flags & _COMMAND else self._max_bytes):
                raise RemoteProtocolError(f"a frame of {size} bytes")
            if len(buffer) - at - header < size:
                break
            yield flags, bytes(buffer[at + header : at + header + size])
            at += header + size
        del buffer[:at]

    def _handle_command(self, body: bytes) -> None:
        length = body[0] if body else 0
        name, rest = body[1 : 1 + length], body[1 + length :]
        if name == b"READY" and self.identity is None:
            properties = _properties(rest)
            if properties.get(b"socket-type") not in _PEERS:
                raise RemoteProtocolError(f"a socket of type {properties.get(b'socket-type')!r}")
            self.identity = properties.get(b"identity", b"")[:_MAX_ID_BYTES]
        elif name == b"PING":  # two bytes of time to live, then a context to return in PONG
            self.answers += _command(b"PONG", rest[2:18])
        elif name == b"ERROR":
            raise RemoteProtocolError("the peer refuses the connection")


def _properties(data: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        name_ends = at + 1 + data[at]
        value_at = name_ends + 4
        value_ends = value_at + int.from_bytes(data[name_ends:value_at], "big")
        if value_ends > len(data):
            raise RemoteProtocolError("a property beyond the end of its command")
        found[data[at + 1 : name_ends].lower()] = data[value_at:value_ends]
        at = value_ends
    return found


class _Connection:
    def __init__(self, client: socket.socket, name: bytes, max_bytes: int) -> None:
        self.socket = client
        self.fd = client.fileno()
        self.name = name
        self.decoder = MessageDecoder(max_bytes)
        self.queue: collections.deque[memoryview] = collections.deque()
        self.queued_bytes = 0
        self.waits = False  # for space in the socket's send buffer
        self.spoken = False  # the peer has sent a message
        self.active_ns = time.monotonic_ns()


class UnixRouter:
    """ROUTER socket with the subset of `zmq.Socket`'s methods that the agent uses; one thread uses it.

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
        spare: int = SPARE_DESCRIPTORS,
    ) -> None:
        """Binds to `path`, which must not exist, and listens.

        Args:
            path: path of the socket file.
            max_bytes: maximum size of a received frame; a peer that sends a larger one is disconnected.
            limit: maximum number of connections, lowered if the process's descriptor limit is low. Another connection
                closes the one that has been idle longest.
            refused: called with a description of each connection that is refused or closed.
            peers_choose_names: peers are identified by the routing id that they send, and a new connection replaces an
                older one with the same id. Otherwise each connection gets a unique id.
            spare: descriptors in reserve for when the process has no others.

        Raises:
            OSError: the path cannot be bound, or too few descriptors are free.
        """
        self.address = f"ipc://{path}"
        self.closed = False
        self._max_bytes = max_bytes
        self._limit = limit
        self._refused = refused or (lambda _: None)
        self._peers_choose_names = peers_choose_names
        self._spare_count = spare
        self._by_fd: dict[int, _Connection] = {}
        self._by_name: dict[bytes, _Connection] = {}
        self._arrived: collections.deque[list[bytes]] = collections.deque()
        self._received = gil.ReceiveBuffer(_READ_BYTES)
        self._signalled = False
        self._accepted = 0
        self._muted = False
        self._reserve: list[int] = []
        with contextlib.ExitStack() as undo:
            self._listener = undo.enter_context(
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            )
            self._epoll = undo.enter_context(select.epoll())
            # Readable while decoded messages wait in `_arrived`, which the sockets in the epoll set do not show.
            self._signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(os.close, self._signal)
            undo.callback(self._release_reserve)
            for _ in range(spare):
                self._reserve.append(_spare())
            self._listener.bind(os.fspath(path))
            undo.callback(path.unlink, missing_ok=True)
            path.chmod(0o600)  # before listen, so that no other user can connect
            self._listener.listen(_BACKLOG)
            self._epoll.register(self._listener, select.EPOLLIN)
            self._epoll.register(self._signal, select.EPOLLIN)
            undo.pop_all()

    def fileno(self) -> int:
        """Returns a descriptor for a poller; it is readable when `recv_multipart` should be called."""
        return self._epoll.fileno()

    @property
    def max_wait_ms(self) -> int | None:
        """Longest time to poll `fileno` before calling `recv_multipart` even if it is not readable; None: no limit."""
        return _REPLENISH_MS if len(self._reserve) < self._spare_count else None

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._by_fd)

    def unread_bytes(self, peer: bytes) -> int:
        """Returns how many bytes wait until the peer with this routing id reads; 0 if it is not connected."""
        connection = self._by_name.get(peer)
        return 0 if connection is None else connection.queued_bytes

    def poll(self, timeout_ms: int) -> bool:
        """Waits until `recv_multipart` has a message; returns False if there is none after `timeout_ms`."""
        deadline = time.monotonic() + timeout_ms / 1000
        while not self._arrived:
            left = deadline - time.monotonic()
            self._process_events(max(0, left))
            if left <= 0:
                break
        self._update_signal()
        return bool(self._arrived)

    def recv_multipart(self, flags: int = zmq.NOBLOCK) -> list[bytes]:
        """Returns the peer's routing id followed by the frames of its message.

        Raises:
            zmq.Again: no message is available; the method never waits.
        """
        if not self._arrived:
            self._process_events(0)
            if not self._arrived:
                raise zmq.Again
        message = self._arrived.popleft()
        self._update_signal()
        return message

    def recv_all(self, most: int = sys.maxsize) -> list[list[bytes]]:
        """Returns up to `most` messages that have arrived, each as `recv_multipart` returns it.

        Reads each connection at most once, and none while `most` messages wait already.
        """
        if len(self._arrived) < most:
            self._process_events(0)
        messages = [self._arrived.popleft() for _ in range(min(most, len(self._arrived)))]
        self._update_signal()
        return messages

    def send_multipart(self, frames: Sequence[bytes], flags: int = zmq.NOBLOCK, timeout_ms: int = 0) -> None:
        """Sends a message to the peer whose routing id is the first frame.

        Args:
            frames: routing id, then the frames of the message.
            timeout_ms: longest time to wait for a peer that does not read.

        Raises:
            zmq.Again: the peer's queue is full.
            zmq.ZMQError: no peer with this routing id is connected.
        """
        connection = self._by_name.get(frames[0])
        if connection is None:
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        data = encode_message(frames[1:])
        deadline = time.monotonic() + timeout_ms / 1000
        while connection.queue and connection.queued_bytes + len(data) > _MAX_QUEUED_BYTES:
            queued_bytes = connection.queued_bytes
            self._write(connection)  # what the peer has read since the last event
            if connection.queued_bytes < queued_bytes:
                continue
            left = deadline - time.monotonic()
            if left <= 0 or not self._wait_writable(connection, left):
                raise zmq.Again
        if self._by_fd.get(connection.fd) is connection:  # else it has ended meanwhile
            self._queue(connection, data)
        self._update_signal()
        if self._by_fd.get(connection.fd) is not connection:
            raise zmq.ZMQError(errno.EHOSTUNREACH)

    def close(self, linger_ms: int = 0) -> None:
        """Sends queued messages for at most `linger_ms`, then closes all connections; keeps the path. Idempotent."""
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

    def _process_events(self, timeout_s: float) -> None:
        found = self._epoll.poll(timeout_s) if timeout_s else gil.epoll_poll(self._epoll.fileno())
        for fd, events in found:
            if fd == self._listener.fileno():
                self._accept()
                continue
            connection = self._by_fd.get(fd)
            if connection is None:  # the signal, or a connection that was closed in this iteration
                continue
            if events & select.EPOLLOUT:
                self._write(connection)
            if events & ~select.EPOLLOUT and self._by_fd.get(fd) is connection:
                self._read(connection)
        self._replenish()

    def _update_signal(self) -> None:
        """Makes the eventfd `_signal` readable if decoded messages wait, and unreadable otherwise."""
        if bool(self._arrived) != self._signalled:
            self._signalled = not self._signalled
            if self._signalled:
                gil.eventfd_write(self._signal)
            else:
                gil.eventfd_read(self._signal)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            try:
                client, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    continue  # the client has disconnected
                if not _readable(self._listener):
                    return  # accept() needs a descriptor even if no connection is waiting
                if not self._free_descriptor():
                    # Another thread took the descriptor. The listener stays readable, so stop polling it.
                    self._watch_listener(False)
                    return
                continue
            self._admit(client)

    def _admit(self, client: socket.socket) -> None:
        try:
            uid = peer_uid(client)
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
            # The kernel assigns the lowest free descriptor, so a high number means that few are free.
            if connection.fd >= descriptors - _SCARCE:
                since_ns = connection.active_ns - _SOON_NS
                for silent in [each for each in self._by_fd.values() if not each.spoken and each.active_ns < since_ns]:
                    self._drop(silent)
        if len(self._by_fd) >= limit:
            self._drop(self._longest_idle())
            self._refused(f"more than {limit} connections to {self.address}: closed the one idle longest")
        self._by_fd[connection.fd] = connection
        self._queue(connection, OPENING)

    def _longest_idle(self) -> _Connection:
        """Returns the oldest connection that never sent a message; without one, the connection that is idle longest."""
        return min(self._by_fd.values(), key=lambda each: (each.spoken, each.active_ns))

    def _read(self, connection: _Connection) -> bool:
        """Reads what has arrived; returns False if nothing has, or the connection has ended and been dropped."""
        try:
            data = self._received.recv(connection.fd)
            messages = connection.decoder.feed(data) if data else None
        except BlockingIOError:
            return False
        except (OSError, RemoteProtocolError):
            messages = None
        if messages is None:
            self._drop(connection)
            return False
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
        return self._by_fd.get(connection.fd) is connection

    def _end(self, connection: _Connection) -> None:
        """Drops a connection that the peer has closed, after reading its last messages, such as its Goodbye."""
        while self._read(connection):
            pass
        self._drop(connection)

    def _name(self, connection: _Connection, identity: bytes) -> None:
        if self._peers_choose_names and identity and identity[0]:
            connection.name = identity
            older = self._by_name.get(identity)
            if older is not None:
                self._drop(older)
        self._by_name[connection.name] = connection

    def _queue(self, connection: _Connection, data: bytes) -> None:
        sent = 0
        if not connection.queue:
            try:
                sent = gil.send(connection.fd, data)
            except BlockingIOError:
                pass
            except OSError:
                self._end(connection)
                return
            if sent == len(data):
                return
            connection.waits = True
            self._epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)
        connection.queue.append(memoryview(data)[sent:])
        connection.queued_bytes += len(data) - sent

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
            self._end(connection)
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
        """Frees a descriptor for a pending connection; returns False if there is nothing to close."""
        if self._reserve:
            os.close(self._reserve.pop())
        elif self._by_fd:
            self._drop(self._longest_idle())
        else:
            return False
        return True

    def _replenish(self) -> None:
        while len(self._reserve) < self._spare_count:
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


def _readable(listener: socket.socket) -> bool:
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    return bool(poller.poll(0))


def _spare() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
