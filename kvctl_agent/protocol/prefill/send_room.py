"""Data of one room on a prefill rank: the pages computed so far, and the parts to send to each decode rank."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kvctl_agent.contract.choices import STAGED
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import layer_range
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.parallel import LocalShard, RankCoord
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.protocol.events import NO_PAGES, Pages, SendPages
from kvctl_agent.protocol.messages import Grant
from kvctl_agent.protocol.peer import CancelToken
from kvctl_agent.protocol.tag import PartKey, PartKind, RoomKey, Tag
from kvctl_agent.telemetry.durations import BusyTime
from kvctl_agent.telemetry.room_records import RoomRecord


class SendableChunk(NamedTuple):
    """Pages [old, new) of a page table in layers [lo, hi), which may be sent from now on."""

    lo: int
    hi: int
    old: int
    new: int
    table: int = 0


class ComputedPages:
    """Pages of one page table of a room that the engine has computed, counted for each layer.

    A plain forward computes the next pages in all layers at once; a pipelined forward computes them in one layer group
    after the other. Only whole chunks may be sent until the last pages of the prompt are computed.

    Attributes:
        given: number of pages that are computed in at least one layer.
        total: number of pages of the prompt; None until its last pages are computed.
        complete: whether every page is computed in every layer.
        forwards: number of times that new pages were computed, regardless of the number of layer groups.
    """

    __slots__ = (
        "_chunk_pages",
        "_counts",
        "_first_layer",
        "_pages",
        "_table",
        "complete",
        "forwards",
        "given",
        "total",
    )

    def __init__(self, layers: range, chunk_pages: int, table: int = 0) -> None:
        self._chunk_pages = chunk_pages
        self._table = table
        self._first_layer = layers.start
        self._counts = [0] * len(layers)  # pages computed in each layer
        self._pages: list[Pages] = []
        self.given = 0
        self.total: int | None = None
        self.complete = False
        self.forwards = 0

    def take(self, layers: tuple[int, int] | None, pages: Pages, last: bool) -> list[SendableChunk]:
        """Adds the next pages of layers [lo, hi) (None: all layers); returns the chunks that may be sent now.

        Raises:
            LayoutError: the layers are not this rank's, or the pages do not follow earlier ones; nothing has changed.
        """
        own_lo, own_hi = self._first_layer, self._first_layer + len(self._counts)
        lo, hi = layers or (own_lo, own_hi)
        if not own_lo <= lo < hi <= own_hi:
            raise LayoutError(f"layers {layer_range(lo, hi)} are not among this rank's {layer_range(own_lo, own_hi)}")
        before, counts, after = (
            self._counts[: lo - own_lo],
            self._counts[lo - own_lo : hi - own_lo],
            self._counts[hi - own_lo :],
        )
        first = counts[0]
        if counts.count(first) != len(counts):
            spans = [span for span in self._spans(own_lo, self._counts) if span[0] < hi and span[1] > lo]
            at = ", ".join(f"{layer_range(start, stop)} at page {count}" for start, stop, count in spans)
            raise LayoutError(f"layers {layer_range(lo, hi)} do not stand at one page: {at}")
        end = first + len(pages)
        if self.total is not None and (end > self.total or (last and end != self.total)):
            raise LayoutError(f"pages up to {end} after the last ones, which ended at {self.total}")
        if last and end < self.given:
            raise LayoutError(f"the last pages end at {end}, but other layers were given {self.given}")
        self._keep(first, pages)
        # Layers that reached the last page before it was known to be the last have kept back their last chunk.
        waiting: list[tuple[int, int, int]] = []
        if last and self.total is None:
            others = (*self._spans(own_lo, before), *self._spans(hi, after))
            waiting = [span for span in others if span[2] == end]
        if last:
            self.total = end
        self._counts = [*before, *[end] * len(counts), *after]
        self.complete = self._counts.count(end) == len(self._counts) and end == self.total
        chunks = [SendableChunk(lo, hi, self._whole_chunks(first), self._sendable(end), self._table)]
        return chunks + [
            SendableChunk(start, stop, self._whole_chunks(end), end, self._table) for start, stop, _ in waiting
        ]

    def sendable(self) -> list[SendableChunk]:
        """Returns all pages and layers that may be sent so far."""
        chunks = [
            SendableChunk(lo, hi, 0, self._sendable(count), self._table)
            for lo, hi, count in self._spans(self._first_layer, self._counts)
        ]
        return [chunk for chunk in chunks if chunk.new]

    def ready(self, lo: int, hi: int, page: int) -> bool:
        """Returns whether layers [lo, hi) may be sent up to `page`."""
        return self._sendable(min(self._counts[lo - self._first_layer : hi - self._first_layer])) >= page

    def source(self, chunk: Chunk, split: int) -> Pages:
        """Returns this rank's transfer pages of one chunk, `split` for each page of this rank.

        Raises:
            LayoutError: the engine has passed no page for a part of the chunk.
        """
        pages = chunk.source(self._known(), split)
        if self._table and int(pages.min()) < 0:
            raise LayoutError(f"pages {chunk.first}-{chunk.end - 1} of group {self._table} are wanted, and one is -1")
        return pages

    def describe_missing(self) -> str:
        """Describes which layers lack which pages, for the text of a failure."""
        most = self.given if self.total is None else self.total
        spans = self._spans(self._first_layer, self._counts)
        short = [f"layers {layer_range(lo, hi)} were given {n} of {most} pages" for lo, hi, n in spans if n < most]
        return ", ".join(short) or f"all layers have {most}, and none with last=True"

    def _keep(self, first: int, pages: Pages) -> None:
        if first == self.given:
            self._pages.append(pages)
            self.given += len(pages)
            self.forwards += bool(len(pages))
            return
        known = self._known()[first : first + len(pages)]
        if len(known) != len(pages) or not np.array_equal(known, pages):
            raise LayoutError(f"pages {first}-{first + len(pages)} are others than those given for other layers")

    def _known(self) -> Pages:
        if len(self._pages) > 1:
            self._pages = [np.concatenate(self._pages)]
        return self._pages[0]

    def _sendable(self, count: int) -> int:
        return count if count == self.total else self._whole_chunks(count)

    def _whole_chunks(self, count: int) -> int:
        return count - count % self._chunk_pages

    @staticmethod
    def _spans(first_layer: int, counts: list[int]) -> Iterator[tuple[int, int, int]]:
        """Yields each run of layers with equal counts as (first layer, end, count)."""
        lo = first_layer
        for count, run in groupby(counts):
            hi = lo + len(list(run))
            yield lo, hi, count
            lo = hi


class ComputedTables:
    """Pages of one room that the engine has computed, in every page table.

    Attributes:
        by_table: the tables of which this rank has layers, by number.
        complete: whether every page of every table is computed in every layer.
    """

    __slots__ = ("_groups", "by_table", "complete")

    def __init__(self, layers: range, chunk_pages: int, groups: Sequence[tuple[LocalShard, int]] = ()) -> None:
        """Creates empty tables.

        Args:
            layers: this rank's KV and draft layers.
            chunk_pages: pages per cell of the chunk grid.
            groups: for each KV group this rank's shard and the pages per cell.
        """
        self._groups = [shard.segment for shard, _ in groups]
        self.complete = False
        self.by_table = {0: ComputedPages(layers, chunk_pages)}
        for number, (shard, cell) in enumerate(groups, 1):
            if shard.num_layers:
                self.by_table[number] = ComputedPages(range(shard.layer_lo, shard.layer_hi), cell, number)

    @property
    def given(self) -> int:
        """As `ComputedPages.given`, of KV; also `total` and `forwards`."""
        return self.by_table[0].given

    @property
    def total(self) -> int | None:
        return self.by_table[0].total

    @property
    def forwards(self) -> int:
        return self.by_table[0].forwards

    def take(
        self, layers: tuple[int, int] | None, pages: Pages, last: bool, groups: Sequence[Pages] = ()
    ) -> list[SendableChunk]:
        """Adds the next pages of KV, and of the groups computed with it; arguments and errors as `ComputedPages.take`.

        Args:
            groups: the next pages of each group; groups at the end that have none may be omitted.
        """
        if len(groups) > len(self._groups):
            raise LayoutError(f"pages of {len(groups)} groups, the model has {len(self._groups)}")
        chunks = self.by_table[0].take(layers, pages, last)
        for number, segment in enumerate(self._groups, 1):
            span = layers and segment.beside(*layers)
            if number in self.by_table and (span is None or span[0] < span[1]):
                own = groups[number - 1] if number <= len(groups) else NO_PAGES
                chunks += self.by_table[number].take(span, own, last)
        self.complete = all(table.complete for table in self.by_table.values())
        return chunks

    def sendable(self) -> list[SendableChunk]:
        """Returns all pages and layers that may be sent so far."""
        return [chunk for table in self.by_table.values() for chunk in table.sendable()]

    def layer_groups(self, groups: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Returns groups of KV layers with the groups' layers that are computed with each of them."""
        spans = [segment.beside(lo, hi) for segment in self._groups for lo, hi in groups]
        return (*groups, *(span for span in spans if span[0] < span[1]))

    def describe_missing(self) -> str:
        """Describes which layers lack which pages, for the text of a failure."""
        short = next((table for table in self.by_table.values() if not table.complete), self.by_table[0])
        return short.describe_missing()


