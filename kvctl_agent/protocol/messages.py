"""Control messages between agents: typed structs with named fields; new fields must be optional.

The sender's incarnation is sent once per frame (see `codec`) and covers every message in it; every room message has the
nonce. Page lists are raw little-endian int32.

The bounds are part of the types: handlers get values in range, and a value out of range invalidates only its message.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvctl_agent.contract.choices import RANK0

# Optional additions keep this number; a frame of another version is refused.
PROTOCOL_VERSION = 1

U64 = Annotated[int, msgspec.Meta(ge=0)]  # MessagePack has no larger integers
U32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Layer = Annotated[int, msgspec.Meta(ge=0, le=(1 << 16) - 1)]  # the width in a tag
Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
PageCount = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
AuxIndex = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Mark = Annotated[list[U64], msgspec.Meta(max_length=3)]  # round, tail, sequence; or empty
Inputs = Annotated[dict[Name, int | Text], msgspec.Meta(max_length=128)]
Addresses = Annotated[list[int], msgspec.Meta(max_length=1 << 16)]
WireDict = Annotated[dict[Name, int | Text | Addresses], msgspec.Meta(max_length=64)]
Axes = Annotated[list[int], msgspec.Meta(max_length=4)]  # dp, pp, cp, tp
Stages = Annotated[list[Layer], msgspec.Meta(max_length=1 << 12)]
Tags = Annotated[list[Annotated[bytes, msgspec.Meta(min_length=32, max_length=256)]], msgspec.Meta(max_length=1 << 18)]
States = Annotated[list[bytes], msgspec.Meta(max_length=64)]

MAX_TEXT = 4096
MAX_SHARED = 1 << 12


class Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    """Base of all control messages."""


class SharedMemory(msgspec.Struct, frozen=True):
    """One device allocation that a writer may map; see `device.base.Export`."""

    addr: Size  # so that its end is below 2⁶³
    nbytes: Size
    kind: Name
    handle: Annotated[bytes, msgspec.Meta(max_length=256)]
    device: Name


class PeerInfo(msgspec.Struct, frozen=True):
    """Identity of an agent, and all that a peer needs to plan transfers and write to it."""

    name: Name
    role: Name
    coord: Axes
    sizes: Axes  # of its instance
    unique_rank: U32
    plan: Inputs  # its half of the plan inputs; see `layout.plan_inputs`
    pool: WireDict  # addresses of its pool; see `memory.addresses`
    transport: Name
    metadata: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    host: Name  # equal for processes that see each other's pids
    pid: Size
    ring_base: U64 = 0
    ring_bytes: Size = 0
    scratch_base: U64 = 0  # where a writer may write anything, to measure the connection
    scratch_bytes: Size = 0
    stages: Stages = []  # layers of each pipeline stage; empty: even
    cp_mode: Name = RANK0  # of a prefill instance; the decode side adopts it
    shared: Annotated[list[SharedMemory], msgspec.Meta(max_length=MAX_SHARED)] = []  # pool and ring, if on a device
    unshared: Text = ""  # why they are not shared, although on a device
    hostname: Name = ""  # for display

    @property
    def process(self) -> str:
        """For example "process 4711 on node-3"."""
        return f"process {self.pid} on {self.hostname or 'its host'}"


class RoomMessage(Message, frozen=True):
    """Base of messages about one room under one nonce."""

    room: U64
    nonce: U64


class RoomFailure(RoomMessage, frozen=True):
    """Base of messages that carry the first cause of a room's failure."""

    rank: Name
    code: Name
    at_ns: U64
    text: Text


class Hello(Message, frozen=True, tag="hello"):
    """Decode → prefill: the first message on a connection, resent until answered."""

    version: int
    who: PeerInfo


class HelloAck(Message, frozen=True, tag="hello-ack"):
    """Prefill → decode: accepted, or refused with the differing factors.

    `to` is the incarnation that sent Hello, since its predecessor may have sent one, too. `taken` is set when another
    process has the name of the sender of Hello, which may be temporary.
    """

    version: int
    who: PeerInfo
    to: U64
    differences: Annotated[list[Text], msgspec.Meta(max_length=64)] = []
    taken: Text = ""


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Both ways. `echo_ns` is the peer's last `sent_ns`, `held_ns` the time since its arrival; gives the round trip."""

    sent_ns: U64
    echo_ns: U64 = 0
    held_ns: U64 = 0
    watermark: Mark = []  # from decode: round, tail, sequence; repairs a lost Watermark


