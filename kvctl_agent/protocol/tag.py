"""Keys of rooms and parts, and the tag that a write carries to its decode rank.

A tag names the part that has landed and its ring region. It is a fixed binary struct, so that it is cheap to make and
passes through any transport that carries bytes. A small aux row travels in a tag: its own, or that of the last KV part.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from kvctl_agent.contract.values import layer_range
from kvctl_agent.errors import RemoteProtocolError

_MAGIC, _MAGIC_WITH_ROW = 0xC7, 0xC8
_LAYOUT = struct.Struct("<BBQQQQIIHH")
_CHECKSUM = struct.Struct("<I")
TAG_BYTES = _LAYOUT.size
CHECKSUM_BYTES = _CHECKSUM.size
MAX_ROW_BYTES = 2048
"""Size of the largest aux row that is sent in a tag."""


class RoomKey(NamedTuple):
    """Key of one room at one peer; the nonce distinguishes rooms that reuse the number."""

    peer: str
    room: int
    nonce: int


class PartKind(IntEnum):
    """Kind of a part: KV, or a final part, which is the aux row or one state component of one stage and writer."""

    KV = 0
    AUX = 1
    STATE = 2


class PartKey(NamedTuple):
    """Key of a part, which one writer sends at once to one decode rank; layers [lo, hi) are global.

    For a part of a state component, `chunk` is the index of its segment, and layers are numbered within the segment.
    """

    writer: int
    chunk: int
    lo: int
    hi: int

    @property
    def place(self) -> tuple[int, int, tuple[int, int]]:
        """Writer, chunk and (lo, hi) layers, as telemetry records them."""
        return self.writer, self.chunk, (self.lo, self.hi)

    def __str__(self) -> str:
        return f"writer {self.writer} chunk {self.chunk} layers {layer_range(self.lo, self.hi)}"


def aux_key(writer: int) -> PartKey:
    """Returns the key of the aux row that a writer sends."""
    return PartKey(writer, 0, 0, 0)


class Tag(NamedTuple):
    """Tag of the write of one part.

    `incarnation` is the decode rank's; `serial` is that of the grant, or 0 for a part written straight to its pages.
    `checksum` is that of the writer's bytes (see `memory.checksum`), or None if the writer computes none; the packed
    tag is shorter then. `row` is the aux row: the bytes of an aux part, or those that came with a KV part; None if the
    tag carries none. A tag has a checksum or a row, not both.
    """

    kind: PartKind
    incarnation: int
    room: int
    nonce: int
    serial: int
    key: PartKey
    checksum: int | None = None
    row: bytes | None = None

    @property
    def aux(self) -> Tag:
        """The tag of the aux row that came in this tag of a KV part."""
        return self._replace(kind=PartKind.AUX, serial=0, key=aux_key(self.key.writer))

    def pack(self) -> bytes:
        data = _LAYOUT.pack(_MAGIC, self.kind, self.incarnation, self.room, self.nonce, self.serial, *self.key)
        if self.row is not None:
            return with_row(data, self.row)
        return data if self.checksum is None else with_checksum(data, self.checksum)

    @classmethod
    def unpack(cls, data: bytes) -> Tag:
        """Decodes a packed tag.

        Raises:
            RemoteProtocolError: wrong length, magic or kind, or an empty layer range.
        """
        has_row = len(data) > TAG_BYTES and data[0] == _MAGIC_WITH_ROW
        if len(data) not in (TAG_BYTES, TAG_BYTES + CHECKSUM_BYTES) and not has_row:
            raise RemoteProtocolError(f"tag of {len(data)} bytes, expected {TAG_BYTES} or {CHECKSUM_BYTES} more")
        magic, kind, incarnation, room, nonce, serial, writer, chunk, lo, hi = _LAYOUT.unpack_from(data)
        if magic != _MAGIC and not has_row:
            raise RemoteProtocolError(f"tag starts with {magic:#x}, expected {_MAGIC:#x}")
        if kind not in (PartKind.KV, PartKind.AUX, PartKind.STATE) or (has_row and kind == PartKind.STATE):
            raise RemoteProtocolError(f"tag of unknown kind {kind}")
        if kind != PartKind.AUX and lo >= hi:
            raise RemoteProtocolError(f"tag with empty layer range {layer_range(lo, hi)}")
        part = PartKind(kind), incarnation, room, nonce, serial, PartKey(writer, chunk, lo, hi)
        if has_row:
            return cls(*part, row=data[TAG_BYTES:])
        return cls(*part, _CHECKSUM.unpack_from(data, TAG_BYTES)[0] if len(data) > TAG_BYTES else None)


def with_checksum(packed: bytes, checksum: int) -> bytes:
    """Returns a packed tag with a checksum appended; `packed` has none yet."""
    return packed + _CHECKSUM.pack(checksum)


def with_row(packed: bytes, row: bytes) -> bytes:
    """Returns a packed tag with an aux row appended; `packed` has no checksum."""
    return bytes((_MAGIC_WITH_ROW,)) + packed[1:] + row
