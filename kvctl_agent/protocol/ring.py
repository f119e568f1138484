"""The decode rank's ring allocator: an endless log over a fixed region, freed from its oldest end.

A request that fits the ring at all is granted at once, possibly in a round whose bytes are still in use; the *writer*
waits until the watermark has passed (see `gate`). So allocation never blocks and never fails for want of space.

The watermark is (round, tail) of the oldest allocation not yet freed. Freeing the last one starts a new round at
offset 0, so an empty ring gates nobody.

An allocation whose owner is silent must not hold up all others for as long. It can be set aside: it leaves the order,
so that the watermark passes it, but keeps its bytes, which no new allocation gets until it is freed. Before that,
whoever was given the same bytes in a later round must give them back (`heirs`), since the watermark would let them in.
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
    """A watermark: everything before `tail` of `round`, and every earlier round, is free."""

    round: int
    tail: int


class Region(NamedTuple):
    """Bytes [offset, end) of the ring in one round, owned by `serial` until freed."""

    serial: int
    offset: int
    end: int
    round: int


def may_write(round_: int, end: int, watermark: Position) -> bool:
    """Whether a region that ends at `end` of `round_` has been passed by the watermark."""
    previous = round_ - 1
    return round_ == 0 or previous < watermark.round or (previous == watermark.round and end <= watermark.tail)


@dataclass(slots=True, eq=False)
class Ring:
    """Who owns which bytes of the ring; knows nothing of rooms.

    Args:
        size_bytes: size of the ring; 0 means that there is none.
    """

    size_bytes: int
    high_water_bytes: int = 0
    sequence: int = 0  # grows with each move of the watermark, so that a late one is told from a new one
    _head: int = 0
    _round: int = 0
    _serial: int = 0
    _used: int = 0
    _live: dict[int, Region] = field(default_factory=dict)  # in order of allocation: the first is the oldest
    _avoided: dict[int, Region] = field(
        default_factory=dict
    )  # no new allocation gets these bytes: aside, or about to be

    @property
    def head(self) -> int:
        return self._head

    @property
    def round(self) -> int:
        return self._round

    @property
    def last_serial(self) -> int:
        """Of the allocation that was given last; 0 before the first."""
        return self._serial

    @property
    def used_bytes(self) -> int:
        """Bytes with a live owner; may exceed the size, since later rounds are granted ahead."""
        return self._used

    @property
    def live(self) -> tuple[Region, ...]:
        """Allocations that the watermark waits for, oldest first."""
        return tuple(self._live.values())

    @property
    def watermark(self) -> Position:
        for region in self._live.values():
            return Position(region.round, region.offset)
        return Position(self._round, 0)

    @property
    def oldest(self) -> Region | None:
        """The allocation that the watermark waits for first."""
        return next(iter(self._live.values()), None)

    @property
    def largest_bytes(self) -> int:
        """The largest allocation possible: the whole ring, or what lies between the avoided bytes."""
        if not self._avoided:
            return self.size_bytes
        largest = start = 0
        for region in (*sorted(self._avoided.values(), key=_offset), Region(0, self.size_bytes, self.size_bytes, 0)):
            largest = max(largest, region.offset - start)
            start = max(start, region.end)
        return largest

    def fits(self, nbytes: int) -> bool:
        return 0 < _aligned(nbytes) <= self.largest_bytes

    def allocate(self, nbytes: int) -> Region:
        """Grant the next `nbytes` of the log.

        Raises:
            LocalProtocolError: the request can never fit; ask `fits` first.
        """
        size = _aligned(nbytes)
        if not self.fits(nbytes):
            raise LocalProtocolError(f"a part of {nbytes} bytes cannot fit a staging ring of {self.size_bytes} bytes")
        while (start := self._free_from(self._head, size)) is None:
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
        """Give a region back; True when that moved the watermark. Freeing twice changes nothing."""
        aside = self._avoided.pop(serial, None)
        region = self._live.get(serial)
        if region is None:
            if aside is not None:
                self._used -= aside.end - aside.offset
            return False
        self._used -= region.end - region.offset
        return self._leave_order(serial)

    def avoid(self, serial: int) -> None:
        """From now on no new allocation gets the bytes of this one, whatever the round."""
        if region := self._live.get(serial):
            self._avoided[serial] = region

    def is_aside(self, serial: int) -> bool:
        """Whether the watermark has passed this allocation although it is not freed. Safe to ask from any thread."""
        return serial in self._avoided and serial not in self._live

    def heirs(self, serial: int) -> list[int]:
        """Serials of later rounds that were given some of the bytes of a live allocation."""
        mine = self._live[serial]
        return [
            other.serial
            for other in self._live.values()
            if other.round > mine.round and other.offset < mine.end and mine.offset < other.end
        ]

    def set_aside(self, serial: int) -> bool:
        """Let the watermark pass a live allocation, whose bytes stay its own; True when the watermark moved."""
        self.avoid(serial)
        return self._leave_order(serial)

    def _leave_order(self, serial: int) -> bool:
        oldest = next(iter(self._live)) == serial
        del self._live[serial]
        if not self._live:
            self._round += 1
            self._head = 0
        if oldest:
            self.sequence += 1
        return oldest

    def _free_from(self, start: int, size: int) -> int | None:
        """The first place at or after `start` for so many bytes in this round; None where there is none."""
        for region in sorted(self._avoided.values(), key=_offset):
            if region.offset >= start + size:
                break
            start = max(start, region.end)
        return start if start + size <= self.size_bytes else None


def _offset(region: Region) -> int:
    return region.offset


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class RingGate:
    """The latest watermark heard from one incarnation of one reader.

    A watermark of another incarnation must not open new grants, nor an old high sequence mask new ones: a new
    incarnation gets a new Gate.
    """

    __slots__ = ("heard_ns", "position", "sequence")

    def __init__(self) -> None:
        self.position = Position(0, 0)
        self.sequence = -1
        self.heard_ns = 0

    def hear(self, watermark: Sequence[int], now_ns: int) -> bool:
        """Take a (round, tail, sequence) from the reader; True when it moved. Late or malformed ones change nothing."""
        if len(watermark) != 3:
            return False
        round_, tail, sequence = watermark
        position = Position(round_, tail)
        if sequence < self.sequence or (sequence == self.sequence and position <= self.position):
            return False
        self.sequence, self.position, self.heard_ns = sequence, position, now_ns
        return True

    def open(self, round_: int, end: int) -> bool:
        return may_write(round_, end, self.position)


class RegionState(StrEnum):
    GRANTED = "granted"
    REVOKING = "revoking"
    LANDED = "landed"
    QUARANTINED = "quarantined"


@dataclass(slots=True, eq=False)
class GrantedRegion:
    """One region and its owner."""

    region: Region
    room: RoomKey
    key: PartKey
    nbytes: int  # payload; the region is aligned up
    granted_ns: int
    at_ns: int  # of its state, and of the latest revoke
    state: RegionState = RegionState.GRANTED
    posted: bool = False  # its writer has said that it was too late to give it back
    yields: bool = False  # an operator wants the watermark to pass it, as soon as nobody was given its bytes too

    def grant(self) -> Grant:
        region, key = self.region, self.key
        return Grant(key.chunk, key.lo, key.hi, region.serial, region.offset, region.end, region.round)


class GrantTable:
    """Grants by serial and by part; at most one live grant for a part."""

    def __init__(self, size_bytes: int) -> None:
        self.ring = Ring(size_bytes)
        self.quarantined_bytes = 0
        self.refused_largest_bytes = 0  # of the parts that no place could be found for
        self._by_serial: dict[int, GrantedRegion] = {}
        self._by_part: dict[tuple[RoomKey, PartKey], GrantedRegion] = {}
        self._by_room: dict[RoomKey, set[int]] = {}
        self._gated: dict[str, dict[int, Region]] = {}  # per peer, oldest first: live grants not opened yet

    def __len__(self) -> int:
        return len(self._by_serial)

    def find(self, serial: int) -> GrantedRegion | None:
        return self._by_serial.get(serial)

    def of_part(self, room: RoomKey, key: PartKey) -> GrantedRegion | None:
        return self._by_part.get((room, key))

    def of_room(self, room: RoomKey) -> list[GrantedRegion]:
        return [self._by_serial[serial] for serial in self._by_room.get(room, ())]

    def unread(self, room: RoomKey) -> list[GrantedRegion]:
        """What a writer holds for a room, but for what is being scattered."""
        return [holding for holding in self.of_room(room) if holding.state is not RegionState.LANDED]

    def holdings(self) -> list[GrantedRegion]:
        """All live grants, oldest first. Safe to read from another thread."""
        return list(self._by_serial.copy().values())

    def oldest(self) -> GrantedRegion | None:
        """The holding that the watermark waits for."""
        region = self.ring.oldest
        return self._by_serial[region.serial] if region is not None else None

    def heirs(self, holding: GrantedRegion) -> list[GrantedRegion]:
        """Holdings of later rounds that were given some of its bytes."""
        return [self._by_serial[serial] for serial in self.ring.heirs(holding.region.serial)]

    def grant(self, room: RoomKey, key: PartKey, nbytes: int, now_ns: int) -> GrantedRegion:
        """Give a region to a part that has none; the caller has asked `ring.fits`."""
        holding = GrantedRegion(self.ring.allocate(nbytes), room, key, nbytes, now_ns, now_ns)
        region = holding.region
        self._by_serial[region.serial] = holding
        self._by_part[room, key] = holding
        self._by_room.setdefault(room, set()).add(region.serial)
        if not may_write(region.round, region.end, self.ring.watermark):
            self._gated.setdefault(room.peer, {})[region.serial] = region
        return holding

    def free(self, serial: int) -> bool:
        """Give a region back to the ring; True when the watermark moved."""
        holding = self._by_serial.pop(serial, None)
        if holding is None:
            return False
        if holding.state is RegionState.QUARANTINED:
            self.quarantined_bytes -= holding.region.end - holding.region.offset
        del self._by_part[holding.room, holding.key]
        self._ungate(holding)
        serials = self._by_room[holding.room]
        serials.discard(serial)
        if not serials:
            del self._by_room[holding.room]
        return self.ring.free(serial)

    def land(self, holding: GrantedRegion, at_ns: int) -> None:
        """Its write is over: it is being scattered, and then free."""
        holding.state = RegionState.LANDED
        holding.at_ns = at_ns

    def quarantine(self, holding: GrantedRegion) -> None:
        """A write to this region may be in flight for ever: keep it, count it, show it."""
        if holding.state is not RegionState.QUARANTINED:
            holding.state = RegionState.QUARANTINED
            self.quarantined_bytes += holding.region.end - holding.region.offset
            self.ring.avoid(holding.region.serial)
            self._ungate(holding)  # its writer waits for nothing that we could tell

    def quarantine_room(self, room: RoomKey) -> None:
        """The writer may write to what it holds for this room for ever."""
        for holding in self.unread(room):
            self.quarantine(holding)

    def _ungate(self, holding: GrantedRegion) -> None:
        gated = self._gated.get(holding.room.peer)
        if gated is not None and gated.pop(holding.region.serial, None) is not None and not gated:
            del self._gated[holding.room.peer]

    def opened(self) -> list[str]:
        """Peers that hold a grant which the watermark has passed since they were last told."""
        watermark = self.ring.watermark
        told: list[str] = []
        for peer, gated in list(self._gated.items()):
            open_now: list[int] = []
            for serial, region in gated.items():
                if not may_write(region.round, region.end, watermark):
                    break  # regions open in the order in which they were given
                open_now.append(serial)
            if open_now:
                told.append(peer)
                for serial in open_now:
                    del gated[serial]
                if not gated:
                    del self._gated[peer]
        return told

    @property
    def gates_somebody(self) -> bool:
        return bool(self._gated)
