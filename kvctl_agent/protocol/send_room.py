"""One room on a prefill rank: what it owes to each decode rank, and how far that has come.

Data and its small questions; the rules of who says what when are in `prefill`.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.chunks import Chunk, ChunkCutter
from kvctl_agent.layout.plan import Share
from kvctl_agent.layout.side import Coord
from kvctl_agent.protocol.events import Fence, Pages
from kvctl_agent.protocol.messages import Grant
from kvctl_agent.protocol.tag import PartKey
from kvctl_agent.telemetry.rooms import RoomRecord


class PartState(IntEnum):
    PLANNED = 0  # its pages are not computed yet
    READY = 1  # computed; parked while it has no grant, is gated, or the peer is silent
    QUEUED = 2  # handed to a transfer worker: from here on it may be in flight
    SENT = 3


class Part:
    """One part owed to one decode rank."""

    __slots__ = (
        "chunk",
        "confirmed",
        "grant",
        "key",
        "nbytes",
        "path",
        "ready_ns",
        "requested",
        "revoked",
        "src_pages",
        "state",
    )

    def __init__(self, key: PartKey, chunk: Chunk, nbytes: int) -> None:
        self.key = key
        self.chunk = chunk
        self.nbytes = nbytes
        self.path = ""  # chosen when staging is asked for or when its pages are ready
        self.state = PartState.PLANNED
        self.confirmed = False  # the reader has said that it knows of it
        self.grant: Grant | None = None
        self.requested = False
        self.revoked = 0  # highest serial given back; grants up to it are ignored
        self.src_pages: Pages | None = None
        self.ready_ns = 0


class Leg:
    """A room's part list towards one decode rank, under the nonce that this decode rank minted."""

    __slots__ = (
        "abort_asked",
        "aux_index",
        "aux_mine",
        "aux_state",
        "cutter",
        "done",
        "drained_said",
        "dst_pages",
        "failed_acked",
        "fence",
        "in_flight",
        "nonce",
        "parts",
        "peer",
        "prefix_pages",
        "reader",
        "resend_ns",
        "room",
        "share",
        "to_queue",
        "to_send",
        "total_pages",
    )

    def __init__(
        self,
        room: int,
        peer: str,
        reader: Coord,
        nonce: int,
        share: Share | None,
        dst_pages: Pages,
        prefix_pages: int,
        total_pages: int,
        cutter: ChunkCutter,
        parts: dict[PartKey, Part],
        aux_index: int,
        aux_mine: bool,
    ) -> None:
        self.room = room
        self.peer = peer
        self.reader = reader
        self.nonce = nonce
        self.share = share
        self.dst_pages = dst_pages
        self.prefix_pages = prefix_pages
        self.total_pages = total_pages
        self.cutter = cutter
        self.parts = parts
        self.aux_index = aux_index
        self.aux_mine = aux_mine
        self.aux_state = PartState.PLANNED if aux_mine else PartState.SENT
        self.to_queue = len(parts)  # KV parts not yet handed to a worker
        self.to_send = len(parts) + aux_mine
        self.in_flight = 0  # parts with a worker
        self.fence = Fence()
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


class SendRoom:
    """One room as this prefill rank sees it, towards all decode ranks that expect it."""

    __slots__ = (
        "aux_src",
        "claimed",
        "expected",
        "failure",
        "fed",
        "finished",
        "forward_done_ns",
        "last",
        "legs",
        "pages",
        "prefetched",
        "record",
        "released",
        "room",
        "since_ns",
        "state",
    )

    def __init__(self, room: int, record: RoomRecord, now_ns: int) -> None:
        self.room = room
        self.record = record
        self.state = RoomState.BOOTSTRAPPING
        self.since_ns = now_ns  # when the wait that a deadline ends began: the state's start, or the last progress
        self.claimed = False  # our own engine knows of it
        self.prefetched = False
        self.expected = 0  # decode ranks that must open it; 0: none has yet
        self.legs: dict[str, Leg] = {}
        self.pages: list[Pages] = []
        self.fed = 0
        self.last = False
        self.finished = False
        self.released = False
        self.aux_src = -1
        self.forward_done_ns = 0
        self.failure: Failure | None = None

    @property
    def opened(self) -> bool:
        return self.expected > 0 and len(self.legs) >= self.expected

    @property
    def sent(self) -> bool:
        return self.opened and self.finished and all(leg.sent for leg in self.legs.values())

    @property
    def done(self) -> bool:
        return self.opened and all(leg.done for leg in self.legs.values())

    @property
    def drained(self) -> bool:
        return all(leg.drained for leg in self.legs.values())

    def source(self, chunk: Chunk) -> Pages:
        """Source pages of one cell."""
        if len(self.pages) > 1:
            self.pages = [np.concatenate(self.pages)]
        return self.pages[0][chunk.first : chunk.first + chunk.count]
