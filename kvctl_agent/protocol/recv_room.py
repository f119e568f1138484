"""One room on a decode rank: what is planned, what has landed, what is in its pages.

Coverage is a set, not a count: per (writer, chunk) a bit for each layer, so that an arrival told twice changes
nothing and a gap cannot hide behind a duplicate.
"""

from __future__ import annotations

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.plan import Share
from kvctl_agent.protocol.events import Pages
from kvctl_agent.protocol.messages import RoomOpen
from kvctl_agent.protocol.tag import PartKey
from kvctl_agent.telemetry.rooms import RoomRecord

Cell = tuple[int, int]  # (writer, chunk)


class WriterLeg:
    """What passes between this room and one prefill rank, whether it owes anything or not."""

    __slots__ = ("accepted", "acked", "drained", "peer")

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.accepted = False
        self.acked = False  # RoomDone has reached it, or it is gone; what a room that succeeded waits for
        self.drained = False  # nothing of it is in flight, nor will be; what a room that failed waits for


def mask(lo: int, hi: int) -> int:
    """Bits of the layers [lo, hi)."""
    return (1 << hi) - (1 << lo)


class RecvRoom:
    """One room under one nonce."""

    __slots__ = (
        "aux_index",
        "aux_landed",
        "aux_writer",
        "chunks",
        "failure",
        "granted",
        "landed",
        "legs",
        "missing",
        "nonce",
        "opening",
        "pages",
        "prefix_pages",
        "record",
        "released",
        "resend_ns",
        "room",
        "scattered",
        "shares",
        "since_ns",
        "state",
        "unaccepted",
        "wanted",
        "writers",
    )

    def __init__(self, opening: RoomOpen, pages: Pages, record: RoomRecord, now_ns: int) -> None:
        self.room = opening.room
        self.nonce = opening.nonce
        self.opening = opening
        self.pages = pages
        self.prefix_pages = opening.prefix_pages
        self.aux_index = opening.aux_index
        self.aux_writer = -1  # nobody: the plan is not made yet, or this room has no aux row
        self.aux_landed = opening.aux_index < 0
        self.record = record
        self.state = RoomState.BOOTSTRAPPING
        self.since_ns = now_ns  # when the wait that a deadline ends began: the state's start, or the last progress
        self.resend_ns = 0
        self.failure: Failure | None = None
        self.released = False
        self.legs: dict[str, WriterLeg] = {}
        self.unaccepted = 0  # legs
        self.writers: tuple[str, ...] = ()  # names of the instance's ranks, as they were when it was opened
        self.shares: dict[int, Share] = {}  # by writer
        self.chunks: dict[int, Chunk] = {}
        self.wanted: dict[Cell, int] = {}
        self.granted: dict[Cell, int] = {}  # layers with a live grant, so that no two grants cover the same bytes
        self.landed: dict[Cell, int] = {}
        self.scattered: dict[Cell, int] = {}
        self.missing = 0  # cells whose layers are not all scattered

    def plan(
        self, shares: tuple[Share, ...], chunks: tuple[Chunk, ...], aux_writer: int, writers: tuple[str, ...]
    ) -> None:
        """Take the plan: from now on coverage is known."""
        self.writers = writers
        self.legs = {name: WriterLeg(name) for name in writers}
        self.unaccepted = len(self.legs)
        self.shares = {share.writer: share for share in shares}
        self.chunks = {chunk.index: chunk for chunk in chunks}
        self.aux_writer = aux_writer
        for share in shares:
            for chunk in chunks:
                self.wanted[share.writer, chunk.index] = mask(share.layer_lo, share.layer_hi)
        self.missing = len(self.wanted)
        self.record.planned = sum(share.num_layers for share in shares) * len(chunks)

    def owes(self, key: PartKey) -> bool:
        """Whether the plan has such a part: a known cell and layers inside its share."""
        wanted = self.wanted.get((key.writer, key.chunk))
        if wanted is None:
            return False
        bits = mask(key.lo, key.hi)
        return bits & wanted == bits

    def land(self, key: PartKey) -> None:
        """Mark a part as landed, none of which had landed before."""
        cell = (key.writer, key.chunk)
        self.landed[cell] = self.landed.get(cell, 0) | mask(key.lo, key.hi)
        self.record.landed = (self.record.landed or 0) + key.hi - key.lo

    def settle(self, key: PartKey) -> None:
        """Mark a landed part as being in its pages."""
        cell = (key.writer, key.chunk)
        covered = self.scattered.get(cell, 0) | mask(key.lo, key.hi)
        self.scattered[cell] = covered
        self.record.scattered = (self.record.scattered or 0) + key.hi - key.lo
        if covered == self.wanted[cell]:
            self.missing -= 1

    def grantable(self, key: PartKey) -> bool:
        """Whether none of its layers has landed or has a live grant."""
        cell = (key.writer, key.chunk)
        return not (self.landed.get(cell, 0) | self.granted.get(cell, 0)) & mask(key.lo, key.hi)

    def grant(self, key: PartKey) -> None:
        cell = (key.writer, key.chunk)
        self.granted[cell] = self.granted.get(cell, 0) | mask(key.lo, key.hi)

    def ungrant(self, key: PartKey) -> None:
        """Its region is free again: landed and scattered, or given back."""
        self.granted[key.writer, key.chunk] &= ~mask(key.lo, key.hi)

    @property
    def complete(self) -> bool:
        return self.missing == 0 and self.aux_landed

    def pages_at(self, chunk: int) -> Pages:
        """This rank's pages of one cell."""
        cell = self.chunks[chunk]
        first = cell.first - self.prefix_pages
        return self.pages[first : first + cell.count]

    def gaps(self) -> str:
        """What has not arrived, for the text of a deadline."""
        for (writer, chunk), wanted in self.wanted.items():
            landed = self.landed.get((writer, chunk), 0)
            if landed != wanted:
                layers = wanted & ~landed
                first, last = (layers & -layers).bit_length() - 1, layers.bit_length()
                return f"writer {writer} chunk {chunk} layers {first}-{last} did not arrive"
        for (writer, chunk), wanted in self.wanted.items():
            if self.scattered.get((writer, chunk), 0) != wanted:
                return f"writer {writer} chunk {chunk} landed but is not in its pages"
        return "the aux row did not arrive" if not self.aux_landed else "nothing is missing"