def _uncut(parts: Sequence[Part], lo: int, hi: int) -> list[tuple[int, int]]:
    """Returns the runs of layers within [lo, hi) that belong to no part."""
    runs: list[tuple[int, int]] = []
    for first, end in sorted((part.key.lo, part.key.hi) for part in parts):
        if lo < min(first, hi):
            runs.append((lo, min(first, hi)))
        lo = max(lo, end)
    return [*runs, (lo, hi)] if lo < hi else runs


class PartState(IntEnum):
    PLANNED = 0  # its pages are not computed yet
    READY = 1  # computed; gated while it has no grant, the watermark is behind its region, or the peer is silent
    QUEUED = 2  # queued for transfer: from here on the part may be in flight
    SENT = 3


class Wait(StrEnum):
    """Reason why a part is not sent yet."""

    PAGES = "pages"
    WRITE = "write"
    GRANT = "grant"
    WATERMARK = "watermark"
    LEASE = "a sign of life"


@dataclass(slots=True, eq=False)
class Part:
    """One KV part to be sent to one decode rank."""

    key: PartKey
    chunk: Chunk
    share: TransferSlice
    path: str = ""  # chosen when staging is requested or the pages are ready
    state: PartState = PartState.PLANNED
    confirmed: bool = False  # the decode rank has acknowledged its tag
    checksum: int | None = None  # of its bytes, once sent by a writer that computes checksums
    grant: Grant | None = None
    requested: bool = False
    asks: int = 0  # number of requests without a grant, and the time of the first; for diagnosis
    asked_ns: int = 0
    counted: bool | None = None  # in the staging credits, as part of a computed room (True) or ahead of its forward
    revoked: int = 0  # highest serial given back; grants up to it are ignored
    src_pages: Pages | None = None
    aux: Final | None = None  # the aux row that goes in the tag of this part
    ready_ns: int = 0
    layers: int = field(init=False)
    nbytes: int = field(init=False)

    kind = PartKind.KV
    row = None

    def __post_init__(self) -> None:
        self.layers = self.key.hi - self.key.lo
        self.nbytes = self.share.part_bytes(self.chunk.count, self.layers)

    @property
    def serial(self) -> int:
        """Serial of the ring region that the part is written to; 0 if the part is written straight to its pages."""
        return self.grant.serial if self.grant is not None and self.path == STAGED else 0


