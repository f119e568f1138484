"""Records the result of every room at every rank, and decides whether a failure is explained by a disturbance.

A room counts as hung if it has not ended at a running rank after a certain time, not counting time in which one of its
ranks was paused. A failure is expected if the room was aborted, or if one of its ranks was disturbed (killed,
paused, given a fault) while the room was open; any other failure is a finding.
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
    """State of one room at all its ranks. All times are monotonic nanoseconds.

    Attributes:
        prefill: names of the prefill ranks that the router sent the room to, those of one dp group.
        decode: names of the decode ranks, those of one dp group.
        ranks: names of all ranks that know the room: the whole prefill instance and the decode ranks.
        aborted: whether the command to abort the room was sent to a rank.
        expects: ranks that have not reported yet that the room's pages are free.
        ends: end of the room as reported by each rank, by rank name.
        released: time at which the room's pages became free, by rank name.
        died: time of exit of each rank whose process exited before the room ended there, by rank name.
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
        """Whether the room has ended and its pages are free at every rank that still runs."""
        return not self.expects

    @property
    def succeeded(self) -> bool:
        """Whether the room has succeeded at every decode rank."""
        return all(name in self.ends and self.ends[name]["state"] == SUCCESS for name in self.decode)

    @property
    def failed(self) -> bool:
        """Whether the room has failed at a rank, or one of its ranks has died."""
        return bool(self.died) or any(end["state"] != SUCCESS for end in self.ends.values())

    @property
    def first_cause(self) -> Failure | None:
        """The earliest failure cause that a rank reported; None if there is none."""
        causes = [end["cause"] for end in self.ends.values() if end["cause"] is not None]
        return min(causes, key=lambda cause: cause["at_ns"], default=None)

    @property
    def ended_ns(self) -> int:
        """Time of the latest end of the room at a rank, or exit of a rank, so far."""
        return max([self.opened_ns, *(end["at_ns"] for end in self.ends.values()), *self.died.values()])


@dataclass(slots=True)
class Disturbance:
    """A kill, pause, fault or other event that may make rooms fail.

    Attributes:
        kind: "kill", "pause", "replace", "fault", "died", "starved" (no CPU time) or "scenario".
        rank: name of the disturbed rank; None: all ranks.
        from_ns, until_ns: start and end; `until_ns` is None while the disturbance lasts.
        codes: failure codes that the disturbance explains; empty: all codes.
        before_ns: rooms opened at or after this time are not affected, because another process has replaced the
            disturbed one; None: all rooms are affected.
    """

    kind: str
    rank: str | None
    from_ns: int
    until_ns: int | None = None
    codes: tuple[str, ...] = ()
    before_ns: int | None = None

    def concerns(self, room: LiveRoom) -> bool:
        """Whether the disturbed process takes part in the room."""
        return (self.rank is None or self.rank in room.ranks) and (
            self.before_ns is None or room.opened_ns < self.before_ns
        )


class Corruption(NamedTuple):
    """Wrong bytes in a received room, or a stray write to a free page, found at a decode rank."""

    rank: str
    mismatch: Mismatch
    at_ns: int


