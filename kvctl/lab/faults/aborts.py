"""Rooms given up at random moments: which ones, by which of their ranks, and when.

All ranks throw the same dice for a room, so that exactly one of them gives it up without a word to the others. When is
a share of how long rooms take on that rank, so that most aborts meet a room that is under way, in any of its states;
some come too late, and change nothing.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from kvctl.lab.ranks.bench_messages import Room, Start
from kvctl.lab.ranks.content import own_coord, own_side
from kvctl_agent.runtime.handles import Handle

ABORTED = "given up by --faults abort"
"""What a room that was given up says of it."""

_FIRST_GUESS_NS = 50_000_000


class _Doomed(NamedTuple):
    handle: Handle
    began_ns: int
    share: float  # of the time that a room takes


class Aborts:
    """Those of one rank in one run."""

    def __init__(self, start: Start, share: float) -> None:
        """Of all rooms, this share is given up by one rank or another."""
        self._seed = start.seed
        self._share = share
        self._side = start.role
        side, at = own_side(start), own_coord(start)
        self._members = side.pp * side.cp * side.tp
        self._member = (at.pp * side.cp + at.cp) * side.tp + at.tp
        self._doomed: dict[int, _Doomed] = {}
        self._began: dict[int, int] = {}
        self._taken_ns = self._finished = 0

    def begin(self, room: Room, handle: Handle, now_ns: int) -> None:
        """A room is under way on this rank."""
        if not self._share:
            return
        self._began[room.number] = now_ns
        dice = Random(f"{self._seed} abort {room.index}")
        if dice.random() >= self._share or dice.choice(("prefill", "decode")) != self._side:
            return
        if int(dice.random() * self._members) == self._member:
            self._doomed[room.number] = _Doomed(handle, now_ns, dice.random())

    def over(self, number: int, now_ns: int) -> None:
        """A room has ended here, however."""
        self._doomed.pop(number, None)
        began_ns = self._began.pop(number, None)
        if began_ns is not None:
            self._taken_ns += now_ns - began_ns
            self._finished += 1

    @property
    def next_ns(self) -> int | None:
        """When the next room is to be given up, None where none is."""
        return min(map(self._due_ns, self._doomed.values()), default=None)

    def strike(self, now_ns: int) -> None:
        """Give up what is due."""
        if self._doomed:
            for number, doomed in list(self._doomed.items()):
                if self._due_ns(doomed) <= now_ns:
                    del self._doomed[number]
                    doomed.handle.abort(ABORTED)

    def _due_ns(self, doomed: _Doomed) -> int:
        typical_ns = self._taken_ns // self._finished if self._finished else _FIRST_GUESS_NS
        return doomed.began_ns + round(doomed.share * typical_ns)
