"""TCP connections for the tags of the `mooncake` transport, one from each writer to each of its readers.

A connection carries tags in one direction: a greeting (the writer's identity and a secret from the reader's metadata),
then the length and the bytes of each tag. Readers send nothing. When the connection ends, the writer knows within
microseconds that the reader's process or transport is gone; Mooncake itself detects it with its next write, after up to
1 s.

All sockets are read and written inside the transport's calls, without a thread. Clients must send the secret; the bytes
they may send are bounded, and a connection is closed at the first malformed byte.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import threading
from collections import deque

from kvctl_agent.errors import PeerDisconnected, TransportError
from kvctl_agent.transport.base import MAX_TAG_BYTES

SECRET_BYTES = 16
IDENT_BYTES = 16

_MAGIC = b"kvctltag"
_FIXED_BYTES = len(_MAGIC) + SECRET_BYTES + IDENT_BYTES + 2
_NAME_MAX_BYTES = 1024
_LENGTH_BYTES = 4
_RECEIVE_BYTES = 1 << 18
_ROUNDS = 16
_SEND_BYTES = 1 << 18
_OUTBOX_MAX_BYTES = 256 << 20
_UNIDENTIFIED_MAX = 64
_BACKLOG = 512


class Sender:
    """A connection from a writer, with the bytes received so far; `ident` and `name` are "" before the greeting."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.ident = ""
        self.name = ""
        self._pending = bytearray()

    def take(self, secret: bytes, more: bytes) -> list[bytes]:
        """Appends received bytes `more` to the pending ones, and returns the tags that are now complete.

        `secret` is the secret that the greeting must contain.

        Raises:
            ValueError: the bytes are not a greeting and tags.
        """
        self._pending += more
        if not self.ident and not self._greeted(secret):
            return []
        tags: list[bytes] = []
        at = 0
        while len(self._pending) - at >= _LENGTH_BYTES:
            nbytes = int.from_bytes(self._pending[at : at + _LENGTH_BYTES], "little")
            if not 0 < nbytes <= MAX_TAG_BYTES:
                raise ValueError(f"a tag of {nbytes} bytes")
            end = at + _LENGTH_BYTES + nbytes
            if len(self._pending) < end:
                break
            tags.append(bytes(self._pending[at + _LENGTH_BYTES : end]))
            at = end
        del self._pending[:at]
        return tags

    def _greeted(self, secret: bytes) -> bool:
        if not _MAGIC.startswith(self._pending[: len(_MAGIC)]):
            raise ValueError("no greeting")
        if len(self._pending) < _FIXED_BYTES:
            return False
        body = bytes(self._pending[len(_MAGIC) : _FIXED_BYTES])
        name_bytes = int.from_bytes(body[-2:], "little")
        if not hmac.compare_digest(body[:SECRET_BYTES], secret) or name_bytes > _NAME_MAX_BYTES:
            raise ValueError("wrong secret or name")
        if len(self._pending) < _FIXED_BYTES + name_bytes:
            return False
        self.ident = body[SECRET_BYTES:-2].decode("ascii", "replace")
        self.name = self._pending[_FIXED_BYTES : _FIXED_BYTES + name_bytes].decode("utf-8", "surrogatepass")
        del self._pending[: _FIXED_BYTES + name_bytes]
        return True


