"""One room on a prefill rank: what it owes to each decode rank, and how far that has come.

Data and its small questions; the rules of who says what when are in `prefill_rooms`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import IntEnum

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.parallel import RankCoord
from kvctl_agent.layout.transfer_slice import TransferSlice
from kvctl_agent.protocol.computed_pages import ComputedPages
from kvctl_agent.protocol.events import CancelToken, Lease, Pages, SendPages
from kvctl_agent.protocol.messages import Grant
from kvctl_agent.protocol.tag import PartKey, PartKind
from kvctl_agent.telemetry.busy_time import BusyTime
from kvctl_agent.telemetry.room_records import RoomRecord


class PartState(IntEnum):
    PLANNED = 0  # its pages are not computed yet
    READY = 1  # computed; parked while it has no grant, is gated, or the peer is silent
    QUEUED = 2  # handed to a transfer worker: from here on it may be in flight
    SENT = 3


class Part:
    """One part owed to one decode rank."""

    __slots__ = (
        "asked_ns",
        "asks",
        "checksum",
        "chunk",
        "confirmed",
        "counted",
        "grant",
        "key",
        "nbytes",
        "path",
        "ready_ns",
        "requested",
        "revoked",
        "share",
        "src_pages",
        "state",
    )

    def __init__(self, key: PartKey, chunk: Chunk, share: TransferSlice) -> None:
        self.key = key
        self.chunk = chunk
        self.share = share
        self.nbytes = share.part_bytes(chunk.count, self.layers)
        self.path = ""  # chosen when staging is asked for or when its pages are ready
        self.state = PartState.PLANNED
        self.confirmed = False  # the reader has said that it knows of it
        self.checksum: int | None = None  # of its bytes, once it is sent by a writer that takes one
        self.grant: Grant | None = None
        self.requested = False
        self.asks = 0  # how often a grant was asked for, and since when: for people, as long as none has come
        self.asked_ns = 0
        self.counted: bool | None = None  # by the allowance towards its reader: as one of a computed room, or ahead
        self.revoked = 0  # highest serial given back; grants up to it are ignored
        self.src_pages: Pages | None = None
        self.ready_ns = 0

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.key.hi - self.key.lo


class Final:
    """What follows a leg's KV: the aux row (`share` None), or one state component's items."""

    __slots__ = ("checksum", "dst", "key", "kind", "share", "state")

    def __init__(self, kind: PartKind, key: PartKey, share: TransferSlice | None, dst: Pages) -> None:
        self.kind = kind
        self.key = key
        self.share = share
        self.dst = dst  # of aux one row, of a state its items
        self.checksum: int | None = None  # as of a part
        self.state = PartState.PLANNED


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

    __slots__ = (
        "_cut",
        "_firsts",
        "abort_asked",
        "cancel",
        "cells",
        "done",
        "drained_said",
        "dst_pages",
        "failed_acked",
        "finals",
        "in_flight",
        "nonce",
        "parts",
        "peer",
        "planned",
        "prefill_only",
        "prefix_pages",
        "reader",
        "resend_ns",
        "room",
        "shares",
        "to_queue",
        "to_send",
        "total_pages",
    )

    def __init__(
        self,
        room: int,
        peer: str,
        reader: RankCoord,
        nonce: int,
        shares: Sequence[TransferSlice],
        cells: Sequence[Chunk],
        dst_pages: Pages,
        prefix_pages: int,
        total_pages: int,
        finals: Sequence[Final],
        prefill_only: bool,
        lease: Lease,
    ) -> None:
        self.room = room
        self.peer = peer
        self.reader = reader
        self.nonce = nonce
        self.shares = shares
        self.cells = cells if shares else ()
        self.dst_pages = dst_pages
        self.prefix_pages = prefix_pages
        self.total_pages = total_pages
        self.prefill_only = prefill_only
        self.finals = {(final.kind, final.key): final for final in finals}
        self.parts: dict[PartKey, Part] = {}
        self._firsts = [cell.first for cell in self.cells]
        self._cut: dict[int, list[Part]] = {}  # by cell: the parts it was cut into
        self.planned = len(self.cells) * sum(share.num_layers for share in shares)
        self.to_queue = self.planned
        self.to_send = self.planned + len(self.finals)
        self.in_flight = 0  # parts with a worker
        self.cancel = CancelToken(lease)
        self.done = False
        self.abort_asked = False
        self.drained_said = False
        self.failed_acked = False
        self.resend_ns = 0

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


class SendRoom:
    """One room as this prefill rank sees it, towards all decode ranks that expect it."""

    __slots__ = (
        "aux_src",
        "claimed",
        "expected",
        "failure",
        "finished",
        "forward_done_ns",
        "groups",
        "held",
        "launched",
        "ledger",
        "legs",
        "overdue",
        "prefetched",
        "record",
        "released",
        "room",
        "since_ns",
        "spans",
        "state",
        "state_src",
    )

    def __init__(self, room: int, record: RoomRecord, ledger: ComputedPages, now_ns: int) -> None:
        self.room = room
        self.record = record
        self.ledger = ledger
        self.state = RoomState.BOOTSTRAPPING
        self.since_ns = now_ns  # when the wait that a deadline ends began: the state's start, or the last progress
        self.claimed = False  # our own engine knows of it
        self.prefetched = False  # cells may be cut and staging asked for before their pages are ready
        self.groups: tuple[tuple[int, int], ...] = ()  # layer groups, where the engine has told them
        self.held: list[SendPages] = []  # an early stage's pages, where they are not to be sent early
        self.launched = 0  # forwards that run on the device, whose pages follow
        self.expected = 0  # decode ranks that must open it; 0: none has yet
        self.legs: dict[str, PeerTransfer] = {}
        self.finished = False
        self.released = False
        self.overdue = False  # it failed long ago, and the engine still has parts of it
        self.aux_src = -1
        self.state_src: tuple[Pages, ...] = ()
        self.forward_done_ns = 0
        self.spans = BusyTime()  # of a pipelined room: when some part was with a worker
        self.failure: Failure | None = None

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
