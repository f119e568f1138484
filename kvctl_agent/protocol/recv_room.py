"""One room on a decode rank: what is planned, what has landed, what is in its pages.

Coverage is a set, not a count: per (writer, chunk) a bit for each layer, so that an arrival told twice changes
nothing and a gap cannot hide behind a duplicate. The final parts, which are never cut, are a set of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.values import layer_range
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.transfer_slice import TransferSlice
from kvctl_agent.protocol.events import Pages
from kvctl_agent.protocol.messages import RoomOpen
from kvctl_agent.protocol.tag import PartKey, PartKind
from kvctl_agent.protocol.tombstones import RoomKey
from kvctl_agent.telemetry.room_records import RoomRecord

Cell = tuple[int, int]  # (writer, chunk)
Final = tuple[PartKind, PartKey]


class PartChecksum(NamedTuple):
    """What a part's writer says of its bytes, and what is to be said of the part once it is found to be true."""

    checksum: int
    moments: dict[str, int]  # stage → when it ended, monotonic ns
    path: str


@dataclass(slots=True, eq=False)
class WriterTransfer:
    """What passes between this room and one prefill rank, whether it owes anything or not.

    It is between the room and one incarnation of that rank: what a later one says is no answer.
    """

    peer: str
    incarnation: int
    accepted: bool = False
    acked: bool = False  # RoomDone has reached it, or it is gone; what a room that succeeded waits for
    drained: bool = False  # nothing of it is in flight, nor will be; what a room that failed waits for


def mask(lo: int, hi: int) -> int:
    """Bits of the layers [lo, hi)."""
    return (1 << hi) - (1 << lo)


@dataclass(slots=True, eq=False)
class RecvRoom:
    """One room under one nonce."""

    opening: RoomOpen
    instance: str
    pages: Pages
    record: RoomRecord
    since_ns: int  # when the wait that a deadline ends began: the state's start, or the last progress
    room: int = field(init=False)
    nonce: int = field(init=False)
    prefix_pages: int = field(init=False)
    state: RoomState = RoomState.BOOTSTRAPPING
    resend_ns: int = 0
    failure: Failure | None = None
    released: bool = False
    overdue: bool = False  # it failed long ago, and what may still be written of it is quarantined
    legs: dict[str, WriterTransfer] = field(default_factory=dict)
    unaccepted: int = 0  # legs
    writers: tuple[str, ...] = ()  # names of the instance's ranks, as they were when it was opened
    shares: dict[int, list[TransferSlice]] = field(default_factory=dict)  # by writer, one for each of its segments
    cells: dict[Cell, Chunk] = field(default_factory=dict)  # narrowed to what the writer owes
    wanted: dict[Cell, int] = field(default_factory=dict)
    # Layers with a live grant, so that no two grants cover the same bytes.
    granted: dict[Cell, int] = field(default_factory=dict)
    landed: dict[Cell, int] = field(default_factory=dict)
    scattered: dict[Cell, int] = field(default_factory=dict)
    missing: int = 0  # cells whose layers are not all scattered
    finals: set[Final] = field(default_factory=set)  # that have not landed
    finals_landed: set[Final] = field(default_factory=set)
    final_parts: dict[Final, tuple[TransferSlice | None, Pages]] = field(
        default_factory=dict
    )  # ours of the final parts
    checks: dict[Final, PartChecksum] = field(
        default_factory=dict
    )  # parts in their pages whose checksum is being taken

    def __post_init__(self) -> None:
        self.room = self.opening.room
        self.nonce = self.opening.nonce
        self.prefix_pages = self.opening.prefix_pages

    def plan(
        self,
        shares: Sequence[TransferSlice],
        cells_of: Callable[[int], Sequence[Chunk]],
        finals: dict[Final, tuple[TransferSlice | None, Pages]],
        writers: dict[str, int],
    ) -> None:
        """Take the plan: from now on coverage is known.

        Args:
            shares: the KV that this rank is owed.
            cells_of: the cells that a writer owes of it.
            finals: the final parts that this rank is owed, and where they go: pages are items of state, or one row.
            writers: names of the instance's ranks, in their order, and the incarnation of each.
        """
        self.writers = tuple(writers)
        self.legs = {name: WriterTransfer(name, incarnation) for name, incarnation in writers.items()}
        self.unaccepted = len(self.legs)
        self.finals = set(finals)
        self.final_parts = finals
        for share in shares:
            known = self.shares.setdefault(share.writer, [])
            known.append(share)
            for cell in cells_of(share.writer):
                at = share.writer, cell.index
                self.cells[at] = cell
                self.wanted[at] = self.wanted.get(at, 0) | mask(share.layer_lo, share.layer_hi)
        self.missing = len(self.wanted)
        self.record.planned = sum(wanted.bit_count() for wanted in self.wanted.values())

    def share_of(self, key: PartKey) -> TransferSlice:
        """The share that a planned part belongs to."""
        return next(share for share in self.shares[key.writer] if share.layer_lo <= key.lo < share.layer_hi)

    def owed_bytes(self, peer: str) -> int:
        """KV bytes that one rank owes this room."""
        return sum(
            share.payload_bytes(cell.count)
            for (writer, _), cell in self.cells.items()
            if self.writers[writer] == peer
            for share in self.shares[writer]
        )

    def owes(self, key: PartKey) -> bool:
        """Whether the plan has such a part: a known cell and layers inside one share."""
        if (key.writer, key.chunk) not in self.cells:
            return False
        return any(share.layer_lo <= key.lo < key.hi <= share.layer_hi for share in self.shares[key.writer])

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

    def land_final(self, final: Final) -> bool:
        """Mark a final part as landed; False where it had landed before."""
        if final not in self.finals:
            return False
        self.finals.remove(final)
        self.finals_landed.add(final)
        return True

    def key_of(self, peer: str) -> RoomKey:
        """Under which one writer's regions are kept."""
        return RoomKey(peer, self.room, self.nonce)

    @property
    def all_landed(self) -> bool:
        """Whether every planned cell has landed."""
        return self.landed == self.wanted

    @property
    def begun(self) -> bool:
        """Whether anything has landed."""
        return bool(self.landed or self.finals_landed)

    @property
    def complete(self) -> bool:
        return self.missing == 0 and not self.finals and not self.checks

    def pages_at(self, key: PartKey) -> Pages:
        """This rank's pages of a planned part."""
        cell = self.cells[key.writer, key.chunk]
        first = cell.first - self.prefix_pages
        return self.pages[first : first + cell.count]

    def gaps(self) -> str:
        """What has not arrived, for the text of a deadline."""
        for (writer, chunk), wanted in self.wanted.items():
            landed = self.landed.get((writer, chunk), 0)
            if landed != wanted:
                layers = wanted & ~landed
                first, last = (layers & -layers).bit_length() - 1, layers.bit_length()
                return f"chunk {chunk} layers {layer_range(first, last)} of {self.writers[writer]} did not arrive"
        for (writer, chunk), wanted in self.wanted.items():
            if self.scattered.get((writer, chunk), 0) != wanted:
                where = "its checksum was not taken" if self.checks else "is not in its pages"
                return f"writer {writer} chunk {chunk} landed but {where}"
        for kind, key in sorted(self.finals):
            state = f"state (segment {key.chunk}) layers {layer_range(key.lo, key.hi)}"
            what = "the aux row" if kind is PartKind.AUX else state
            return f"{what} of {self.writers[key.writer]} did not arrive"
        return "the checksums of final parts were not taken" if self.checks else "nothing is missing"
