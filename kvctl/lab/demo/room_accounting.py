"""What became of every room at every rank that had to do with it, and whether something explains it.

A room has a deadline at every rank that lives: one that has not ended there by then hangs. Time in which a rank of the
room was paused does not count. A failure is expected where something was done to one of the room's ranks, or to the
room, within its life; anything else is a finding.
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
# Rooms that are over are kept for questions, so many of them.
_KEPT_ROOMS = 2000


class End(NamedTuple):
    """How a room ended at one rank, on the monotonic clock."""

    state: str
    cause: Failure | None
    at_ns: int
    verified_bytes: int
    mismatch: Mismatch | None


@dataclass(slots=True)
class Room:
    """One room, from the router's choice on.

    Attributes:
        ranks: all that take part, those included that owe nothing: the prefill instance and the decode dp group.
        expects: ranks from which an end, and then a release, is still expected.
        ends, released: by rank.
        died: ranks whose process ended before the room did there, and when.
        aborted: somebody was told to give it up.
        hung: where and when it was found to hang.
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
    ends: dict[str, End] = field(default_factory=dict)
    released: dict[str, int] = field(default_factory=dict)
    died: dict[str, int] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)

    @property
    def over(self) -> bool:
        """It has ended, and its pages are free, at every rank that lives."""
        return not self.expects

    @property
    def succeeded(self) -> bool:
        """Every decode rank of it may decode."""
        return all(name in self.ends and self.ends[name].state == SUCCESS for name in self.decode)

    @property
    def failed(self) -> bool:
        """It failed at a rank, or with one."""
        return bool(self.died) or any(end.state != SUCCESS for end in self.ends.values())

    @property
    def first_cause(self) -> Failure | None:
        """The earliest cause that a rank gave."""
        causes = [end.cause for end in self.ends.values() if end.cause is not None]
        return min(causes, key=lambda cause: cause["at_ns"], default=None)

    @property
    def ended_ns(self) -> int:
        """When the last rank so far saw its end, or died of it."""
        return max([self.opened_ns, *(end.at_ns for end in self.ends.values()), *self.died.values()])


@dataclass(slots=True)
class Disturbance:
    """Something that was done to a rank's process; `rank` None: to all.

    `until_ns` is None while it lasts; `codes` are the failures that it explains, all where there are none. It has to do
    with no room that was opened from `before_ns` on: another process has the rank's place since.
    """

    kind: str
    rank: str | None
    from_ns: int
    until_ns: int | None = None
    codes: tuple[str, ...] = ()
    before_ns: int | None = None

    def concerns(self, room: Room) -> bool:
        """Whether the room has the rank, and the process that it was done to."""
        return (self.rank is None or self.rank in room.ranks) and (
            self.before_ns is None or room.opened_ns < self.before_ns
        )


class Corruption(NamedTuple):
    """Bytes that are not what they must be, or were written where nobody may write."""

    rank: str
    mismatch: Mismatch
    at_ns: int