class RoomOpen(RoomMessage, frozen=True, tag="room-open"):
    """Decode → every prefill rank of the instance.

    `to` is the incarnation that it is meant for: a process that has just replaced that one must not write for a room
    that the decode rank has not opened there.
    """

    pages: bytes  # int32 little-endian page indices for positions prefix_pages..total_pages
    prefix_pages: PageCount
    total_pages: PageCount
    inputs: Inputs  # all plan inputs, so that a mismatch names the factor
    aux_index: AuxIndex = -1  # row of the decode rank's aux pool; -1: this room has none
    states: States = []  # for each state component its item indices as int32 little-endian; empty: not wanted
    prefill_only: bool = False  # no KV is wanted, regardless of the prompt's length
    to: U64 = 0


class RoomAccepted(RoomMessage, frozen=True, tag="room-accepted"):
    """Prefill → decode: the room is open, and its parts are planned."""


class RoomRefused(RoomFailure, frozen=True, tag="room-refused"):
    """Prefill → decode: the room is not open here and will not be; carries the first cause."""


class PartSpec(msgspec.Struct, frozen=True):
    """One part that needs a ring region."""

    chunk: U32
    lo: Layer
    hi: Layer
    nbytes: Size


class StagingRequest(RoomMessage, frozen=True, tag="staging-request"):
    """Writer → decode: all parts of a room that will be staged, so that grants are there before the data."""

    parts: Annotated[list[PartSpec], msgspec.Meta(max_length=1 << 18)]


class Grant(msgspec.Struct, frozen=True):
    """The ring region given to one part; the serial is never used again in this incarnation."""

    chunk: U32
    lo: Layer
    hi: Layer
    serial: U64
    offset: Size
    end: Size
    round: U64


class StagingGrants(RoomMessage, frozen=True, tag="staging-grants"):
    grants: Annotated[list[Grant], msgspec.Meta(max_length=1 << 18)]
    watermark: Mark


class StagingRefused(RoomMessage, frozen=True, tag="staging-refused"):
    """The part can never fit: it needs `needs` bytes, the ring has `ring`."""

    chunk: U32
    lo: Layer
    hi: Layer
    needs: Size
    ring: Size


class StagingRevoke(RoomMessage, frozen=True, tag="staging-revoke"):
    """Decode → writer: give back an unwritten grant."""

    chunk: U32
    lo: Layer
    hi: Layer
    serial: U64


class StagingRevoked(RoomMessage, frozen=True, tag="staging-revoked"):
    """Writer → decode: this serial will never be written."""

    serial: U64


class TooLate(RoomMessage, frozen=True, tag="too-late"):
    """Writer → decode: the write to this serial is posted already; its tag will follow."""

    serial: U64


class Watermark(Message, frozen=True, tag="watermark"):
    round: U64
    tail: U64
    sequence: U64


class PartReady(RoomMessage, frozen=True, tag="part-ready"):
    """Writer → decode: these parts of a room are written; sent if the room was not confirmed in time.

    A rank that owes nothing sends it without tags, to ask for the outcome of the room.
    """

    tags: Tags


class PartAck(RoomMessage, frozen=True, tag="part-ack"):
    """Decode → writer: the room is still open, and these tags have arrived."""

    tags: Tags


class RoomDone(RoomMessage, frozen=True, tag="room-done"):
    """Decode → prefill: every planned byte is in place."""


class RoomFailed(RoomFailure, frozen=True, tag="room-failed"):
    """Either way: the room failed; `rank`, `code`, `at_ns`, `text` are the first cause."""


class Ack(RoomMessage, frozen=True, tag="ack"):
    """Answer to RoomDone and RoomFailed (`of` is their tag)."""

    of: Name


class RoomAbort(RoomFailure, frozen=True, tag="room-abort"):
    """Decode → prefill: stop, and answer RoomDrained when nothing is in flight; carries the first cause."""


class RoomDrained(RoomMessage, frozen=True, tag="room-drained"):
    """Prefill → decode: none of this rank's writes for the room is in flight, nor ever will be."""


class Bye(Message, frozen=True, tag="bye"):
    """Both ways, the last message of an incarnation; with `drained`, no write is in flight: it proves the end."""

    drained: bool


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
    | Bye
)
