"""Control messages between agents: typed, named fields, additive only.

The sender's incarnation travels once per frame (see `codec`) and covers every message in it; every room message
carries the nonce. Page lists are raw little-endian int32.
"""

from __future__ import annotations

import msgspec

# Minor additions keep this number; a frame of another major version is refused at Hello with both numbers.
PROTOCOL_VERSION = 1

WireDict = dict[str, int | str | list[int]]


class Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Base of all control messages."""


class Introduction(msgspec.Struct, frozen=True):
    """Who an agent is and what a peer needs to plan against it and write to it."""

    name: str
    role: str
    coord: list[int]  # dp, pp, cp, tp
    sizes: list[int]  # dp, pp, cp, tp of its instance
    unique_rank: int
    plan: dict[str, int | str]  # its own half of the plan inputs; see `layout.plan`
    pool: WireDict  # addresses of its pool; see `memory.pool`
    transport: str
    metadata: bytes
    host: str  # equal where processes see each other's pids
    pid: int
    ring_base: int = 0
    ring_bytes: int = 0
    scratch_base: int = 0  # where a writer may write anything, to measure the lane
    scratch_bytes: int = 0


class Hello(Message, frozen=True, tag="hello"):
    """Decode → prefill: the first message on a connection, resent until answered."""

    version: int
    who: Introduction


class HelloAck(Message, frozen=True, tag="hello-ack"):
    """Prefill → decode: accepted, or refused with the differing factors."""

    version: int
    who: Introduction
    differences: list[str] = []


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Both ways. `echo_ns` returns the peer's last `sent_ns`, `held_ns` how long it lay here: hence the round trip."""

    sent_ns: int
    echo_ns: int = 0
    held_ns: int = 0
    watermark: list[int] = []  # from decode: round, tail, sequence; the only repair a lost Watermark needs


class RoomOpen(Message, frozen=True, tag="room-open"):
    """Decode → every prefill rank of the instance."""

    room: int
    nonce: int
    pages: bytes  # int32 little-endian page indices for positions prefix_pages..total_pages
    prefix_pages: int
    total_pages: int
    inputs: dict[str, int | str]  # all plan inputs, so that a mismatch names the factor
    aux_index: int = -1  # row of the decode rank's aux pool; -1: this room has none


class RoomAccepted(Message, frozen=True, tag="room-accepted"):
    room: int
    nonce: int


class RoomRefused(Message, frozen=True, tag="room-refused"):
    room: int
    nonce: int
    code: str
    text: str


class PartSpec(msgspec.Struct, frozen=True):
    """One part that wants a ring region."""

    chunk: int
    lo: int
    hi: int
    nbytes: int


class StagingRequest(Message, frozen=True, tag="staging-request"):
    """Writer → decode: all parts of a room that will be staged, so that grants are there when data is."""

    room: int
    nonce: int
    parts: list[PartSpec]


class Grant(msgspec.Struct, frozen=True):
    """The ring region given to one part; the serial is never used again in this incarnation."""

    chunk: int
    lo: int
    hi: int
    serial: int
    offset: int
    end: int
    round: int


class StagingGrants(Message, frozen=True, tag="staging-grants"):
    room: int
    nonce: int
    grants: list[Grant]
    watermark: list[int]  # round, tail, sequence


class StagingRefused(Message, frozen=True, tag="staging-refused"):
    """The part can never fit: it needs `needs` bytes, the ring has `ring`."""

    room: int
    nonce: int
    chunk: int
    lo: int
    hi: int
    needs: int
    ring: int


class StagingRevoke(Message, frozen=True, tag="staging-revoke"):
    """Decode → writer: give an unwritten grant back."""

    room: int
    nonce: int
    chunk: int
    lo: int
    hi: int
    serial: int


class StagingRevoked(Message, frozen=True, tag="staging-revoked"):
    """Writer → decode: this serial will never be written."""

    room: int
    nonce: int
    serial: int


class TooLate(Message, frozen=True, tag="too-late"):
    """Writer → decode: this serial has been posted already; its tag will come."""

    room: int
    nonce: int
    serial: int


class Watermark(Message, frozen=True, tag="watermark"):
    round: int
    tail: int
    sequence: int


class PartReady(Message, frozen=True, tag="part-ready"):
    """Writer → decode: these parts are written; sent where their tags were not confirmed in time."""

    tags: list[bytes]


class PartAck(Message, frozen=True, tag="part-ack"):
    tags: list[bytes]


class RoomDone(Message, frozen=True, tag="room-done"):
    """Decode → prefill: every planned byte is in place."""

    room: int
    nonce: int


class RoomFailed(Message, frozen=True, tag="room-failed"):
    """Either way: the room failed; `rank`, `code`, `at_ns`, `text` are the first cause."""

    room: int
    nonce: int
    rank: str
    code: str
    at_ns: int
    text: str


class Ack(Message, frozen=True, tag="ack"):
    """Answer to RoomDone and RoomFailed (`of` is their tag)."""

    room: int
    nonce: int
    of: str


class RoomAbort(Message, frozen=True, tag="room-abort"):
    """Decode → prefill: stop, and say when nothing of yours is in flight; carries the first cause."""

    room: int
    nonce: int
    rank: str
    code: str
    at_ns: int
    text: str


class RoomDrained(Message, frozen=True, tag="room-drained"):
    """Prefill → decode: nothing of this room is in flight from here, nor ever will be."""

    room: int
    nonce: int


AnyMessage = (
    Hello
    | HelloAck
    | Heartbeat
    | RoomOpen
    | RoomAccepted
    | RoomRefused
    | StagingRequest
    | StagingGrants
    | StagingRefused
    | StagingRevoke
    | StagingRevoked
    | TooLate
    | Watermark
    | PartReady
    | PartAck
    | RoomDone
    | RoomFailed
    | Ack
    | RoomAbort
    | RoomDrained
)
