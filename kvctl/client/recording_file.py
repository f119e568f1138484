"""File format of a recording of a fleet.

A file is `MAGIC`, the format version (4 bytes, little-endian), then frames up to `DONE`. A frame is its kind (4
letters), three 32-bit words (object size, body size, CRC-32 of both), a JSON object and a body. Readers skip unknown
kinds, such as those of earlier versions. Sizes and checksums are verified before a frame is used.

| kind | object | body |
| --- | --- | --- |
| `HEAD` | time of the recording and version of kvctl | |
| `MOMT` | one query of the whole fleet: its number, its time, version of the format | missing agents, as JSON |
| `SEEN` | number of the query, and name of an agent | replies of this agent to the read-only commands, as JSON |
| `DONE` | number of frames before this one | |
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

MAGIC = b"KVCTLREC"
FORMAT_VERSION = 1
HEAD, DONE = b"HEAD", b"DONE"
MOMENT, ANSWERS = b"MOMT", b"SEEN"
MOMENT_VERSION = 2

MAX_OBJECT_BYTES = 1 << 20
MAX_BODY_BYTES = 64 << 20
MAX_ANSWERS_BYTES = 64 << 20  # one body, decompressed: the answers of one agent in one snapshot

_FRAME = struct.Struct("<4sIII")
_VERSION = struct.Struct("<I")


class RecordingError(Exception):
    """Raised when a recording is damaged, or the file is of another kind."""


class RecordingVersionError(RecordingError):
    """Raised when a recording has another version."""


class Frame(NamedTuple):
    """One frame of a recording, after its sizes and checksum have been verified.

    Attributes:
        body: the body as stored, compressed for some kinds.
    """

    kind: bytes
    about: dict[str, Any]
    body: bytes


def file_header() -> bytes:
    """Returns the magic bytes and format version at the start of a file."""
    return MAGIC + _VERSION.pack(FORMAT_VERSION)


def encode_frame(kind: bytes, about: Mapping[str, Any], body: bytes = b"") -> bytes:
    """Encodes one frame from its kind (4 letters), its JSON object `about` and its body."""
    header = json.dumps(about, separators=(",", ":")).encode()
    return _FRAME.pack(kind, len(header), len(body), zlib.crc32(body, zlib.crc32(header))) + header + body


def read_frames(file: IO[bytes]) -> Iterator[Frame]:
    """Yields the frames of a file up to `DONE`, which is not yielded.

    Raises:
        RecordingError: the file is not a recording, ends too early, or is damaged.
        RecordingVersionError: the file has another format version.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise RecordingError("it is not a kvctl recording: create one with kvctl record")
    (version,) = _VERSION.unpack(_exactly(file, _VERSION.size))
    if version != FORMAT_VERSION:
        raise RecordingVersionError(f"its format is version {version}, this kvctl reads version {FORMAT_VERSION}")
    count = 0
    while True:
        kind, header_bytes, body_bytes, check = _FRAME.unpack(_exactly(file, _FRAME.size))
        if header_bytes > MAX_OBJECT_BYTES or body_bytes > MAX_BODY_BYTES:
            raise RecordingError(f"it is damaged: frame {count} claims {header_bytes} and {body_bytes} bytes")
        header, body = _exactly(file, header_bytes), _exactly(file, body_bytes)
        if zlib.crc32(body, zlib.crc32(header)) != check:
            raise RecordingError(f"it is damaged: the checksum of frame {count} is wrong")
        try:
            about = json.loads(header)
        except (ValueError, RecursionError):
            about = None
        if not isinstance(about, dict):
            raise RecordingError(f"it is damaged: frame {count} has no JSON object")
        if kind == DONE:
            if about.get("frames") != count:
                raise RecordingError(f"it is damaged: it has {count} frames, expected {about.get('frames')!r:.20}")
            return
        yield Frame(kind, about, body)
        count += 1


def decompress(body: bytes) -> bytes:
    """Decompresses the body of a frame.

    Raises:
        RecordingError: the body is not zlib data, or the result is larger than `MAX_ANSWERS_BYTES`.
    """
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(body, MAX_ANSWERS_BYTES)
    except zlib.error as error:
        raise RecordingError(f"it is damaged: {error}") from None
    if not reader.eof:
        raise RecordingError("it is damaged: a body ends too early or exceeds the size limit")
    return data


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise RecordingError("it is truncated: the end of the file is missing")
    return data
