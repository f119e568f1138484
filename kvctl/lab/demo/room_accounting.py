"""Results of every room at every rank, and whether a disturbance explains a failure.

A room has a deadline at every rank that lives; a room that has not ended there by then hangs. Time in which one of its
ranks was paused does not count. A failure is expected if one of the room's ranks, or the room, was disturbed within the
room's life; any other failure is a finding.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvctl.lab.ranks.messages import Ended, Mismatch
from kvctl_agent.contract.snapshots import Failure
from kvctl_agent.contract.states import RoomState

SUCCESS = RoomState.SUCCESS.label
_NS = 1_000_000_000
# Number of finished rooms that are kept for queries.
_KEPT_ROOMS = 2000


@dataclass(slots=True)
class LiveRoom:
    """One room, from the router's choice on.

    Attributes:
        ranks: all ranks that take part, including those that owe nothing: the prefill instance and the decode dp group.
        expects: ranks from which an end, and then a release, is still expected.
        ends, released: by rank.
        died: time of exit of ranks whose process ended before the room ended there.
        aborted: a rank was told to abort it.
        hung: ranks at which it was found to hang.
    """

    number: int
    tokens: int
    prefix_tokens: int
    instance: int
    decode_dp: int
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    ranks: tuple[str, ...]
    opened_ns: int
    aborted: bool = False
    expects: set[str] = field(default_factory=set)
    ends: dict[str, Ended] = field(default_factory=dict)
    released: dict[str, int] = field(default_factory=dict)
    died: dict[str, int] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)

    @property
    def over(self) -> bool:
        """It has ended, and its pages are free, at every rank that lives."""
        return not self.expects

    @property
    def succeeded(self) -> bool:
        """It has succeeded at every decode rank."""
        return all(name in self.ends and self.ends[name]["state"] == SUCCESS for name in self.decode)

    @property
    def failed(self) -> bool:
        """It has failed at a rank, or a rank has died."""
        return bool(self.died) or any(end["state"] != SUCCESS for end in self.ends.values())

    @property
    def first_cause(self) -> Failure | None:
        """The earliest cause reported by a rank."""
        causes = [end["cause"] for end in self.ends.values() if end["cause"] is not None]
        return min(causes, key=lambda cause: cause["at_ns"], default=None)

    @property
    def ended_ns(self) -> int:
        """Time of the last end, or death of a rank, so far."""
        return max([self.opened_ns, *(end["at_ns"] for end in self.ends.values()), *self.died.values()])


@dataclass(slots=True)
class Disturbance:
    """Something done to a rank's process, or to all if `rank` is None.

    `until_ns` is None while it lasts. `codes` are the failures that it explains; all if there are none. Rooms opened
    from `before_ns` on are not affected, because another process has taken the rank's place.
    """

    kind: str
    rank: str | None
    from_ns: int
    until_ns: int | None = None
    codes: tuple[str, ...] = ()
    before_ns: int | None = None

    def concerns(self, room: LiveRoom) -> bool:
        """Whether the room has the rank and the disturbed process."""
        return (self.rank is None or self.rank in room.ranks) and (
            self.before_ns is None or room.opened_ns < self.before_ns
        )


class Corruption(NamedTuple):
    """Wrong bytes, or bytes written without permission."""

    rank: str
    mismatch: Mismatch
    at_ns: int


class RoomAccounting:
    """All rooms of one fleet.

    Attributes:
        rooms: by number; all that are not over, and the latest of the others.
        hung, corrupt, unexpected: findings, each reported once.
        done, failed: counts of rooms that are over; `expected` of the failed ones are explained.
        verified_bytes, delivered_bytes: compared by decode ranks; of all prompts that arrived, compared or not.
        causes: failed rooms by the code of their first cause.
        in_flight: rooms by decode dp group that have not ended at all their decode ranks. A failed room whose pages a
            paused rank may still write to is not over, but is not in flight either.
    """

    def __init__(self, patience_s: float, grace_s: float, token_bytes: int) -> None:
        """A room hangs after `patience_s`; a disturbance explains failures until `grace_s` after its end."""
        self._token_bytes = token_bytes
        self._patience_ns = round(patience_s * _NS)
        self._grace_ns = round(grace_s * _NS)
        self.rooms: dict[int, LiveRoom] = {}
        self.disturbances: list[Disturbance] = []
        self.hung: list[LiveRoom] = []
        self.corrupt: list[Corruption] = []
        self.unexpected: list[LiveRoom] = []
        self.opened = self.done = self.failed = self.expected = 0
        self.verified_bytes = self.delivered_bytes = 0
        self.causes: Counter[str] = Counter()
        self.in_flight: Counter[int] = Counter()
        self._open: dict[int, LiveRoom] = {}
        self._over: deque[int] = deque()

    @property
    def open(self) -> list[LiveRoom]:
        """Rooms that are not over."""
        return list(self._open.values())

    # ---- events -----------------------------------------------------------------------------------------------------

    def add(self, room: LiveRoom, ranks: Iterable[str]) -> None:
        """Records a room that is being opened at these ranks; its other ranks are down."""
        room.expects = set(ranks)
        self.rooms[room.number] = self._open[room.number] = room
        self.in_flight[room.decode_dp] += 1
        self.opened += 1
        for rank in room.ranks:
            if rank in room.decode and rank not in room.expects:
                self._note_end(room, rank, room.opened_ns)

    def ended(self, rank: str, ended: Ended) -> LiveRoom | None:
        """Records the end of a room at a rank; returns the room if it is known."""
        room = self.rooms.get(ended["room"])
        if room is None or rank in room.ends:
            return None
        self._note_end(room, rank, ended)
        self.verified_bytes += ended["verified_bytes"]
        if ended["mismatch"] is not None:
            self.corrupt.append(Corruption(rank, ended["mismatch"], ended["at_ns"]))
        return room

    def released(self, rank: str, number: int, at_ns: int) -> LiveRoom | None:
        """Records that a room's pages are free at a rank; returns the room if it is known."""
        room = self.rooms.get(number)
        if room is None:
            return None
        room.released[rank] = at_ns
        self._finish(room, rank)
        return room

    def died(self, rank: str, at_ns: int) -> None:
        """Records the exit of a rank's process, which ends all its rooms there."""
        for room in self.open:
            if rank in room.ranks:
                if rank not in room.ends:
                    self._note_end(room, rank, at_ns)
                self._finish(room, rank)

    def disturb(self, disturbance: Disturbance) -> Disturbance:
        """Records a disturbance."""
        self.disturbances.append(disturbance)
        return disturbance

    def stray(self, rank: str, mismatch: Mismatch, at_ns: int) -> None:
        """Records a write to a free page."""
        self.corrupt.append(Corruption(rank, mismatch, at_ns))

    # ---- findings ---------------------------------------------------------------------------------------------------

    def find_overdue(self, now_ns: int) -> list[LiveRoom]:
        """Records and returns the rooms newly found to hang at a rank that lives and was not paused."""
        found = []
        for room in self.open:
            if now_ns - room.opened_ns - self._paused_ns(room, now_ns) <= self._patience_ns:
                continue
            hanging = room.expects - room.hung
            if hanging and not self._paused_now(room):
                if not room.hung:
                    self.hung.append(room)
                room.hung |= hanging
                found.append(room)
        return found

    def explains(self, room: LiveRoom) -> bool:
        """Whether an abort or a disturbance explains that a room failed."""
        if room.aborted:
            return True
        cause = room.first_cause
        code = cause["code"] if cause is not None else ""
        return any(
            each.concerns(room)
            and each.from_ns <= room.ended_ns
            and (each.until_ns is None or each.until_ns + self._grace_ns >= room.opened_ns)
            and (not each.codes or code in each.codes)
            for each in self.disturbances
        )

    def _paused_ns(self, room: LiveRoom, now_ns: int) -> int:
        """Returns the time in a room's life in which one of its ranks was paused."""
        paused = 0
        for each in self.disturbances:
            if each.kind == "pause" and each.concerns(room):
                paused += max(0, (each.until_ns or now_ns) - max(each.from_ns, room.opened_ns))
        return paused

    def _paused_now(self, room: LiveRoom) -> bool:
        return any(each.kind == "pause" and each.until_ns is None and each.concerns(room) for each in self.disturbances)

    def _note_end(self, room: LiveRoom, rank: str, end: Ended | int) -> None:
        """Records the end of a room at a rank, or the time of the rank's death."""
        if isinstance(end, int):
            room.died[rank] = end
        else:
            room.ends[rank] = end
        over = room.ends.keys() | room.died.keys()
        if rank in room.decode and over.issuperset(room.decode):
            self.in_flight[room.decode_dp] -= 1

    def _finish(self, room: LiveRoom, rank: str) -> None:
        """Removes a rank from those that a room expects; classifies the room after the last one."""
        if rank not in room.expects:
            return
        room.expects.discard(rank)
        if room.expects:
            return
        del self._open[room.number]
        if room.succeeded:
            self.done += 1
            self.delivered_bytes += (room.tokens - room.prefix_tokens) * self._token_bytes
        else:
            self.failed += 1
            cause = room.first_cause
            self.causes[cause["code"] if cause is not None else "RANK_DIED"] += 1
            if self.explains(room):
                self.expected += 1
            else:
                self.unexpected.append(room)
        self._over.append(room.number)
        if len(self._over) > _KEPT_ROOMS:
            del self.rooms[self._over.popleft()]


def describe(rooms: Collection[LiveRoom], most: int = 8) -> str:
    """Returns the numbers of rooms and the ranks that still have them, in words."""
    listed = sorted(rooms, key=lambda room: room.number)[:most]
    words = [f"{room.number} ({', '.join(sorted(room.expects)) or 'nobody'})" for room in listed]
    more = f" and {len(rooms) - most} more" if len(rooms) > most else ""
    return ", ".join(words) + more