class TagListener:
    """Listens for the connections of writers and receives their tags.

    Attributes:
        secret: The secret that the greeting of a writer must contain.
    """

    def __init__(self, host: str) -> None:
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._lock = threading.Lock()
        self._senders: dict[int, Sender] = {}
        self._listener = socket.socket(_family(host), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._listener.bind((host, 0))
            self._listener.listen(_BACKLOG)
        except OSError as error:
            self._listener.close()
            raise TransportError(f"mooncake: cannot listen for tags at {host}: {error}") from error
        self.port = int(self._listener.getsockname()[1])
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    def collect(self, landed: deque[tuple[Sender, bytes]]) -> None:
        """Appends the tags that have arrived to `landed`, in the order of each sender, without waiting."""
        with self._lock:
            for number, _ in self._epoll.poll(0):
                if number == self._listener.fileno():
                    self._accept(landed)
                elif number in self._senders:
                    self._receive(self._senders[number], landed)

    def close(self) -> None:
        """Closes the listener and all connections."""
        with self._lock:
            for sender in self._senders.values():
                sender.connection.close()
            self._senders.clear()
            self._epoll.close()
            self._listener.close()

    def _accept(self, landed: deque[tuple[Sender, bytes]]) -> None:
        with contextlib.suppress(OSError):  # no connection is left, or no file descriptor is free
            for _ in range(_BACKLOG):  # epoll reports further connections again
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                unidentified = [sender for sender in self._senders.values() if not sender.ident]
                if len(unidentified) >= _UNIDENTIFIED_MAX:
                    self._drop(unidentified[0])
                sender = self._senders[connection.fileno()] = Sender(connection)
                self._epoll.register(connection, select.EPOLLIN)
                self._receive(sender, landed)  # the greeting may have arrived already

    def _receive(self, sender: Sender, landed: deque[tuple[Sender, bytes]]) -> None:
        # Bounded, so that one sender does not occupy the caller; epoll reports the rest again.
        for _ in range(_ROUNDS):
            try:
                more = sender.connection.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                more = b""
            if not more:
                self._drop(sender)
                return
            try:
                landed.extend((sender, tag) for tag in sender.take(self.secret, more))
            except ValueError:
                self._drop(sender)
                return
            if len(more) < _RECEIVE_BYTES:
                return

    def _drop(self, sender: Sender) -> None:
        del self._senders[sender.connection.fileno()]
        sender.connection.close()


class TagLink:
    """The connection to one reader, with a queue for tags that do not fit into the socket.

    Attributes:
        queued: Number of tags passed to `enqueue` so far.
        sent: Number of tags completely written to the socket.
    """

    def __init__(self, whose: str, address: tuple[str, int], greeting: bytes) -> None:
        self.queued = 0
        self.sent = 0
        self._whose = whose
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        self._rest = greeting
        self._rest_tags = 0
        self._gone = ""
        self._socket = socket.socket(_family(address[0]), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(BlockingIOError):
                self._socket.connect(address)
        except OSError as error:
            self.close()
            raise PeerDisconnected(f"mooncake: {whose} cannot be reached: {error}") from error
        self._flush()

    @property
    def pending(self) -> bool:
        """Whether the greeting or tags are still queued."""
        return bool(self._rest or self._outbox)

    def check_alive(self) -> None:
        """Raises PeerDisconnected if the kernel reports that the reader has closed the connection."""
        with self._lock:
            self._detect_close()
            self._raise_if_gone()

    def enqueue(self, tag: bytes) -> int:
        """Sends or queues a tag, and returns its number; the tag has been sent when `sent` reaches that number.

        Raises:
            PeerDisconnected: the reader is gone.
            TransportError: too many bytes of tags are queued.
        """
        with self._lock:
            self._detect_close()
            self._raise_if_gone()
            if self._outbox_bytes > _OUTBOX_MAX_BYTES:
                raise TransportError(f"mooncake: {self._whose} leaves {self._outbox_bytes} bytes of tags uncollected")
            frame = len(tag).to_bytes(_LENGTH_BYTES, "little") + tag
            self._outbox.append(frame)
            self._outbox_bytes += len(frame)
            self.queued += 1
            number = self.queued
            self._flush()
        return number

    def flush(self) -> None:
        """Sends queued tags until the socket is full.

        Raises:
            PeerDisconnected: the reader is gone.
        """
        with self._lock:
            self._flush()
            self._raise_if_gone()

    def close(self) -> None:
        with self._lock:
            self._gone = self._gone or "disconnected by this agent"
            self._socket.close()

    def _flush(self) -> None:
        while not self._gone and (self._rest or self._outbox):
            if not self._rest:
                self._rest, self._rest_tags = self._next()
            try:
                sent = self._socket.send(self._rest)
            except BlockingIOError:
                return
            except OSError as error:
                self._gone = str(error)
                return
            self._rest = self._rest[sent:]
            if not self._rest:
                self.sent += self._rest_tags
                self._rest_tags = 0

    def _next(self) -> tuple[bytes, int]:
        frames: list[bytes] = []
        nbytes = 0
        while self._outbox and nbytes < _SEND_BYTES:
            frames.append(self._outbox.popleft())
            nbytes += len(frames[-1])
        self._outbox_bytes -= nbytes
        return b"".join(frames), len(frames)

    def _detect_close(self) -> None:
        """Records whether the reader has closed the connection; readers never send bytes."""
        if self._gone:
            return
        try:
            if not self._socket.recv(1, socket.MSG_PEEK):
                self._gone = "it closed the connection"
        except BlockingIOError:
            return
        except OSError as error:
            self._gone = str(error)

    def _raise_if_gone(self) -> None:
        if self._gone:
            raise PeerDisconnected(f"mooncake: {self._whose} is gone: {self._gone}")


def _family(address: str) -> socket.AddressFamily:
    """Returns the family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def greeting(secret: bytes, ident: str, name: str) -> bytes:
    """Returns the greeting with which a writer's connection begins.

    Args:
        ident: Random name of the writer's incarnation, `IDENT_BYTES` of ASCII.
        name: Name of the writer's agent, truncated if it is too long.
    """
    encoded = name.encode("utf-8", "surrogatepass")[:_NAME_MAX_BYTES]
    return _MAGIC + secret + ident.encode() + len(encoded).to_bytes(2, "little") + encoded
