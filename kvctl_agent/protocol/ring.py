"""The decode rank's ring allocator: an endless log over a fixed region, freed from its oldest end.

A request that fits the ring at all is granted at once, possibly in a round whose bytes are still in use; the *writer*
waits until the watermark has passed (see `gate`). So allocation never blocks and never fails for want of space.

The watermark is (round, tail) of the oldest allocation not yet freed. Freeing the last one starts a new round at
offset 0, so an empty ring gates nobody.
"""

from __future__ import annotations

from typing import NamedTuple

from kvctl_agent.errors import LocalProtocolError

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


class Ring:
    """Who owns which bytes of the ring; knows nothing of rooms.

    Args:
        size_bytes: size of the ring; 0 means that there is none.
    """

    __slots__ = ("_head", "_live", "_round", "_serial", "_used", "high_water_bytes", "sequence", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._head = 0
        self._round = 0
        self._serial = 0
        self._used = 0
        self._live: dict[int, Region] = {}  # in order of allocation: the first is the oldest
        self.high_water_bytes = 0
        self.sequence = 0  # grows with each move of the watermark, so that a late one is told from a new one

    @property
    def head(self) -> int:
        return self._head

    @property
    def round(self) -> int:
        return self._round

    @property
    def used_bytes(self) -> int:
        """Bytes with a live owner; may exceed the size, since later rounds are granted ahead."""
        return self._used

    @property
    def live(self) -> tuple[Region, ...]:
        """Allocations not yet freed, oldest first. Safe to read from another thread."""
        return tuple(self._live.values())

    @property
    def watermark(self) -> Position:
        for region in self._live.values():
            return Position(region.round, region.offset)
        return Position(self._round, 0)

    def fits(self, nbytes: int) -> bool:
        return 0 < _aligned(nbytes) <= self.size_bytes

    def allocate(self, nbytes: int) -> Region:
        """Grant the next `nbytes` of the log.

        Raises:
            LocalProtocolError: the request can never fit; ask `fits` first.
        """
        size = _aligned(nbytes)
        if not self.fits(nbytes):
            raise LocalProtocolError(f"a part of {nbytes} bytes cannot fit a staging ring of {self.size_bytes} bytes")
        if self._head + size > self.size_bytes:
            self._round += 1
            self._head = 0
        self._serial += 1
        region = Region(self._serial, self._head, self._head + size, self._round)
        self._live[region.serial] = region
        self._head += size
        self._used += size
        self.high_water_bytes = max(self.high_water_bytes, min(self._used, self.size_bytes))
        return region

    def free(self, serial: int) -> bool:
        """Give a region back; True when that moved the watermark. Freeing twice changes nothing."""
        region = self._live.get(serial)
        if region is None:
            return False
        oldest = next(iter(self._live)) == serial
        del self._live[serial]
        self._used -= region.end - region.offset
        if not self._live:
            self._round += 1
            self._head = 0
        if oldest:
            self.sequence += 1
        return oldest


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
