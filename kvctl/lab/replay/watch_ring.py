"""A decode rank's ring as it follows from what it says: who was given which bytes, and who may write them now."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from kvctl.lab.replay.invariants import Broken
from kvctl_agent.protocol.messages import Grant
from kvctl_agent.protocol.ring import Position, may_write
from kvctl_agent.protocol.tag import PartKey, RoomKey


class Region:
    """One grant, until nobody can write or read its bytes any more."""

    __slots__ = ("end", "key", "offset", "open", "revoking", "room", "round", "scattering", "serial", "told", "unread")

    def __init__(self, room: RoomKey, key: PartKey, serial: int, offset: int, end: int, round_: int) -> None:
        self.room = room
        self.key = key
        self.serial = serial
        self.offset = offset
        self.end = end
        self.round = round_
        self.told = False  # its tag has come
        self.scattering = False
        self.revoking = False
        self.unread = False  # its room has failed: it may still be written, and will not be read
        self.open = False  # the watermark lets its writer write

    @property
    def identity(self) -> tuple[object, ...]:
        return self.room, self.key, self.offset, self.end, self.round

    def __str__(self) -> str:
        return f"serial {self.serial} ({self.key} of room {self.room.room}, bytes {self.offset}-{self.end})"


class RingInvariants:
    """The ring of one decode rank."""

    def __init__(self, size_bytes: int, spent: int, *, doubtful: bool) -> None:
        """`spent` is the highest serial given before; `doubtful` when there are grants that we do not hear of."""
        self._size_bytes = size_bytes
        self._spent = spent
        self._doubtful = doubtful
        self.live: dict[int, Region] = {}
        self._open: list[tuple[int, int]] = []  # (offset, serial) of what may be written or is being read
        self._mark = (0, Position(0, 0))

    def grant(self, room: RoomKey, writer: int, grant: Grant) -> None:
        """A grant was said; the same one may be said again."""
        key = PartKey(writer, grant.chunk, grant.lo, grant.hi)
        region = Region(room, key, grant.serial, grant.offset, grant.end, grant.round)
        known = self.live.get(grant.serial)
        if known is not None:
            if known.identity != region.identity:
                raise Broken("serial-reused", f"{region} is also {known}", room.room)
            return
        if grant.serial <= self._spent:
            raise Broken("serial-reused", f"{region} comes after serial {self._spent} was given", room.room)
        if not 0 <= region.offset < region.end <= self._size_bytes:
            raise Broken("bad-grant", f"{region} is not within a ring of {self._size_bytes} bytes", room.room)
        self._spent = grant.serial
        self.live[grant.serial] = region
        self._let_in(self._mark[1], [region])

    def must_be_open(self, serial: int) -> None:
        """The first grant from an empty ring gates nobody, once the watermark that was said with it is heard."""
        region = self.live.get(serial)
        if not self._doubtful and region is not None and not region.open:
            raise Broken(
                "gated-by-nobody", f"{region} waits for a watermark, and nobody else has any", region.room.room
            )

    def mark(self, said: Sequence[int]) -> None:
        """A watermark was said: (round, tail, sequence)."""
        if len(said) != 3:
            return
        position, sequence = Position(said[0], said[1]), said[2]
        if sequence < self._mark[0] or position < self._mark[1]:
            before = self._mark
            raise Broken(
                "watermark-back",
                f"the watermark goes from round {before[1].round} tail {before[1].tail} (sequence {before[0]}) "
                f"to round {position.round} tail {position.tail} (sequence {sequence})",
            )
        if position != self._mark[1]:
            self._let_in(position, [region for region in self.live.values() if not region.open])
        self._mark = (sequence, position)

    def free(self, region: Region) -> None:
        """Nobody writes or reads it any more."""
        if self.live.pop(region.serial, None) is not None and region.open:
            self._open.remove((region.offset, region.serial))

    def of(self, room: RoomKey) -> list[Region]:
        return [region for region in self.live.values() if region.room == room]

    def _let_in(self, watermark: Position, regions: Iterable[Region]) -> None:
        for region in regions:
            if may_write(region.round, region.end, watermark):
                for offset, serial in self._open:
                    if offset >= region.end:
                        break
                    other = self.live[serial]
                    # What is set aside for two silent writers may overlap, for neither will be read.
                    if region.offset < other.end and not (region.unread and other.unread):
                        raise Broken("two-owners", f"{region} may be written, and so may {other}", region.room.room)
                region.open = True
                insort(self._open, (region.offset, region.serial))