@dataclass(slots=True, eq=False)
class Final:
    """A final part, sent after all KV parts: the aux row (`share` is None) or the items of one state component."""

    kind: PartKind
    key: PartKey
    share: TransferSlice | None
    dst: Pages  # one row of aux, or items of a state
    checksum: int | None = None
    row: bytes | None = None  # the aux row, once sent in its tag
    state: PartState = PartState.PLANNED

    serial = 0  # final parts never go through the ring
    confirmed = False


@dataclass(slots=True, eq=False)
class TableTransfer:
    """The pages of one page table that a rank sends to one decode rank.

    Attributes:
        chunks: chunks of the grid, narrowed to the pages that this rank sends to the decode rank.
        dst_pages: pages of the decode rank after its cached prefix.
        prefix_pages, total_pages: transfer pages of the prefix and of the prompt.
        split, dst_split: transfer pages in a page of this rank, and of the decode rank.
    """

    chunks: Sequence[Chunk]
    dst_pages: Pages
    prefix_pages: int
    total_pages: int
    split: int = 1
    dst_split: int = 1
    _first_pages: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._first_pages = [chunk.first for chunk in self.chunks]

    @property
    def engine_pages(self) -> int:
        """Number of this rank's pages in the prompt."""
        return -(-self.total_pages // self.split)

    def between(self, old: int, new: int) -> Sequence[Chunk]:
        """Returns the chunks that start within this rank's pages [old, new)."""
        first, end = (bisect_left(self._first_pages, page * self.split) for page in (old, new))
        return self.chunks[first:end]


@dataclass(slots=True, eq=False)
class PeerTransfer:
    """The parts of a room that this rank sends to one decode rank, under the nonce chosen by that decode rank.

    A chunk is divided into parts once: when staging is requested for it or when the first of its layers are ready. It
    becomes one part per transfer slice, or one part per layer group. A part is sent when all of its layers are ready.

    Attributes:
        shares: transfer slices of KV that this rank sends, one per segment; their layers are disjoint.
        tables: for each page table the pages to send; empty to a keeper that is written nothing.
        planned: number of (chunk, layer) cells to send.
        to_queue: number of cells that are not queued for transfer yet.
        to_send: number of cells and final parts that are not sent yet.
        in_flight: number of parts queued for transfer whose end has not been reported.
        recalled: why the transfer ends: the decode rank has recalled its pages, and may open the room again; None
            otherwise.
        keeper: whether the decode rank keeps the room: it says RoomDone when all of the room's decode ranks have it.
        tokens, digest: length and digest of the prompt that the decode rank expects; 0: unknown.
    """

    writer: int
    room: int
    peer: str
    reader: RankCoord
    reader_rank: int
    nonce: int
    shares: Sequence[TransferSlice]
    tables: Sequence[TableTransfer]
    prefix_tokens: int
    finals: dict[tuple[PartKind, PartKey], Final]
    prefill_only: bool
    cancel: CancelToken
    keeper: bool = False
    tokens: int = 0
    digest: int = 0
    recalled: Failure | None = None
    parts: dict[PartKey, Part] = field(default_factory=dict)
    in_flight: int = 0
    done_ns: int = 0  # monotonic time at which the decode rank had all of the room; 0: it has not said so
    abort_received: bool = False
    drained_sent: bool = False
    acked: bool = False  # the decode rank knows that the room has failed, or is lost; a failed room waits for this
    resend_ns: int = 0
    key: RoomKey = field(init=False)
    former_cancel: CancelToken = field(init=False)  # of the parts queued before the last recall
    planned: int = field(init=False)
    to_queue: int = field(init=False)
    to_send: int = field(init=False)
    _parts_of_chunk: dict[tuple[int, int], list[Part]] = field(default_factory=dict)  # by (table, chunk)

    def __post_init__(self) -> None:
        self.key = RoomKey(self.peer, self.room, self.nonce)
        self.former_cancel = self.cancel
        self.planned = sum(len(self.tables[share.table].chunks) * share.num_layers for share in self.shares)
        self.to_queue = self.planned
        self.to_send = self.planned + len(self.finals)

    def stop(self) -> None:
        """Drops all queued parts and abandons those in transfer, also those that were queued before a recall."""
        self.cancel.cancelled = self.former_cancel.cancelled = True

    def drop_queued(self) -> None:
        """Drops the queued parts, whose pages the engine has recalled; parts in transfer are finished."""
        self.cancel.recalled = True
        self.former_cancel, self.cancel = self.cancel, CancelToken(self.cancel.lease)

    @property
    def sent(self) -> bool:
        return self.to_send == 0

    @property
    def done(self) -> bool:
        return self.done_ns > 0

    @property
    def drained(self) -> bool:
        """Whether no part is in flight; after the room has failed, none will be queued any more."""
        return self.in_flight == 0

    def pages_at(self, part: Part) -> Pages:
        """Returns the destination pages of a part."""
        table = self.tables[part.share.table]
        return part.chunk.target(table.dst_pages, table.dst_split, table.prefix_pages)

    def plan_parts(self, groups: Sequence[tuple[int, int]]) -> None:
        """Divides every undivided chunk into one part per layer group; without groups, into one per transfer slice."""
        for number, table in enumerate(self.tables):
            for chunk in table.chunks:
                if (number, chunk.index) not in self._parts_of_chunk:
                    for lo, hi in groups or [(share.layer_lo, share.layer_hi) for share in self.shares]:
                        self._cut(number, chunk, lo, hi)

    def parts_between(self, sendable: SendableChunk) -> list[Part]:
        """Returns the parts that have layers and begin within the pages of `sendable`.

        Each run of these layers that belongs to no part of a chunk yet becomes a part, or one part per transfer slice:
        all of them, or what is left after a recall within a forward in layer groups.
        """
        found: list[Part] = []
        lo, hi, old, new, table = sendable
        for chunk in self.tables[table].between(old, new):
            parts = self._parts_of_chunk.get((table, chunk.index), [])
            for first, end in _uncut(parts, lo, hi):
                parts = self._cut(table, chunk, first, end)
            found += [part for part in parts if part.key.lo < hi and part.key.hi > lo]
        return found

    def _cut(self, table: int, chunk: Chunk, lo: int, hi: int) -> list[Part]:
        parts = self._parts_of_chunk.setdefault((table, chunk.index), [])
        for share in self.shares:
            first, end = max(lo, share.layer_lo), min(hi, share.layer_hi)
            if first < end and share.table == table:
                key = PartKey(self.writer, chunk.index, first, end)
                part = self.parts[key] = Part(key, chunk, share)
                parts.append(part)
        return parts

    def tag(self, part: Part | Final, incarnation: int) -> bytes:
        """Returns the packed tag that the write of a part carries to this incarnation of the decode rank."""
        return Tag(part.kind, incarnation, self.room, self.nonce, part.serial, part.key, part.checksum, part.row).pack()


@dataclass(slots=True, eq=False)
class SendRoom:
    """One room on this prefill rank, with its transfers to the decode ranks that open it here."""

    room: int
    record: RoomRecord
    computed: ComputedTables
    since_ns: int  # start of the current deadline: when the state was entered, or the last progress
    state: RoomState = RoomState.BOOTSTRAPPING
    claimed: bool = False  # the local engine has called send() for the room
    tokens: int = 0  # length of the prompt that the engine computes; 0: unknown
    digest: int = 0  # of this prompt; 0: unknown
    prefetched: bool = False  # chunks may be cut and staging requested before their pages are ready
    groups: tuple[tuple[int, int], ...] = ()  # layer groups announced by the engine
    grouped_tokens: float = 0.0  # average tokens of a request for which the groups were chosen
    deferred: list[SendPages] = field(default_factory=list)  # pages of an early stage that sends only at finish()
    launched: int = 0  # forwards running on the device, with pages to follow
    recalled: bool = False  # the engine has taken its pages back, and has not begun to pass them again
    recalling: int = 0  # serial of the recall while parts queued before it are in transfer; 0: none
    readers: frozenset[int] = frozenset()  # decode ranks without which the room cannot begin; none before one opens it
    openers: set[int] = field(default_factory=set)  # they, the keeper, and a rank that refuses the room
    opened_by: set[int] = field(default_factory=set)  # decode ranks of the transfers
    told_prefix_tokens: int | None = None  # which the engine knows; it need not have passed pages before its end
    transfers: dict[str, PeerTransfer] = field(default_factory=dict)
    finished: bool = False
    released: bool = False
    overdue: bool = False  # the room failed long ago and still has writes in flight
    aux_src: int = -1
    state_src: tuple[Pages, ...] = ()
    forward_begun_ns: int | None = None  # monotonic; None if the engine did not report it
    computed_ns: int | None = None  # when the last pages were computed
    forward_done_ns: int = 0  # when the last data was ready: the last pages, then the final parts
    spans: BusyTime = field(default_factory=BusyTime)  # times with a part in transfer, where layer groups are sent
    failure: Failure | None = None

    @property
    def opened(self) -> bool:
        """Whether all decode ranks without which the room cannot begin here have opened it."""
        return bool(self.readers) and self.readers <= self.opened_by

    @property
    def opened_by_all(self) -> bool:
        """Whether the keeper has opened the room, too."""
        return 0 < len(self.openers) <= len(self.opened_by)

    @property
    def prefix_tokens(self) -> int | None:
        """Prompt tokens that these decode ranks have all cached; None before all of them have opened the room."""
        if not self.opened:
            return None
        transfers = list(self.transfers.values())  # any thread may ask
        return min((each.prefix_tokens for each in transfers if each.reader_rank in self.readers), default=None)

    @property
    def sent(self) -> bool:
        """Whether all pages are computed and all parts are sent, so that the pages will not be read again.

        Pages that were recalled need not be computed again if all parts were sent before.
        """
        computed = self.computed.complete or self.recalled
        return self.opened and computed and all(transfer.sent for transfer in self.transfers.values())

    @property
    def done(self) -> bool:
        return self.opened_by_all and all(transfer.done for transfer in self.transfers.values())

    @property
    def keeper(self) -> PeerTransfer | None:
        """The transfer to the keeper, even if it has no parts; None before the keeper has opened the room."""
        return next((transfer for transfer in self.transfers.values() if transfer.keeper), None)

    @property
    def readers_done_ns(self) -> int:
        """Monotonic time at which all decode ranks but the keeper had the room; 0: one has not, or there is none."""
        others = [transfer.done_ns for transfer in self.transfers.values() if not transfer.keeper]
        return max(others) if self.opened and others and all(others) else 0

    @property
    def drained(self) -> bool:
        return all(transfer.drained for transfer in self.transfers.values())

    def mark_ready(self, transfer: PeerTransfer, chunks: Sequence[SendableChunk], at_ns: int) -> list[Part]:
        """Marks planned parts of a transfer as ready if all of their pages are computed now; returns these parts.

        Args:
            chunks: layers and pages that may be sent from now on.
            at_ns: monotonic time at which they were computed.

        Raises:
            LayoutError: the engine has passed no page for a part.
        """
        ready: list[Part] = []
        for sendable in chunks if transfer.shares else ():
            computed, split = self.computed.by_table[sendable.table], transfer.tables[sendable.table].split
            for part in transfer.parts_between(sendable):
                end = -(-part.chunk.end // split)
                if part.state is PartState.PLANNED and computed.ready(part.key.lo, part.key.hi, end):
                    part.src_pages = computed.source(part.chunk, split)
                    part.ready_ns = at_ns
                    part.state = PartState.READY
                    ready.append(part)
        return ready
