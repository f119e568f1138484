"""Control messages between agents: typed structs with named fields; new fields must be optional.

A frame carries the sender's incarnation once for all of its messages (see `codec`). Every message about a room carries
the room's nonce. Page lists are raw little-endian int32.

The types include the bounds of the values: handlers get values in range, and a value out of range invalidates only its
own message.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvctl_agent.contract.choices import RANK0

# Optional additions keep this number; a frame of another version is refused.
PROTOCOL_VERSION = 5

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
Dtypes = Annotated[dict[Name, Text], msgspec.Meta(max_length=128)]
Axes = Annotated[list[int], msgspec.Meta(max_length=4)]  # dp, pp, cp, tp
Stages = Annotated[list[Layer], msgspec.Meta(max_length=1 << 12)]
Tags = Annotated[list[Annotated[bytes, msgspec.Meta(min_length=32, max_length=4096)]], msgspec.Meta(max_length=1 << 18)]
States = Annotated[list[bytes], msgspec.Meta(max_length=64)]

MAX_TEXT = 4096
MAX_SHARED = 1 << 12
MAX_RENEWED = 1 << 16


class Message(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True, gc=False):
    """Base of all control messages."""


class SharedMemory(msgspec.Struct, frozen=True):
    """One device allocation of a pool or ring that a writer may map; see `device.base.Export`."""

    addr: Size  # so that its end is below 2⁶³
    nbytes: Size
    kind: Name
    handle: Annotated[bytes, msgspec.Meta(max_length=256)]
    device: Name


class PeerInfo(msgspec.Struct, frozen=True):
    """Identity of an agent, with the layout and addresses that a peer needs to plan transfers and to write to it."""

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
    cp_interleave: Size = 1  # of a decode instance: consecutive tokens of a prompt on one of its cp ranks
    address: Name = ""  # of its host, numeric, for display; "" if its peers are all on that host
    dtypes: Dtypes = {}  # of its pool: elements by segment, as `KVPool.dtypes`; one that is absent is unknown

    @property
    def process(self) -> str:
        """Text that names the process, for example "process 4711 on node-3"."""
        return f"process {self.pid} on {self.hostname or 'its host'}"


class RoomMessage(Message, frozen=True):
    """Base of messages about one room; the nonce distinguishes rooms that reuse the number."""

    room: U64
    nonce: U64


class RoomFailure(RoomMessage, frozen=True):
    """Base of messages that carry the first cause of a room's failure."""

    rank: Name
    code: Name
    at_ns: U64
    text: Text


class Hello(Message, frozen=True, tag="hello"):
    """Decode → prefill: the first message on a connection; describes the decode rank and is resent until answered."""

    version: int
    who: PeerInfo


class HelloAck(Message, frozen=True, tag="hello-ack"):
    """Prefill → decode: accepts the decode rank, or refuses it and lists the plan factors that differ.

    `to` is the incarnation whose Hello is answered, since its predecessor may have sent one, too. `taken` is a text,
    set if another process has the name of the sender of Hello; this may be temporary.
    """

    version: int
    who: PeerInfo
    to: U64
    differences: Annotated[list[Text], msgspec.Meta(max_length=64)] = []
    taken: Text = ""


class HelloWanted(Message, frozen=True, tag="hello-wanted"):
    """Prefill → decode: answers a heartbeat of a decode rank that is lost here or was forgotten, and so asks for Hello.

    Without it the decode rank would open rooms in vain until it notices the silence.
    """


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Both ways: sent periodically; its times give the round trip.

    `echo_ns` is `sent_ns` of the last heartbeat received from the peer, `held_ns` the time since that arrived.
    """

    sent_ns: U64
    echo_ns: U64 = 0
    held_ns: U64 = 0
    watermark: Mark = []  # from decode: round, tail, sequence; repairs a lost Watermark


class RoomOpen(RoomMessage, frozen=True, tag="room-open"):
    """Decode → prefill ranks that the plan names: asks each to send its parts of the room to these pages.

    `to` is the incarnation that the message is meant for: a process that has just replaced that one must not write for
    a room that the decode rank has not opened there.
    """

    pages: bytes  # int32 little-endian: this rank's pages of the prompt after the prefix
    prefix_pages: PageCount  # in transfer pages, as total_pages
    total_pages: PageCount
    inputs: Inputs  # all plan inputs, so that a mismatch names the factor
    aux_index: AuxIndex = -1  # row of the decode rank's aux pool; -1: this room has none
    states: States = []  # for each state component its item indices as int32 little-endian; empty: not wanted
    prefill_only: bool = False  # no KV is wanted, regardless of the prompt's length
    to: U64 = 0
    groups: States = []  # for each KV group this rank's pages as int32 little-endian: the last ones of the prompt
    tokens: PageCount = 0  # length of the prompt; 0: unknown
    digest: U64 = 0  # of the prompt, as `request_id.prompt_digest`; 0: unknown

    def tokens_to_send(self, page_size: int) -> int:
        """Returns the tokens after the prefix; those of whole pages if the length of the prompt is unknown."""
        if self.prefill_only:
            return 0
        return max(0, (self.tokens or self.total_pages * page_size) - self.prefix_pages * page_size)


class RoomKept(RoomMessage, frozen=True, tag="room-kept"):
    """Keeper → prefill ranks that write only to other decode ranks: it keeps this room, under this nonce.

    So they can tell each other how the room ends. Resent until Ack; `to` as in RoomOpen.
    """

    to: U64


class RoomAccepted(RoomMessage, frozen=True, tag="room-accepted"):
    """Prefill → decode: the room is open at this rank, and its parts are planned."""


class RoomRefused(RoomFailure, frozen=True, tag="room-refused"):
    """Prefill → decode: the room is not open at this rank and will not be; carries the first cause."""


class PartSpec(msgspec.Struct, frozen=True, gc=False):
    """One part that needs a ring region of `nbytes` bytes: layers [lo, hi) of a chunk."""

    chunk: U32
    lo: Layer
    hi: Layer
    nbytes: Size


class StagingRequest(RoomMessage, frozen=True, tag="staging-request"):
    """Writer → decode: requests ring regions for staged parts of a room, so that grants arrive before the data."""

    parts: Annotated[list[PartSpec], msgspec.Meta(max_length=1 << 18)]


class Grant(msgspec.Struct, frozen=True, gc=False):
    """Ring region [offset, end) granted to one part; the serial is unique within the decode rank's incarnation."""

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
    """Decode → writer: a part of `needs` bytes can never fit; the largest possible ring region has `ring` bytes."""

    chunk: U32
    lo: Layer
    hi: Layer
    needs: Size
    ring: Size


