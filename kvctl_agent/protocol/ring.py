"""The staging ring of a decode rank: its allocator, the table of grants, and the writer's gate.

The ring is an endless log over a fixed region, freed from its oldest end. A request that fits the ring at all is
granted at once, possibly in a round whose bytes are still in use; the *writer* waits until the watermark has passed the
region. So allocation never blocks and never fails for lack of space.

The watermark is (round, tail) of the oldest allocation not yet freed. Freeing the last one starts a new round at offset
0, so an empty ring gates no writer.

An allocation whose writer is silent must not block all others until the writer is lost. It can be retired: the
watermark passes it, but no new allocation gets its bytes until it is freed. Allocations of later rounds that overlap it
must be given back before, since the watermark would admit their writers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.protocol.messages import Grant
from kvctl_agent.protocol.tag import PartKey, RoomKey

ALIGNMENT = 256


class Position(NamedTuple):
    """A watermark: all bytes before `tail` of `round`, and those of every earlier round, are free."""

    round: int
    tail: int


class Region(NamedTuple):
    """Bytes [offset, end) of the ring in one round, owned by `serial` until freed."""

    serial: int
    offset: int
    end: int
    round: int


def may_write(round_: int, end: int, watermark: Position) -> bool:
    """Returns whether the watermark has passed a region that ends at offset `end` of round `round_`."""
    previous = round_ - 1
    return round_ == 0 or previous < watermark.round or (previous == watermark.round and end <= watermark.tail)


@dataclass(slots=True, eq=False)
class Ring:
    """Allocator of the ring's bytes, without knowledge of rooms or writers.

    Args:
        size_bytes: size of the ring; 0 if there is none.
    """

    size_bytes: int
    high_water_bytes: int = 0
    sequence: int = 0  # grows with each move of the watermark, to detect late ones
    _head: int = 0
    _round: int = 0
    _serial: int = 0
    _used: int = 0
    _live: dict[int, Region] = field(default_factory=dict)  # in order of allocation: the first is the oldest
    _excluded: dict[int, Region] = field(default_factory=dict)  # retired or about to be: their bytes are not allocated

    @property
    def head(self) -> int:
        return self._head

    @property
    def round(self) -> int:
        return self._round

    @property
    def last_serial(self) -> int:
        """Serial of the latest allocation; 0 before the first."""
        return self._serial

    @property
    def used_bytes(self) -> int:
        """Number of allocated bytes; may exceed the size of the ring, since later rounds are granted ahead."""
        return self._used

    @property
    def live(self) -> tuple[Region, ...]:
        """Allocations that the watermark has not passed, oldest first."""
        return tuple(self._live.values())

    @property
    def watermark(self) -> Position:
        for region in self._live.values():
            return Position(region.round, region.offset)
        return Position(self._round, 0)

    @property
    def oldest(self) -> Region | None:
        """The allocation at the watermark; None if there is none."""
        return next(iter(self._live.values()), None)

    @property
    def largest_bytes(self) -> int:
        """Size of the largest possible allocation: the whole ring, or the largest gap between excluded bytes."""
        if not self._excluded:
            return self.size_bytes
        largest = start = 0
        for region in (*sorted(self._excluded.values(), key=_offset), Region(0, self.size_bytes, self.size_bytes, 0)):
            largest = max(largest, region.offset - start)
            start = max(start, region.end)
        return largest

    def fits(self, nbytes: int) -> bool:
        return 0 < _aligned(nbytes) <= self.largest_bytes

    def allocate(self, nbytes: int) -> Region:
        """Allocates the next `nbytes` of the log, aligned up; begins a new round if the present one has no space.

        Raises:
            LocalProtocolError: the request can never fit; check `fits` first.
        """
        size = _aligned(nbytes)
        if not self.fits(nbytes):
            raise LocalProtocolError(f"a part of {nbytes} bytes cannot fit a staging ring of {self.size_bytes} bytes")
        while (start := self._find_space(self._head, size)) is None:
            self._round += 1
            self._head = 0
        self._head = start
        self._serial += 1
        region = Region(self._serial, self._head, self._head + size, self._round)
        self._live[region.serial] = region
        self._head += size
        self._used += size
        self.high_water_bytes = max(self.high_water_bytes, min(self._used, self.size_bytes))
        return region

    def free(self, serial: int) -> bool:
        """Frees a region; returns whether the watermark moved. Freeing a region twice changes nothing."""
        excluded = self._excluded.pop(serial, None)
        region = self._live.get(serial)
        if region is None:
            if excluded is not None:
                self._used -= excluded.end - excluded.offset
            return False
        self._used -= region.end - region.offset
        return self._remove_from_order(serial)

    def exclude(self, serial: int) -> None:
        """Excludes the bytes of an allocation from all new allocations until it is freed."""
        if region := self._live.get(serial):
            self._excluded[serial] = region

    def is_retired(self, serial: int) -> bool:
        """Returns whether the watermark has passed an allocation that is not freed. Safe to call from any thread."""
        return serial in self._excluded and serial not in self._live

    def overlapping(self, serial: int) -> list[int]:
        """Returns the serials of allocations of later rounds that share bytes with a live allocation."""
        mine = self._live[serial]
        return [
            other.serial
            for other in self._live.values()
            if other.round > mine.round and other.offset < mine.end and mine.offset < other.end
        ]

    def retire(self, serial: int) -> bool:
        """Lets the watermark pass a live allocation, which keeps its bytes; returns whether the watermark moved."""
        self.exclude(serial)
        return self._remove_from_order(serial)

    def _remove_from_order(self, serial: int) -> bool:
        oldest = next(iter(self._live)) == serial
        del self._live[serial]
        if not self._live:
            self._round += 1
            self._head = 0
        if oldest:
            self.sequence += 1
        return oldest

    def _find_space(self, start: int, size: int) -> int | None:
        """Returns the first offset from `start` on with `size` bytes that are not excluded; None if there is none."""
        for region in sorted(self._excluded.values(), key=_offset):
            if region.offset >= start + size:
                break
            start = max(start, region.end)
        return start if start + size <= self.size_bytes else None


def _offset(region: Region) -> int:
    return region.offset


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class RingGate:
    """A writer's view of one decode rank's ring: the latest watermark received from one incarnation of it.

    A new incarnation gets a new gate: watermarks of another incarnation must not open its grants, and their higher
    sequence numbers must not hide its watermarks.
    """

    __slots__ = ("heard_ns", "position", "sequence")

    def __init__(self) -> None:
        self.position = Position(0, 0)
        self.sequence = -1
        self.heard_ns = 0

    def hear(self, watermark: Sequence[int], now_ns: int) -> bool:
        """Takes a watermark [round, tail, sequence]; returns whether it is new. Late and malformed ones are ignored."""
        if len(watermark) != 3:
            return False
        round_, tail, sequence = watermark
        position = Position(round_, tail)
        if sequence < self.sequence or (sequence == self.sequence and position <= self.position):
            return False
        self.sequence, self.position, self.heard_ns = sequence, position, now_ns
        return True

    def open(self, round_: int, end: int) -> bool:
        """Returns whether the watermark has passed a granted region, so that the writer may write it."""
        return may_write(round_, end, self.position)


class RegionState(StrEnum):
    """State of an allocation; quarantined means that a write may be in flight and nothing proves otherwise.

    Granted → landed (its tag arrived; it is being scattered) → freed; or granted → revoking → freed; or quarantined →
    freed.
    """

    GRANTED = "granted"
    REVOKING = "revoking"
    LANDED = "landed"
    QUARANTINED = "quarantined"


@dataclass(slots=True, eq=False)
class Allocation:
    """Ring region granted to a part, with the state of the grant."""

    region: Region
    room: RoomKey
    key: PartKey
    nbytes: int  # payload; the region is aligned up
    granted_ns: int
    at_ns: int  # time of the latest state change or revoke
    state: RegionState = RegionState.GRANTED
    posted: bool = False  # the writer has answered a revoke with TooLate
    retire_requested: bool = False  # by an operator; done as soon as no other allocation overlaps it

    def grant(self) -> Grant:
        region, key = self.region, self.key
        return Grant(key.chunk, key.lo, key.hi, region.serial, region.offset, region.end, region.round)


class GrantTable:
    """Table of the ring's live allocations, by serial, part and room; a part has at most one."""

    __slots__ = (
        "_by_part",
        "_by_room",
        "_by_serial",
        "_gated",
        "quarantined_bytes",
        "refused_largest_bytes",
        "ring",
    )

    def __init__(self, size_bytes: int) -> None:
        self.ring = Ring(size_bytes)
        self.quarantined_bytes = 0
        self.refused_largest_bytes = 0  # size of the largest part that could not fit
        self._by_serial: dict[int, Allocation] = {}
        self._by_part: dict[tuple[RoomKey, PartKey], Allocation] = {}
        self._by_room: dict[RoomKey, set[int]] = {}
        self._gated: dict[
            str, dict[int, Region]
        ] = {}  # by peer, oldest first: grants that the watermark has not passed

    def __len__(self) -> int:
        return len(self._by_serial)

    def find(self, serial: int) -> Allocation | None:
        return self._by_serial.get(serial)

    def of_part(self, room: RoomKey, key: PartKey) -> Allocation | None:
        return self._by_part.get((room, key))

    def of_room(self, room: RoomKey) -> list[Allocation]:
        return [self._by_serial[serial] for serial in self._by_room.get(room, ())]

    def unlanded(self, room: RoomKey) -> list[Allocation]:
        """Returns the allocations of one writer for a room, except those that are being scattered."""
        return [allocation for allocation in self.of_room(room) if allocation.state is not RegionState.LANDED]

    def allocations(self) -> list[Allocation]:
        """Returns all live allocations, oldest first. Safe to call from any thread."""
        return list(self._by_serial.copy().values())

    def oldest(self) -> Allocation | None:
        """Returns the allocation at the watermark; None if there is none."""
        region = self.ring.oldest
        return self._by_serial[region.serial] if region is not None else None

    def overlapping(self, allocation: Allocation) -> list[Allocation]:
        """Returns the allocations of later rounds that share bytes with this one."""
        return [self._by_serial[serial] for serial in self.ring.overlapping(allocation.region.serial)]

    def grant(self, room: RoomKey, key: PartKey, nbytes: int, now_ns: int) -> Allocation:
        """Allocates a region for a part that has none; the caller has checked that it fits the ring (`ring.fits`)."""
        allocation = Allocation(self.ring.allocate(nbytes), room, key, nbytes, now_ns, now_ns)
        region = allocation.region
        self._by_serial[region.serial] = allocation
        self._by_part[room, key] = allocation
        self._by_room.setdefault(room, set()).add(region.serial)
        if not may_write(region.round, region.end, self.ring.watermark):
            self._gated.setdefault(room.peer, {})[region.serial] = region
        return allocation

    def free(self, serial: int) -> bool:
        """Frees an allocation; returns whether the watermark moved. Unknown serials are ignored."""
        allocation = self._by_serial.pop(serial, None)
        if allocation is None:
            return False
        if allocation.state is RegionState.QUARANTINED:
            self.quarantined_bytes -= allocation.region.end - allocation.region.offset
        del self._by_part[allocation.room, allocation.key]
        self._ungate(allocation)
        serials = self._by_room[allocation.room]
        serials.discard(serial)
        if not serials:
            del self._by_room[allocation.room]
        return self.ring.free(serial)

    def quarantine(self, allocation: Allocation) -> None:
        """Keeps a region to which a write may be in flight for an unknown time, and counts its bytes as quarantined."""
        if allocation.state is not RegionState.QUARANTINED:
            allocation.state = RegionState.QUARANTINED
            self.quarantined_bytes += allocation.region.end - allocation.region.offset
            self.ring.exclude(allocation.region.serial)
            self._ungate(allocation)  # its writer is not notified any more

    def quarantine_room(self, room: RoomKey) -> None:
        """Quarantines all regions of a room that one writer may still write."""
        for allocation in self.unlanded(room):
            self.quarantine(allocation)

    def _ungate(self, allocation: Allocation) -> None:
        gated = self._gated.get(allocation.room.peer)
        if gated is not None and gated.pop(allocation.region.serial, None) is not None and not gated:
            del self._gated[allocation.room.peer]

    def take_opened(self) -> list[str]:
        """Returns the peers with grants that the watermark has passed since the last call."""
        watermark = self.ring.watermark
        peers: list[str] = []
        for peer, gated in list(self._gated.items()):
            open_now: list[int] = []
            for serial, region in gated.items():
                if not may_write(region.round, region.end, watermark):
                    break  # the watermark passes regions in the order of allocation
                open_now.append(serial)
            if open_now:
                peers.append(peer)
                for serial in open_now:
                    del gated[serial]
                if not gated:
                    del self._gated[peer]
        return peers

    @property
    def gates_any_peer(self) -> bool:
        return bool(self._gated)
