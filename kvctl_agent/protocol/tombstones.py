"""What is remembered of rooms that are gone, so that late messages meet a grave and not a zombie."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class RoomKey(NamedTuple):
    """One life of a room number at one peer."""

    peer: str
    room: int
    nonce: int


class Tombstones(Generic[T]):
    """Bounded, expiring memory of ended rooms: each lives at least `lifetime_ns`, unless `capacity` is exceeded."""

    def __init__(self, lifetime_ns: int, capacity: int = 1 << 18) -> None:
        self._lifetime_ns = lifetime_ns
        self._capacity = capacity
        self._graves: OrderedDict[RoomKey, tuple[int, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graves)

    def keep_for(self, lifetime_ns: int) -> None:
        """How long each lives from now on."""
        self._lifetime_ns = lifetime_ns

    def bury(self, key: RoomKey, epitaph: T, now_ns: int) -> None:
        self._graves[key] = (now_ns, epitaph)
        self._graves.move_to_end(key)
        if len(self._graves) > self._capacity:
            self._graves.popitem(last=False)

    def holds(self, key: RoomKey) -> bool:
        return key in self._graves

    def find(self, key: RoomKey) -> T | None:
        grave = self._graves.get(key)
        return grave[1] if grave else None

    def expire(self, now_ns: int) -> None:
        while self._graves:
            key, (at, _) = next(iter(self._graves.items()))
            if now_ns - at < self._lifetime_ns:
                return
            del self._graves[key]
