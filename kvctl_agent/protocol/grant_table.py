"""The decode rank's book of grants: which part holds which ring region, and what has become of it.

States of a region: granted → landed (its tag came; it is being scattered) → freed; or granted → revoking → freed;
or quarantined, where a write may still be in flight and nobody can prove that it is not. A region whose writer is
silent is set aside in the ring when others wait behind it, whatever its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvctl_agent.protocol.messages import Grant
from kvctl_agent.protocol.ring import Region, Ring, may_write
from kvctl_agent.protocol.tag import PartKey
from kvctl_agent.protocol.tombstones import RoomKey


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