class RoomAccounting:
    """Records all rooms of one fleet and classifies their results.

    Attributes:
        rooms: rooms by number: all that are not over, and the latest `_KEPT_ROOMS` of those that are.
        unexpected: failed rooms that no disturbance explains.
        done, failed: number of rooms that are over and have succeeded or failed.
        expected: number of failed rooms that an abort or a disturbance explains.
        delivered_bytes: KV bytes of all rooms that have succeeded, compared or not.
        causes: number of failed rooms by the code of their first cause.
        in_flight: number of rooms, by decode dp group, that have not ended at all their decode ranks. A failed room
            whose pages a paused rank may still write to is not over, but is not in flight either.
    """

    def __init__(self, patience_s: float, grace_s: float, token_bytes: int) -> None:
        """Starts without rooms.

        Args:
            patience_s: time after its opening at which a room that has not ended counts as hung.
            grace_s: time after the end of a disturbance in which it still explains failures.
        """
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
        """Rooms that have not ended, or whose pages are not free, at some running rank."""
        return list(self._open.values())

    # ---- events -----------------------------------------------------------------------------------------------------

    def add(self, room: LiveRoom, ranks: Iterable[str]) -> None:
        """Records a new room; `ranks` are those of its ranks that are running and get the command to open it."""
        room.expects = set(ranks)
        self.rooms[room.number] = self._open[room.number] = room
        self.in_flight[room.decode_dp] += 1
        self.opened += 1
        for rank in room.ranks:
            if rank in room.decode and rank not in room.expects:
                self._note_end(room, rank, room.opened_ns)

    def ended(self, rank: str, ended: Ended) -> LiveRoom | None:
        """Records the end of a room at a rank.

        Returns:
            The room; None if it is unknown or its end at this rank was recorded before.
        """
        room = self.rooms.get(ended["room"])
        if room is None or rank in room.ends:
            return None
        self._note_end(room, rank, ended)
        self.verified_bytes += ended["verified_bytes"]
        if ended["mismatch"] is not None:
            self.corrupt.append(Corruption(rank, ended["mismatch"], ended["at_ns"]))
        return room

    def released(self, rank: str, number: int, at_ns: int) -> LiveRoom | None:
        """Records that a room's pages are free at a rank; returns the room, or None if it is unknown."""
        room = self.rooms.get(number)
        if room is None:
            return None
        room.released[rank] = at_ns
        self._finish(room, rank)
        return room

    def died(self, rank: str, at_ns: int) -> None:
        """Records the exit of a rank's process: all open rooms end at this rank and expect nothing more from it."""
        for room in self.open:
            if rank in room.ranks:
                if rank not in room.ends:
                    self._note_end(room, rank, at_ns)
                self._finish(room, rank)

    def disturb(self, disturbance: Disturbance) -> Disturbance:
        """Records a disturbance and returns it, so that the caller can set its end later."""
        self.disturbances.append(disturbance)
        return disturbance

    def stray(self, rank: str, mismatch: Mismatch, at_ns: int) -> None:
        """Records a stray write to a free page."""
        self.corrupt.append(Corruption(rank, mismatch, at_ns))

    # ---- findings ---------------------------------------------------------------------------------------------------

    def find_overdue(self, now_ns: int) -> list[LiveRoom]:
        """Returns the rooms newly found to hang at a rank and adds them to `hung`; skips rooms with a paused rank."""
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
        """Returns the time since the room was opened in which its ranks were paused, summed over the pauses."""
        paused = 0
        for each in self.disturbances:
            if each.kind == "pause" and each.concerns(room):
                paused += max(0, (each.until_ns or now_ns) - max(each.from_ns, room.opened_ns))
        return paused

    def _paused_now(self, room: LiveRoom) -> bool:
        return any(each.kind == "pause" and each.until_ns is None and each.concerns(room) for each in self.disturbances)

    def _note_end(self, room: LiveRoom, rank: str, end: Ended | int) -> None:
        """Records the end of a room at a rank; `end` is the rank's report, or the time at which the rank died."""
        if isinstance(end, int):
            room.died[rank] = end
        else:
            room.ends[rank] = end
        over = room.ends.keys() | room.died.keys()
        if rank in room.decode and over.issuperset(room.decode):
            self.in_flight[room.decode_dp] -= 1

    def _finish(self, room: LiveRoom, rank: str) -> None:
        """Removes a rank from `room.expects`; when none is left, the room is over and is counted by its result."""
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
    """Lists the first `most` rooms by number with the ranks that have not released them, and counts the others."""
    listed = sorted(rooms, key=lambda room: room.number)[:most]
    words = [f"{room.number} ({', '.join(sorted(room.expects)) or 'nobody'})" for room in listed]
    more = f" and {len(rooms) - most} more" if len(rooms) > most else ""
    return ", ".join(words) + more
