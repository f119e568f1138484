"""One room on a prefill rank: what it owes to each decode rank, and how far that has come.

Data and its small questions; the rules of who says what when are in `prefill`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from kvctl_agent.contract.choices import STAGED
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.parallel import RankCoord
from kvctl_agent.layout.transfer_slice import TransferSlice
from kvctl_agent.protocol.computed_pages import ComputedPages
from kvctl_agent.protocol.events import CancelToken, Pages, SendPages
from kvctl_agent.protocol.messages import Grant
from kvctl_agent.protocol.tag import PartKey, PartKind
from kvctl_agent.protocol.tombstones import RoomKey
from kvctl_agent.telemetry.busy_time import BusyTime
from kvctl_agent.telemetry.room_records import RoomRecord


class PartState(IntEnum):
    PLANNED = 0  # its pages are not computed yet
    READY = 1  # computed; parked while it has no grant, is gated, or the peer is silent
    QUEUED = 2  # handed to a transfer worker: from here on it may be in flight
    SENT = 3


class Wait(StrEnum):
    """What a part that is not sent waits for."""

    PAGES = "pages"
    WRITE = "write"
    GRANT = "grant"
    WATERMARK = "watermark"
    LEASE = "a sign of life"


@dataclass(slots=True, eq=False)
class Part:
    """One part owed to one decode rank."""

    key: PartKey
    chunk: Chunk
    share: TransferSlice
    path: str = ""  # chosen when staging is asked for or when its pages are ready
    state: PartState = PartState.PLANNED
    confirmed: bool = False  # the reader has said that it knows of it
    checksum: int | None = None  # of its bytes, once it is sent by a writer that takes one
    grant: Grant | None = None
    requested: bool = False
    asks: int = 0  # how often a grant was asked for, and since when: for people, as long as none has come
    asked_ns: int = 0
    counted: bool | None = None  # by the allowance towards its reader: as one of a computed room, or ahead
    revoked: int = 0  # highest serial given back; grants up to it are ignored
    src_pages: Pages | None = None
    ready_ns: int = 0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.share.part_bytes(self.chunk.count, self.layers)

    kind = PartKind.KV

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.key.hi - self.key.lo

    @property
    def serial(self) -> int:
        """Of the ring region that it is written to; 0 where it goes straight to its pages."""
        return self.grant.serial if self.grant is not None and self.path == STAGED else 0


@dataclass(slots=True, eq=False)
class Final:
    """What follows a leg's KV: the aux row (`share` None), or one state component's items."""

    kind: PartKind
    key: PartKey
    share: TransferSlice | None
    dst: Pages  # of aux one row, of a state its items
    checksum: int | None = None  # as of a part
    state: PartState = PartState.PLANNED

    serial = 0  # it never goes through the ring
    confirmed = False


@dataclass(slots=True, eq=False)
class PeerTransfer:
    """A room's part list towards one decode rank, under the nonce that this decode rank minted.

    A cell is cut into parts once, when staging is asked for it or when the first of its layers are ready: all layers
    of a share at once, or one part for each layer group. A part goes when all of its layers are ready.

    Attributes:
        shares: what this rank owes of each segment; they differ in their layers.
        cells: the grid's cells, narrowed to the pages that this rank owes.
        planned: layers of cells that are owed.
        to_queue, to_send: layers of cells that are not yet with a worker, or not yet sent; `to_send` counts finals too.
    """

    room: int
    peer: str
    reader: RankCoord
    nonce: int
    shares: Sequence[TransferSlice]
    cells: Sequence[Chunk]
    dst_pages: Pages
    prefix_pages: int
    total_pages: int
    finals: dict[tuple[PartKind, PartKey], Final]
    prefill_only: bool
    cancel: CancelToken
    parts: dict[PartKey, Part] = field(default_factory=dict)
    in_flight: int = 0  # parts with a worker
    done: bool = False
    abort_asked: bool = False
    drained_said: bool = False
    failed_acked: bool = False
    resend_ns: int = 0
    planned: int = field(init=False)
    to_queue: int = field(init=False)
    to_send: int = field(init=False)
    _firsts: list[int] = field(init=False)
    _cut: dict[int, list[Part]] = field(default_factory=dict)  # by cell: the parts it was cut into

    def __post_init__(self) -> None:
        self._firsts = [cell.first for cell in self.cells]
        self.planned = self.to_queue = len(self.cells) * sum(share.num_layers for share in self.shares)
        self.to_send = self.planned + len(self.finals)

    @property
    def room_key(self) -> RoomKey:
        return RoomKey(self.peer, self.room, self.nonce)

    @property
    def sent(self) -> bool:
        return self.to_send == 0

    @property
    def drained(self) -> bool:
        """Nothing is in flight, nor will be."""
        return self.in_flight == 0

    def pages_at(self, chunk: Chunk) -> Pages:
        """Destination pages of one cell."""
        first = chunk.first - self.prefix_pages
        return self.dst_pages[first : first + chunk.count]

    def cut_all(self, writer: int, groups: Sequence[tuple[int, int]]) -> None:
        """Cut every cell that is still whole into one part for each of `groups`; none: one for each share."""
        for cell in self.cells:
            if cell.index not in self._cut:
                for lo, hi in groups or [(share.layer_lo, share.layer_hi) for share in self.shares]:
                    self._add(writer, cell, lo, hi)

    def between(self, writer: int, lo: int, hi: int, old: int, new: int) -> Iterator[Part]:
        """The parts with some of the layers [lo, hi) in the cells that end within pages (old, new].

        What no part covers yet is cut by these layers.
        """
        for place in range(bisect_left(self._firsts, old), bisect_left(self._firsts, new)):
            cell = self.cells[place]
            known = self._cut.get(cell.index, [])
            if not any(part.key.lo < hi and part.key.hi > lo for part in known):
                known = self._add(writer, cell, lo, hi)
            yield from [part for part in known if part.key.lo < hi and part.key.hi > lo]

    def _add(self, writer: int, cell: Chunk, lo: int, hi: int) -> list[Part]:
        cut = self._cut.setdefault(cell.index, [])
        for share in self.shares:
            first, end = max(lo, share.layer_lo), min(hi, share.layer_hi)
            if first < end:
                key = PartKey(writer, cell.index, first, end)
                part = self.parts[key] = Part(key, cell, share)
                cut.append(part)
        return cut


@dataclass(slots=True, eq=False)
class SendRoom:
    """One room as this prefill rank sees it, towards all decode ranks that expect it."""

    room: int
    record: RoomRecord
    ledger: ComputedPages
    since_ns: int  # when the wait that a deadline ends began: the state's start, or the last progress
    state: RoomState = RoomState.BOOTSTRAPPING
    claimed: bool = False  # our own engine knows of it
    prefetched: bool = False  # cells may be cut and staging asked for before their pages are ready
    groups: tuple[tuple[int, int], ...] = ()  # layer groups, where the engine has told them
    held: list[SendPages] = field(default_factory=list)  # an early stage's pages, where they are not to be sent early
    launched: int = 0  # forwards that run on the device, whose pages follow
    expected: int = 0  # decode ranks that must open it; 0: none has yet
    legs: dict[str, PeerTransfer] = field(default_factory=dict)
    finished: bool = False
    released: bool = False
    overdue: bool = False  # it failed long ago, and the engine still has parts of it
    aux_src: int = -1
    state_src: tuple[Pages, ...] = ()
    forward_begun_ns: int | None = None  # monotonic; None where the engine did not say
    computed_ns: int | None = None  # when its last pages were
    forward_done_ns: int = 0  # when what goes last was ready: the last pages, then the final parts
    spans: BusyTime = field(default_factory=BusyTime)  # of a pipelined room: when some part was with a worker
    failure: Failure | None = None

    @property
    def opened(self) -> bool:
        return self.expected > 0 and len(self.legs) >= self.expected

    @property
    def sent(self) -> bool:
        """Nothing of it will be read again: all pages are given and sent, and the final parts that anybody wants."""
        return self.opened and self.ledger.complete and all(leg.sent for leg in self.legs.values())

    @property
    def done(self) -> bool:
        return self.opened and all(leg.done for leg in self.legs.values())

    @property
    def drained(self) -> bool:
        return all(leg.drained for leg in self.legs.values())
