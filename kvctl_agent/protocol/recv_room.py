"""One room on a decode rank: what is planned, what has landed, what is in its pages.

Coverage is a set, not a count: per (writer, chunk) a bit for each layer, so that an arrival told twice changes
nothing and a gap cannot hide behind a duplicate. The final parts, which are never cut, are a set of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvctl_agent.contract.layer_range import layer_range
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState
from kvctl_agent.layout.chunks import Chunk
from kvctl_agent.layout.transfer_slice import TransferSlice
from kvctl_agent.protocol.events import Pages
from kvctl_agent.protocol.messages import RoomOpen
from kvctl_agent.protocol.tag import PartKey, PartKind
from kvctl_agent.telemetry.room_records import RoomRecord

Cell = tuple[int, int]  # (writer, chunk)
Final = tuple[PartKind, PartKey]


class PartChecksum(NamedTuple):
    """What a part's writer says of its bytes, and what is to be said of the part once it is found to be true."""

    checksum: int
    moments: dict[str, int]  # stage → when it ended, monotonic ns
    path: str


class WriterTransfer:
    """What passes between this room and one prefill rank, whether it owes anything or not.

    It is between the room and one incarnation of that rank: what a later one says is no answer.
    """

    __slots__ = ("accepted", "acked", "drained", "incarnation", "peer")

    def __init__(self, peer: str, incarnation: int) -> None:
        self.peer = peer
        self.incarnation = incarnation
        self.accepted = False
        self.acked = False  # RoomDone has reached it, or it is gone; what a room that succeeded waits for
        self.drained = False  # nothing of it is in flight, nor will be; what a room that failed waits for


def mask(lo: int, hi: int) -> int:
    """Bits of the layers [lo, hi)."""
    return (1 << hi) - (1 << lo)


class RecvRoom:
    """One room under one nonce."""

    __slots__ = (
        "cells",
        "checks",
        "failure",
        "final_parts",
        "finals",
        "finals_landed",
        "granted",
        "instance",
        "landed",
        "legs",
        "missing",
        "nonce",
        "opening",
        "overdue",
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

    def __init__(self, opening: RoomOpen, instance: str, pages: Pages, record: RoomRecord, now_ns: int) -> None:
        self.room = opening.room
        self.nonce = opening.nonce
        self.opening = opening
        self.pages = pages
        self.prefix_pages = opening.prefix_pages
        self.instance = instance
        self.finals: set[Final] = set()  # that have not landed
        self.finals_landed: set[Final] = set()
        self.checks: dict[Final, PartChecksum] = {}  # parts in their pages whose checksum is being taken
        self.final_parts: dict[Final, tuple[TransferSlice | None, Pages]] = {}  # ours of the final parts
        self.record = record
        self.state = RoomState.BOOTSTRAPPING
        self.since_ns = now_ns  # when the wait that a deadline ends began: the state's start, or the last progress
        self.resend_ns = 0
        self.failure: Failure | None = None
        self.released = False
        self.overdue = False  # it failed long ago, and what may still be written of it is quarantined
        self.legs: dict[str, WriterTransfer] = {}
        self.unaccepted = 0  # legs
        self.writers: tuple[str, ...] = ()  # names of the instance's ranks, as they were when it was opened
        self.shares: dict[int, list[TransferSlice]] = {}  # by writer, one for each of its segments
        self.cells: dict[Cell, Chunk] = {}  # narrowed to what the writer owes
        self.wanted: dict[Cell, int] = {}
        self.granted: dict[Cell, int] = {}  # layers with a live grant, so that no two grants cover the same bytes
        self.landed: dict[Cell, int] = {}
        self.scattered: dict[Cell, int] = {}
        self.missing = 0  # cells whose layers are not all scattered

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
