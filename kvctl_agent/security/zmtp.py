"""ZMTP 3.1 framing (ZeroMQ RFC 37) for the ROUTER end of a connection with mechanism NULL; does no I/O.

Supports the DEALER, REQ and ROUTER sockets of libzmq 4.0 and later as peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvctl_agent.errors import RemoteProtocolError

_SIGNATURE_BYTES = 10
_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4
_MAX_NAME_BYTES = 255
_MAX_COMMAND_BYTES = 4096
_PEERS = (b"DEALER", b"REQ", b"ROUTER")
# No message of the agent's protocols has more frames; further ones are dropped to bound the memory of a message.
MAX_FRAMES = 8


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def _command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return bytes([_COMMAND, len(content)]) + content


# Greeting (signature, version, mechanism, as-server flag 0, filler) followed by READY; sent together.
OPENING = (b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)) + _command(
    b"READY", _property(b"Socket-Type", b"ROUTER") + _property(b"Identity", b"")
)


def encode(frames: Sequence[bytes]) -> bytes:
    """Encodes one message."""
    wire: list[bytes] = []
    for index, frame in enumerate(frames):
        flags = _MORE if index < len(frames) - 1 else 0
        if len(frame) < 256:
            wire.append(bytes([flags, len(frame)]))
        else:
            wire.append(bytes([flags | _LONG]) + len(frame).to_bytes(8, "big"))
        wire.append(frame)
    return b"".join(wire)


class Decoder:
    """Decodes the bytes received from one peer.

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
        """Adds received bytes; returns the messages that they complete.

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
        """Reads the peer's greeting; returns False while it is incomplete."""
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
        """Removes the complete frames from the buffer."""
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
            self.identity = properties.get(b"identity", b"")[:_MAX_NAME_BYTES]
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
