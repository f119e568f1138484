"""ZMTP 3.1 (ZeroMQ RFC 37), the ROUTER's end of one connection with mechanism NULL: bytes in, messages out, no I/O.

Enough for the DEALER and REQ sockets of any libzmq since 4.0, and for nothing else.
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
# No protocol of ours has more; what is beyond is dropped, so that a message of many frames takes no more memory.
MAX_FRAMES = 8


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def _command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return bytes([_COMMAND, len(content)]) + content


# Greeting (signature, version, mechanism, "not the server" of PLAIN and CURVE, filler) and READY, sent at once.
OPENING = (b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)) + _command(
    b"READY", _property(b"Socket-Type", b"ROUTER") + _property(b"Identity", b"")
)


def encode(frames: Sequence[bytes]) -> bytes:
    """One message as bytes for the wire."""
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
    """Reads what one peer sends.

    Attributes:
        identity: the name that the peer gave itself; None before its handshake is complete.
        answers: bytes to send back (PONG); the caller takes them.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of one frame."""
        self.identity: bytes | None = None
        self.answers = b""
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._greeted = False
        self._frames: list[bytes] = []

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Takes what has arrived; returns the messages that are complete with it.

        Raises:
            RemoteProtocolError: the peer does not speak this protocol, or sends a frame that is too large. Nothing
                more can be read from it.
        """
        self._buffer += data
        if not self._greeted and not self._greet():
            return []
        messages = []
        for flags, body in self._taken():
            if flags & _COMMAND:
                self._obey(body)
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
        """True once the peer's greeting is read."""
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

    def _taken(self) -> Iterator[tuple[int, bytes]]:
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

    def _obey(self, body: bytes) -> None:
        length = body[0] if body else 0
        name, rest = body[1 : 1 + length], body[1 + length :]
        if name == b"READY" and self.identity is None:
            properties = _properties(rest)
            if properties.get(b"socket-type") not in _PEERS:
                raise RemoteProtocolError(f"a socket of type {properties.get(b'socket-type')!r}")
            self.identity = properties.get(b"identity", b"")[:_MAX_NAME_BYTES]
        elif name == b"PING":  # two bytes of time to live, then a context to give back
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
