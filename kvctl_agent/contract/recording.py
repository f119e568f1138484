"""A recording of a fleet as a file of frames, and the pages in which an agent hands its part of it out.

File: `MAGIC`, the format's version (4 bytes, little-endian), then frames until `DONE`. A frame is its kind (4 letters),
three lengths-and-check words, a JSON object and a body. Readers skip kinds they do not know, so that a recording may
hold more than inputs. Everything is checked before it is used: sizes are bounded and each frame has a checksum.

| kind | object | body |
| --- | --- | --- |
| `HEAD` | when and by which kvctl it was made | |
| `AGNT` | an agent's number in this file, and its `InputHeader` | |
| `BLOB` | that number, and what an `InputBlob` says of its data | the data |
| `MOMT` | a moment at which the fleet was asked what reading commands ask; its form's version | `MomentBody` |
| `SEEN` | that moment's number, and an agent's name | `SeenBody`: all that this agent answered |
| `DONE` | how many frames precede it | |
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple, TypedDict

from kvctl_agent.contract.snapshots import Hello, LayerRow, RoomDetail
from kvctl_agent.errors import RecordingError as RecordingError
from kvctl_agent.errors import RecordingVersionError as RecordingVersionError

MAGIC = b"KVCTLREC"
FORMAT_VERSION = 1
HEAD, AGENT, BLOB, DONE = b"HEAD", b"AGNT", b"BLOB", b"DONE"
MOMENT, SEEN = b"MOMT", b"SEEN"
MOMENT_VERSION = 1

MAX_OBJECT_BYTES = 1 << 20
MAX_BODY_BYTES = 64 << 20
MAX_UNPACKED_BYTES = 512 << 20  # of one body
MAX_SEEN_BYTES = 64 << 20  # of what one agent answered at one moment, unpacked

_FRAME = struct.Struct("<4sIII")
_VERSION = struct.Struct("<I")


class InputHeader(TypedDict):
    """Whose inputs they are, and what is needed to run them again."""

    name: str
    role: str
    incarnation: str
    pid: int
    version: str
    protocol_version: int
    plan_version: int
    clock_offset_ns: int  # wall clock minus the clock of the inputs
    taken: int  # inputs in this life
    missed: int  # of them, those that were not recorded
    fault: str  # why recording has ended; empty


class InputBlob(TypedDict):
    """One piece: a checkpoint of the machine before input number `first`, or `count` inputs from that number on."""

    number: int  # grows by one from piece to piece
    kind: str  # checkpoint, inputs
    first: int
    count: int
    data: str  # base64 of zlib


class InputPage(TypedDict):
    """Answer to `inputs`."""

    header: InputHeader
    blobs: list[InputBlob]
    next: int  # give as `since` next time
    end: int  # give as `until` next time; there is no more when `next` has reached it
    dropped: int  # pieces from `since` on that are no longer kept


class FaultBody(TypedDict):
    """What kept an agent from answering."""

    agent: str
    code: str
    message: str


class MomentBody(TypedDict):
    """What is known of a moment besides the answers; JSON, compressed with zlib."""

    directory: str  # where sockets were looked for
    stale: list[EndpointBody]  # sockets of processes that are gone
    faults: list[FaultBody]  # of agents that were asked for and not found
    left_out: list[str]  # what there was no room or time for, in words


class EndpointBody(TypedDict):
    """Where an agent was asked."""

    name: str
    path: str | None
    remote: str


class SeenBody(TypedDict):
    """What one agent answered at one moment; JSON, compressed with zlib."""

    endpoint: EndpointBody
    fault: FaultBody | None  # it did not greet: nothing else is known
    hello: Hello | None
    rtt_ns: int
    clock: tuple[int, int]  # offset and its error, ns
    answers: dict[str, Any]  # by command
    refused: dict[str, FaultBody]  # by command
    rooms: dict[str, list[RoomDetail]]  # by room; one that finished earlier in the file is there
    layers: dict[str, list[LayerRow]]  # by room


class Frame(NamedTuple):
    """One frame, checked; `body` as it is in the file."""

    kind: bytes
    about: dict[str, Any]
    body: bytes


def opening() -> bytes:
    """What a file begins with."""
    return MAGIC + _VERSION.pack(FORMAT_VERSION)


def frame(kind: bytes, about: Mapping[str, Any], body: bytes = b"") -> bytes:
    """One frame as bytes."""
    told = json.dumps(about, separators=(",", ":")).encode()
    return _FRAME.pack(kind, len(told), len(body), zlib.crc32(body, zlib.crc32(told))) + told + body


def frames(file: IO[bytes]) -> Iterator[Frame]:
    """The frames of a file, up to and without `DONE`.

    Raises:
        RecordingError: it is no recording, ends too early, or is damaged.
        RecordingVersionError: it is one of another format.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise RecordingError("it is no recording of kvctl: kvctl record makes one")
    (version,) = _VERSION.unpack(_exactly(file, _VERSION.size))
    if version != FORMAT_VERSION:
        raise RecordingVersionError(f"its format is version {version}, this kvctl reads version {FORMAT_VERSION}")
    count = 0
    while True:
        kind, told_bytes, body_bytes, check = _FRAME.unpack(_exactly(file, _FRAME.size))
        if told_bytes > MAX_OBJECT_BYTES or body_bytes > MAX_BODY_BYTES:
            raise RecordingError(f"it is damaged: frame {count} claims {told_bytes} and {body_bytes} bytes")
        told, body = _exactly(file, told_bytes), _exactly(file, body_bytes)
        if zlib.crc32(body, zlib.crc32(told)) != check:
            raise RecordingError(f"it is damaged: the checksum of frame {count} is wrong")
        try:
            about = json.loads(told)
        except (ValueError, RecursionError):
            about = None
        if not isinstance(about, dict):
            raise RecordingError(f"it is damaged: frame {count} is not described")
        if kind == DONE:
            if about.get("frames") != count:
                raise RecordingError(f"it is damaged: {count} frames, and it says {about.get('frames')!r:.20}")
            return
        yield Frame(kind, about, body)
        count += 1


def unpacked(body: bytes, most: int | None = None) -> bytes:
    """A body without its compression.

    Args:
        most: bytes that it may become; None for `MAX_UNPACKED_BYTES`.

    Raises:
        RecordingError: it is not compressed, or becomes far too large.
    """
    reader = zlib.decompressobj()
    try:
        data = reader.decompress(body, MAX_UNPACKED_BYTES if most is None else most)
    except zlib.error as error:
        raise RecordingError(f"it is damaged: {error}") from None
    if not reader.eof:
        raise RecordingError("it is damaged: a body ends too early, or is larger than any that is written")
    return data


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise RecordingError("it was cut short: it has no end")
    return data
