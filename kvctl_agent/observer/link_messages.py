"""Messages between an agent's link and the observer process: MessagePack with a length, over a Unix stream socket.

The agent sends `Register` first, and with it the eventfd of its loop. The observer replies `Registered` or `Unable`.
After that the observer sends `Ask`, and the agent `Answer`; `Wake` brings another eventfd, `Leave` ends the connection.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from typing import Any

import msgspec

from kvctl_agent.contract.admin import MAX_REPLY_BYTES
from kvctl_agent.contract.commands import Command
from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.observer.endpoints import RemoteEndpoint

_LENGTH = struct.Struct("<I")
_READ_BYTES = 256 << 10
_MOST_DESCRIPTORS = 1
_MOST_QUEUED_BYTES = 4 << 20


class Register(msgspec.Struct, frozen=True, tag="register"):
    """Asks the observer to serve a worker.

    Attributes:
        region: path of its region, on which the link holds a lock.
        settings: values of the configuration keys that the observer uses.
        remote: TCP admin endpoint; None without one.
        commands: commands that `contract.commands` does not declare.
        network: inode of its network namespace; 0: unknown.
        environment: its variables of OpenTelemetry, which may have headers and certificates of its collector.
    """

    region: str
    settings: dict[str, Any]
    remote: RemoteEndpoint | None
    commands: list[Command]
    network: int = 0
    environment: dict[str, str] = {}


def telemetry_variables() -> dict[str, str]:
    """Returns this process's variables of OpenTelemetry."""
    return {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """The observer serves the worker: path of its socket, TCP address and URL of its metrics ("" for none)."""

    socket: str
    address: str
    metrics_url: str


class Unable(msgspec.Struct, frozen=True, tag="unable"):
    """The observer cannot serve the worker.

    Attributes:
        kind: class of the error that `Agent.start` raises, "AdminError" or "ConfigError"; "" if a thread of the agent
            may be able to serve it.
    """

    kind: str
    text: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A command for the agent; `client` is its origin as in `ClientRequest.origin`."""

    number: int
    command: str
    args: dict[str, Any]
    client: str


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Answer to the `Ask` of this number: JSON, or code and text of a refusal."""

    number: int
    data: bytes = b""
    code: str = ""
    text: str = ""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """The eventfd that comes with this message replaces the one of the registration."""


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """The agent closes: the observer closes its sockets, and then the connection."""


FromAgent = Register | Answer | Wake | Leave
FromObserver = Registered | Unable | Ask
_encoder = msgspec.msgpack.Encoder()
from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
from_observer: msgspec.msgpack.Decoder[FromObserver] = msgspec.msgpack.Decoder(FromObserver)


def encode(message: FromAgent | FromObserver) -> bytes:
    """Returns the message with its length."""
    content = _encoder.encode(message)
    return _LENGTH.pack(len(content)) + content


class MessageSocket:
    """Stream socket with whole messages, which never blocks; one thread uses it.

    Attributes:
        descriptors: descriptors received with messages; whoever takes one out closes it.
        bound: largest message that is received, in bytes.
    """

    def __init__(self, connection: socket.socket, bound: int = MAX_REPLY_BYTES + 4096) -> None:
        connection.setblocking(False)
        self.descriptors: list[int] = []
        self.bound = bound
        self._socket = connection
        self._received = bytearray()
        self._to_send: deque[memoryview] = deque()
        self._queued_bytes = 0

    def fileno(self) -> int:
        """Returns the socket's descriptor."""
        return self._socket.fileno()

    @property
    def sending(self) -> bool:
        """Whether something waits until the socket is writable."""
        return bool(self._to_send)

    def receive(self) -> tuple[list[bytes], bool]:
        """Returns the whole messages that have arrived, and whether the other side has closed the connection.

        Raises:
            RemoteProtocolError: a message is larger than `bound`.
        """
        ended = False
        try:
            while not ended:
                data, descriptors, _, _ = socket.recv_fds(
                    self._socket, _READ_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                self.descriptors += descriptors
                self._received += data
                ended = not data
                if len(data) < _READ_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        return self._whole(), ended

    def _whole(self) -> list[bytes]:
        messages, at, received = [], 0, self._received
        while len(received) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, at)
            if length > self.bound:
                raise RemoteProtocolError(f"a message of {length} bytes")
            end = at + _LENGTH.size + length
            if len(received) < end:
                break
            messages.append(bytes(received[at + _LENGTH.size : end]))
            at = end
        del received[:at]
        return messages

    def send(self, message: FromAgent | FromObserver, descriptor: int | None = None) -> bool:
        """Sends a message, or queues it; a descriptor can be sent only if nothing is queued.

        Returns:
            False if the other side does not read, or has closed the connection.
        """
        data = encode(message)
        if self._queued_bytes + len(data) > _MOST_QUEUED_BYTES and self._to_send:
            return False
        sent = 0
        try:
            if descriptor is not None:
                sent = socket.send_fds(self._socket, [data], [descriptor])
            elif not self._to_send:
                sent = self._socket.send(data)
        except BlockingIOError:
            pass
        except OSError:
            return False
        if sent < len(data):
            self._to_send.append(memoryview(data)[sent:])
            self._queued_bytes += len(data) - sent
        return True

    def flush(self) -> None:
        """Sends what is queued, as far as the socket takes it."""
        try:
            while self._to_send:
                data = self._to_send[0]
                sent = self._socket.send(data)
                self._queued_bytes -= sent
                if sent < len(data):
                    self._to_send[0] = data[sent:]
                    return
                self._to_send.popleft()
        except BlockingIOError:
            pass
        except OSError:  # `receive` tells of it
            self._to_send.clear()
            self._queued_bytes = 0

    def close(self) -> None:
        """Closes the socket and the descriptors that nobody has taken; idempotent."""
        self._socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())