class StagingRevoke(RoomMessage, frozen=True, tag="staging-revoke"):
    """Decode → writer: asks the writer to give back a grant that has not been written."""

    chunk: U32
    lo: Layer
    hi: Layer
    serial: U64


class StagingRevoked(RoomMessage, frozen=True, tag="staging-revoked"):
    """Writer → decode: gives back the grant with this serial, which will never be written."""

    serial: U64


class TooLate(RoomMessage, frozen=True, tag="too-late"):
    """Writer → decode: a grant cannot be given back because its write is posted already; the tag will follow."""

    serial: U64


class Watermark(Message, frozen=True, tag="watermark"):
    round: U64
    tail: U64
    sequence: U64


class PartReady(RoomMessage, frozen=True, tag="part-ready"):
    """Writer → decode: tags of parts that are written; sent if the decode rank has not confirmed the room in time.

    A rank that has nothing to send for the room sends the message without tags, to ask for the room's outcome.
    """

    tags: Tags


class PartAck(RoomMessage, frozen=True, tag="part-ack"):
    """Decode → writer: answers PartReady while the room is open; lists the tags that have been received."""

    tags: Tags


class RoomDone(RoomMessage, frozen=True, tag="room-done"):
    """Decode → prefill: the room succeeded; every planned byte is in its pages.

    From the room's keeper: and in those of all other decode ranks. `age_ns` is the time since that has been so.
    """

    age_ns: U64 = 0


class ReadersDone(RoomMessage, frozen=True, tag="readers-done"):
    """Prefill → the room's keeper: all other decode ranks that opened the room at this rank have received it.

    Resent until the keeper answers RoomDone or RoomFailed, once it knows how the room has ended on every decode rank.
    `age_ns` is the time since the last of them has had the room.
    """

    age_ns: U64 = 0


class RoomFailed(RoomFailure, frozen=True, tag="room-failed"):
    """Both ways: the room failed; `rank`, `code`, `at_ns` and `text` describe the first cause."""


class Ack(RoomMessage, frozen=True, tag="ack"):
    """Both ways: answers RoomDone, RoomFailed or RoomKept; `of` is the type tag of that message."""

    of: Name


class RoomAbort(RoomFailure, frozen=True, tag="room-abort"):
    """Decode → prefill: the room failed; asks the rank to stop, and to send RoomDrained when nothing is in flight.

    `recall`: the decode rank only takes its pages back; the prefill rank keeps the room until it is opened again, under
    another nonce.
    """

    recall: bool = False


class RoomDrained(RoomMessage, frozen=True, tag="room-drained"):
    """Prefill → decode: none of this rank's writes for the room is in flight, nor ever will be."""


class RoomRenew(Message, frozen=True, tag="room-renew"):
    """Decode → prefill: prolongs the deadline of rooms that the decode rank is going to open.

    It is not answered: the engine repeats it.
    """

    rooms: Annotated[list[U64], msgspec.Meta(max_length=MAX_RENEWED)]


class Bye(Message, frozen=True, tag="bye"):
    """Both ways: the last message of an incarnation. `drained`: none of its writes is in flight or will be."""

    drained: bool


AnyMessage = (
    Hello
    | HelloAck
    | HelloWanted
    | Heartbeat
    | RoomOpen
    | RoomKept
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
    | ReadersDone
    | RoomFailed
    | Ack
    | RoomAbort
    | RoomDrained
    | RoomRenew
    | Bye
)
