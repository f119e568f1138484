"""Makes a trace that breaks an invariant as short as can be: without whole rooms first, then without single inputs.

Delta debugging (Zeller's ddmin): leave out half of what there is, then quarters, as long as the same invariant is
still broken. What our own workers could only say about orders that were left out goes with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvctl.lab.replay.formatting import rooms_of
from kvctl.lab.replay.inputs import Input, Start
from kvctl.lab.replay.player import Breach, play
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol import messages as msg

_T = TypeVar("_T")


class Shorter(NamedTuple):
    """A shorter trace and what it breaks; `early`: time was up before nothing more could be left out."""

    start: Start
    inputs: list[Input]
    breach: Breach
    early: bool
    fresh: bool  # it begins with a new machine


def shrink(start: Start, inputs: Sequence[Input], breach: Breach, budget_s: float) -> Shorter:
    """The shortest trace that was found within `budget_s` and breaks the same invariant in the same way."""
    return _Shrinking(start, list(inputs), breach, time.monotonic() + budget_s).run()


class _Shrinking:
    def __init__(self, start: Start, inputs: list[Input], breach: Breach, deadline: float) -> None:
        self._start = start
        self._inputs = inputs
        self._breach = breach
        self._wanted = _sort(breach)
        self._deadline = deadline
        self._early = False

    def run(self) -> Shorter:
        fresh = self._begin_fresh()
        rooms = sorted({room for item in self._inputs for room in rooms_of(item.event)})
        if self._breach.room is not None:  # most often it alone is enough
            self._try([item for item in self._inputs if not (rooms_of(item.event) - {self._breach.room})])
        self._minimise(rooms, lambda kept: [i for i in self._inputs if rooms_of(i.event) <= set(kept)])
        before = 0
        while before != len(self._inputs) and not self._early:
            before = len(self._inputs)
            self._minimise(self._inputs, lambda kept: list(kept))
        fresh = fresh or self._begin_fresh()
        self._forget_metadata()
        self._inputs = [item for item in self._inputs if item.number <= self._breach.item.number]
        return Shorter(self._start, self._inputs, self._breach, self._early, fresh)

    def _begin_fresh(self) -> bool:
        """Whether a new machine will do in place of the checkpoint."""
        checkpoint = self._start.checkpoint
        early_send = not checkpoint.state.get("holds_back", False)
        start = Start.fresh(checkpoint.local, checkpoint.timing, self._start.clock_offset_ns, early_send=early_send)
        return start.checkpoint == checkpoint or self._try(self._inputs, start)

    def _forget_metadata(self) -> None:
        """An engine's metadata is long, and no machine looks into it."""
        checkpoint = self._start.checkpoint
        local = msgspec.structs.replace(checkpoint.local, metadata=b"")
        start = self._start._replace(checkpoint=checkpoint._replace(local=local))
        self._try([item._replace(event=_bare(item.event)) for item in self._inputs], start)

    def _try(self, inputs: Sequence[Input], start: Start | None = None) -> bool:
        """Take these instead, if they break the same; what follows the breach goes."""
        if time.monotonic() > self._deadline:
            self._early = True
            return False
        start = start or self._start
        played = play(start, inputs, feasible=True)
        if played.breach is None or _sort(played.breach) != self._wanted:
            return False
        self._start, self._inputs, self._breach = start, list(inputs[: played.inputs]), played.breach
        return True

    def _minimise(self, whole: Sequence[_T], inputs_of: Callable[[Sequence[_T]], list[Input]]) -> None:
        """Leave out as many of `whole` as can be left out."""
        kept, parts = list(whole), 2
        while len(kept) > 1 and not self._early:
            size = -(-len(kept) // parts)
            for first in range(0, len(kept), size):
                without = kept[:first] + kept[first + size :]
                if self._try(inputs_of(without)):
                    kept, parts = without, max(parts - 1, 2)
                    break
                if self._early:
                    return
            else:
                if size == 1:
                    return
                parts = min(2 * parts, len(kept))


def _sort(breach: Breach) -> tuple[str, str]:
    """What makes two breaches the same: the invariant, and of an exception its kind and place."""
    if breach.invariant != "exception":
        return breach.invariant, ""
    return breach.invariant, breach.text.partition(":")[0] + breach.text.rpartition("(in ")[2]


def _bare(event: ev.Event) -> ev.Event:
    message: Any = getattr(event, "message", None)
    if isinstance(message, msg.Hello | msg.HelloAck) and message.who.metadata:
        who = msgspec.structs.replace(message.who, metadata=b"")
        return msgspec.structs.replace(event, message=msgspec.structs.replace(message, who=who))
    return event
