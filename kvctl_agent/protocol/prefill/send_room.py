"""What an engine has computed of one room, layer by layer: which pages of the prompt are there, and what may be sent.

A plain forward computes the next pages in all layers at once, a pipelined one in one layer group after the other. The
layers that stand at the same page are kept together, so a plain room is one span however many layers there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

import numpy as np

from kvctl_agent.contract.choices import STAGED
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import layer_range
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.parallel import RankCoord
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.protocol.events import Pages, SendPages
from kvctl_agent.protocol.messages import Grant
from kvctl_agent.protocol.peer import CancelToken
from kvctl_agent.protocol.tag import PartKey, PartKind, RoomKey
from kvctl_agent.telemetry.room_records import BusyTime, RoomRecord


class SendableChunk(NamedTuple):
    """Layers [lo, hi) may now be sent up to page `new`; they could be up to page `old` before."""

    lo: int
    hi: int
    old: int
    new: int


class ComputedPages:
    """The pages of one room on a prefill rank.

    Attributes:
        total: pages of the prompt; None until the last ones were given.
        forwards: how often new pages were computed, however many layer groups they came in.
    """

    __slots__ = ("_chunk_pages", "_given", "_pages", "_spans", "forwards", "total")

    def __init__(self, layers: range, chunk_pages: int) -> None:
        self._chunk_pages = chunk_pages
        self._spans: list[tuple[int, int, int]] = [(layers.start, layers.stop, 0)]  # lo, hi, pages computed
        self._pages: list[Pages] = []
        self._given = 0
        self.total: int | None = None
        self.forwards = 0

    @property
    def given(self) -> int:
        """Pages that at least one layer has."""
        return self._given

    @property
    def complete(self) -> bool:
        """Every layer of every page is computed."""
        return len(self._spans) == 1 and self._spans[0][2] == self.total

    def take(self, layers: tuple[int, int] | None, pages: Pages, last: bool) -> list[SendableChunk]:
        """The next pages of these layers (None: of all) are computed; what may be sent now.

        Raises:
            LayoutError: they do not follow what was given before; nothing has changed.
        """
        if layers is None and len(self._spans) == 1:  # every plain room: what follows, without the other layers
            lo, hi, first = self._spans[0]
            end = first + len(pages)
            self._check_end(end, last)
            self._keep(first, pages)
            if last:
                self.total = end
            self._spans = [(lo, hi, end)]
            return [SendableChunk(lo, hi, self._full(first, last=False), self._full(end, last=end == self.total))]
        lo, hi = layers or (self._spans[0][0], self._spans[-1][1])
        met = [span for span in self._spans if span[0] < hi and span[1] > lo]
        starts = {span[2] for span in met}
        if not met or lo < self._spans[0][0] or hi > self._spans[-1][1] or lo >= hi:
            own = layer_range(self._spans[0][0], self._spans[-1][1])
            raise LayoutError(f"layers {layer_range(lo, hi)} are not among this rank's {own}")
        if len(starts) != 1:
            at = ", ".join(f"{layer_range(span[0], span[1])} at page {span[2]}" for span in met)
            raise LayoutError(f"layers {layer_range(lo, hi)} do not stand at one page: {at}")
        (first,) = starts
        end = first + len(pages)
        self._check_end(end, last)
        self._keep(first, pages)
        others = self._outside(lo, hi)
        ended = [span for span in others if last and self.total is None and span[2] == end]
        if last:
            self.total = end
        self._spans = _merged([*others, (lo, hi, end)])
        steps = [SendableChunk(lo, hi, self._full(first, last=False), self._full(end, last=end == self.total))]
        # Layers that had come this far did not know that it was the end, and held their tail back.
        return steps + [SendableChunk(start, stop, self._full(end, last=False), end) for start, stop, _ in ended]

    def steps(self) -> list[SendableChunk]:
        """Everything that may be sent so far."""
        found = [SendableChunk(lo, hi, 0, self._full(end, last=end == self.total)) for lo, hi, end in self._spans]
        return [step for step in found if step.new]

    def ready(self, lo: int, hi: int, page: int) -> bool:
        """Whether layers [lo, hi) may be sent up to `page`."""
        return all(
            self._full(end, last=end == self.total) >= page
            for first, stop, end in self._spans
            if first < hi and stop > lo
        )

    def source(self, cell: Chunk) -> Pages:
        """Our pages of one cell."""
        if len(self._pages) > 1:
            self._pages = [np.concatenate(self._pages)]
        return self._pages[0][cell.first : cell.first + cell.count]

    def behind(self) -> str:
        """Which layers lack which pages, for the text of a failure; how many all have where none is behind."""
        most = self._given if self.total is None else self.total
        short = [
            f"layers {layer_range(lo, hi)} were given {end} of {most} pages"
            for lo, hi, end in self._spans
            if end < most
        ]
        return ", ".join(short) or f"all layers have {most}, and more were to come"

    def _check_end(self, end: int, last: bool) -> None:
        if self.total is not None and (end > self.total or (last and end != self.total)):
            raise LayoutError(f"pages up to {end} after the last ones, which ended at {self.total}")
        if last and end < self._given:
            raise LayoutError(f"the last pages end at {end}, but other layers were given {self._given}")

    def _keep(self, first: int, pages: Pages) -> None:
        if first == self._given:
            self._pages.append(pages)
            self._given += len(pages)
            self.forwards += bool(len(pages))
            return
        known = self.source(Chunk(0, first, len(pages)))
        if len(known) != len(pages) or not np.array_equal(known, pages):
            raise LayoutError(f"pages {first}-{first + len(pages)} are others than those given for other layers")

    def _outside(self, lo: int, hi: int) -> list[tuple[int, int, int]]:
        spans: list[tuple[int, int, int]] = []
        for first, stop, end in self._spans:
            if first < lo:
                spans.append((first, min(stop, lo), end))
            if stop > hi:
                spans.append((max(first, hi), stop, end))
        return spans

    def _full(self, end: int, *, last: bool) -> int:
        return sendable_pages(end, last, self._chunk_pages)


def sendable_pages(computed: int, last: bool, chunk_pages: int) -> int:
    """Return how many pages from the start of a prompt may be sent once the first `computed` pages are computed.

    Only whole cells are sent, so that no cell is split: pages after the last cell boundary wait for the next chunk of
    the prompt.

    Args:
        computed: Pages computed so far.
        last: Whether `computed` is the whole prompt; then all of it may be sent.
        chunk_pages: Pages per grid cell.
    """
    return computed if last else computed - computed % chunk_pages


def _merged(spans: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    spans.sort()
    merged = [spans[0]]
    for lo, hi, end in spans[1:]:
        if merged[-1][2] == end:
            merged[-1] = (merged[-1][0], hi, end)
        else:
            merged.append((lo, hi, end))
    return merged


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


def writer_quota(inputs: PlanInputs, ring_bytes: int) -> int:
    """One writer's share of a reader's ring, by how many ranks write to it for one room."""
    prefill, decode = inputs.prefill, inputs.decode
    writers = prefill.tp * prefill.pp * prefill.cp // (decode.tp * decode.pp)
    return ring_bytes // max(1, writers)


class StagingCredits:
    """Towards one reader. A room asks for all of its parts at once, when what was asked for before it allows it."""

    __slots__ = ("_ahead", "_asked", "_computed", "_refilling", "_share_bytes")

    def __init__(self, share_bytes: int) -> None:
        self._share_bytes = share_bytes
        self._refilling = False
        self._asked = {False: 0, True: 0}  # bytes, by whether the room was computed when it asked
        self._computed: dict[RoomKey, PeerTransfer] = {}  # legs of computed rooms that must wait, oldest first
        self._ahead: dict[RoomKey, PeerTransfer] = {}  # likewise, of rooms that are not computed yet

    @property
    def asked_bytes(self) -> int:
        return sum(self._asked.values())

    def __len__(self) -> int:
        return len(self._computed) + len(self._ahead)

    def take(self, leg: PeerTransfer, parts: Iterable[Part], *, computed: bool) -> bool:
        """Whether these parts of a leg may be asked for now; else the leg is one of those that `next` gives."""
        key = leg.room_key
        if self._allows(computed=computed):
            self._computed.pop(key, None)
            self._ahead.pop(key, None)
            for part in parts:
                part.counted = computed
                self._asked[computed] += part.nbytes
            return True
        if computed:
            self._ahead.pop(key, None)
            self._computed.setdefault(key, leg)
        elif key not in self._computed:
            self._ahead.setdefault(key, leg)
        return False

    def next(self) -> PeerTransfer | None:
        """A leg that had to wait and may ask now: `take` lets it through.

        Legs are let go in batches, when half of what computed rooms may ask for is sent: asked for one by one, each
        would cost both sides a turn of their control loops.
        """
        if not self._refilling:
            self._refilling = len(self) > 0 and (self._load <= self._share_bytes or not self._asked[True])
        if self._refilling:
            for waiting, computed in ((self._computed, True), (self._ahead, False)):
                if waiting and self._allows(computed=computed):
                    return waiting.pop(next(iter(waiting)))
            self._refilling = False
        return None

    def end(self, part: Part) -> None:
        """This part is sent, or will not be sent through the ring after all."""
        if part.counted is not None:
            self._asked[part.counted] -= part.nbytes
            part.counted = None

    def forget(self, leg: PeerTransfer) -> None:
        """This leg will ask for nothing any more."""
        self._computed.pop(leg.room_key, None)
        self._ahead.pop(leg.room_key, None)
        for part in leg.parts.values():
            self.end(part)

    def _allows(self, *, computed: bool) -> bool:
        if not computed:
            return self.asked_bytes < self._share_bytes or self.asked_bytes == 0
        return self._load < 2 * self._share_bytes or not self._asked[True]

    @property
    def _load(self) -> int:
        """What computed rooms must be sparing with. However large a room is that asked ahead, it counts as one share:
        what is computed must not wait for its forward."""
        return self._asked[True] + min(self._asked[False], self._share_bytes)