class RoomAccounting:
    """All rooms of one fleet.

    Attributes:
        rooms: by number; all that are not over, and the latest of the others.
        hung, corrupt, unexpected: findings, each once.
        done, failed: counts of rooms that are over; `expected` of the failed ones are explained.
        verified_bytes, delivered_bytes: compared by decode ranks; of the prompts that arrived, whether compared or not.
        causes: failed rooms by the code of their first cause.
        in_flight: rooms that have not ended at all their decode ranks, by decode dp group. One that has failed and
            whose pages a paused rank may still write to is not over, but nobody waits for it.
    """

    def __init__(self, patience_s: float, grace_s: float, bytes_of_token: int) -> None:
        """A room hangs after `patience_s`; what was done to a rank explains failures for `grace_s` after its end."""
        self._bytes_of_token = bytes_of_token
        self._patience_ns = round(patience_s * _NS)
        self._grace_ns = round(grace_s * _NS)
        self.rooms: dict[int, Room] = {}
        self.disturbances: list[Disturbance] = []
        self.hung: list[Room] = []
        self.corrupt: list[Corruption] = []
        self.unexpected: list[Room] = []
        self.opened = self.done = self.failed = self.expected = 0
        self.verified_bytes = self.delivered_bytes = 0
        self.causes: Counter[str] = Counter()
        self.in_flight: Counter[int] = Counter()
        self._open: dict[int, Room] = {}
        self._over: deque[int] = deque()

    @property
    def open(self) -> list[Room]:
        """Rooms that are not over."""
        return list(self._open.values())

    # ---- what happens -------------------------------------------------------------------------------------------

    def opening(self, room: Room, taking_part: Iterable[str]) -> None:
        """A room is opened; `taking_part` are the ranks that were told of it, the others are down."""
        room.expects = set(taking_part)
        self.rooms[room.number] = self._open[room.number] = room
        self.in_flight[room.decode_dp] += 1
        self.opened += 1
        for rank in room.ranks:
            if rank in room.decode and rank not in room.expects:
                self._note_end(room, rank, room.opened_ns)

    def ended(self, rank: str, ended: Ended) -> Room | None:
        """A rank says how a room ended; the room, where it is known."""
        room = self.rooms.get(ended["room"])
        if room is None or rank in room.ends:
            return None
        end = End(ended["state"], ended["cause"], ended["at_ns"], ended["verified_bytes"], ended["mismatch"])
        self._note_end(room, rank, end)
        self.verified_bytes += end.verified_bytes
        if end.mismatch is not None:
            self.corrupt.append(Corruption(rank, end.mismatch, end.at_ns))
        return room

    def release(self, rank: str, number: int, at_ns: int) -> Room | None:
        """A rank says that a room's pages are free; the room, where it is known."""
        room = self.rooms.get(number)
        if room is None:
            return None
        room.released[rank] = at_ns
        self._forget(room, rank)
        return room

    def died(self, rank: str, at_ns: int) -> None:
        """A rank's process is gone, and with it whatever it had."""
        for room in self.open:
            if rank in room.ranks:
                if rank not in room.ends:
                    self._note_end(room, rank, at_ns)
                self._forget(room, rank)

    def disturb(self, disturbance: Disturbance) -> Disturbance:
        """Something is done to a rank."""
        self.disturbances.append(disturbance)
        return disturbance

    def stray(self, rank: str, mismatch: Mismatch, at_ns: int) -> None:
        """Something was written to a free page."""
        self.corrupt.append(Corruption(rank, mismatch, at_ns))

    # ---- findings -----------------------------------------------------------------------------------------------

    def overdue(self, now_ns: int) -> list[Room]:
        """Rooms newly found to hang at a rank: it lives, was not paused, and should have ended or released them."""
        found = []
        for room in self.open:
            held = self._held_up_ns(room, now_ns)
            if now_ns - room.opened_ns - held <= self._patience_ns:
                continue
            hanging = room.expects - room.hung
            if hanging and not self._paused_now(room):
                if not room.hung:
                    self.hung.append(room)
                room.hung |= hanging
                found.append(room)
        return found

    def explains(self, room: Room) -> bool:
        """Whether something that was done explains that a room failed."""
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

    def _held_up_ns(self, room: Room, now_ns: int) -> int:
        """Time of a room's life in which one of its ranks was paused."""
        held = 0
        for each in self.disturbances:
            if each.kind == "pause" and each.concerns(room):
                held += max(0, (each.until_ns or now_ns) - max(each.from_ns, room.opened_ns))
        return held

    def _paused_now(self, room: Room) -> bool:
        return any(each.kind == "pause" and each.until_ns is None and each.concerns(room) for each in self.disturbances)

    def _note_end(self, room: Room, rank: str, end: End | int) -> None:
        """A room has ended at a rank, or the rank has."""
        if isinstance(end, End):
            room.ends[rank] = end
        else:
            room.died[rank] = end
        over = room.ends.keys() | room.died.keys()
        if rank in room.decode and over.issuperset(room.decode):
            self.in_flight[room.decode_dp] -= 1

    # ---- the end of a room --------------------------------------------------------------------------------------

    def _forget(self, room: Room, rank: str) -> None:
        """A rank has nothing of a room any more."""
        if rank not in room.expects:
            return
        room.expects.discard(rank)
        if room.expects:
            return
        del self._open[room.number]
        if room.succeeded:
            self.done += 1
            self.delivered_bytes += (room.tokens - room.prefix_tokens) * self._bytes_of_token
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


def names(rooms: Collection[Room], most: int = 8) -> str:
    """Numbers of rooms and who still has them, in words."""
    listed = sorted(rooms, key=lambda room: room.number)[:most]
    words = [f"{room.number} ({', '.join(sorted(room.expects)) or 'nobody'})" for room in listed]
    more = f" and {len(rooms) - most} more" if len(rooms) > most else ""
    return ", ".join(words) + more
