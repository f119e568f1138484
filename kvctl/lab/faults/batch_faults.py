"""Rooms given up at random moments: which ones, by which of their ranks, and when.

All ranks throw the same dice for a room, so that exactly one of them gives it up without a word to the others. When is
a share of how long rooms take on that rank, so that most aborts meet a room that is under way, in any of its states;
some come too late, and change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from kvctl.lab.faults.injector import FaultInjector
from kvctl.lab.faults.specification import Fault
from kvctl.lab.ranks.content import own_coord, own_side
from kvctl.lab.ranks.messages import FaultReport, Room, Start
from kvctl_agent.agent import Agent
from kvctl_agent.contract.snapshots import Failure
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


_EMPTY_S = 10.0
_LOOK_S = 0.005


class FaultRun:
    """Faults of any level; those of an agent are in force from the beginning until `end`."""

    def __init__(self, agent: Agent, injected: FaultInjector, faults: Sequence[Fault]) -> None:
        """`injected` are the faults in force in `agent`; those of `faults` that an agent can have are set in it."""
        self._agent = agent
        self._injected = injected
        self._explained = {code for fault in faults for code in fault.kind.explains} - {"ABORTED"}
        self._kinds: dict[int, str] = {}
        self._before = injected.counts()
        for fault in faults:
            if fault.kind.level == "agent":
                injected.set(fault)

    def failed(self, index: int, failure: Failure | None) -> None:
        """A room has failed with this as its first cause."""
        if failure is None:
            return
        if failure["code"] == "ABORTED" and failure["text"] == ABORTED:
            self._kinds[index] = "aborted"
        elif failure["code"] in self._explained:
            self._kinds[index] = "fault"

    def end(self, failures: Mapping[int, str]) -> FaultReport:
        """End the faults and say what they did.

        Args:
            failures: causes of all rooms that failed, by index.
        """
        faults = self._injected
        faults.clear()
        struck = {name: count - self._before.get(name, 0) for name, count in faults.counts().items()}
        return FaultReport(
            explained=[[index, kind] for index, kind in self._kinds.items() if index in failures],
            struck={name: count for name, count in struck.items() if count},
            left=self._left(),
        )

    def _left(self) -> list[str]:
        """What this rank holds of rooms although none is left; waits a little for it to be nothing."""
        deadline = time.monotonic() + _EMPTY_S
        while (held := self._held()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return held

    def _held(self) -> list[str]:
        staging = self._agent.observe.staging()
        ring, buffers, gated = staging["ring"], staging["buffers"], staging["gated"]
        words = []
        if ring is not None and (ring["used_bytes"] or ring["allocations"]):
            words.append(f"{ring['used_bytes']} bytes of the ring in {len(ring['allocations'])} allocations")
        if buffers is not None and buffers["pieces_used"]:
            words.append(f"{buffers['pieces_used']} staging buffers")
        if gated:
            words.append(f"{len(gated)} parked parts")
        if open_rooms := self._agent.observe.statistics().open_rooms:
            words.append(f"{open_rooms} open rooms")
        return [f"{self._agent.name} still holds {what}" for what in words]
