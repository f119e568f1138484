"""Encodes and decodes frames of the control channel; one frame carries several messages to one peer.

Layout: `MAGIC` (5 bytes, the last one the protocol version), the sender's incarnation (8 bytes, little-endian), then a
MessagePack list of messages. A frame that is malformed, oversized or of another version raises `RemoteProtocolError`,
and the caller counts and drops it. A malformed message does not affect the other messages of its frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.protocol.messages import PROTOCOL_VERSION, AnyMessage, Message

MAGIC = b"KVPM" + bytes([PROTOCOL_VERSION])
HEADER_BYTES = len(MAGIC) + 8
MAX_FRAME_BYTES = 16 << 20
# Without this limit, a frame of the smallest messages would decode to gigabytes of objects and take minutes.
MAX_MESSAGES = 1 << 16

_encoder = msgspec.msgpack.Encoder()
_few = msgspec.Meta(max_length=MAX_MESSAGES)
_all = msgspec.msgpack.Decoder(Annotated[list[AnyMessage], _few])
_each = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], _few])
_one: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(incarnation: int, messages: Sequence[Message]) -> bytes:
    """Encodes messages as one frame; `incarnation` is the sender's."""
    return MAGIC + incarnation.to_bytes(8, "little") + _encoder.encode(messages)


def decode(frame: bytes) -> tuple[int, list[AnyMessage], int]:
    """Decodes one frame.

    Returns:
        the sender's incarnation, the valid messages, and the number of invalid ones (unknown type or wrong fields).

    Raises:
        RemoteProtocolError: the frame as a whole is oversized, malformed or of another protocol version.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"control frame of {len(frame)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    if len(frame) < HEADER_BYTES or not frame.startswith(MAGIC[:-1]):
        raise RemoteProtocolError(f"not a kvctl control frame: {len(frame)} bytes starting {frame[:8].hex()}")
    if frame[len(MAGIC) - 1] != PROTOCOL_VERSION:
        raise RemoteProtocolError(f"control protocol version {frame[len(MAGIC) - 1]} ≠ {PROTOCOL_VERSION}")
    incarnation = int.from_bytes(frame[len(MAGIC) : HEADER_BYTES], "little")
    body = memoryview(frame)[HEADER_BYTES:]
    try:
        return incarnation, _all.decode(body), 0
    except (msgspec.DecodeError, ValueError, RecursionError):
        return incarnation, *_salvage(body)


def _salvage(body: memoryview) -> tuple[list[AnyMessage], int]:
    try:
        raws = _each.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"control frame is not a list of messages: {error}") from None
    messages: list[AnyMessage] = []
    for raw in raws:
        try:
            messages.append(_one.decode(raw))
        except (msgspec.DecodeError, ValueError, RecursionError):
            continue
    return messages, len(raws) - len(messages)
