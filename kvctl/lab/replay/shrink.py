"""Shortens a sequence of inputs that violates an invariant by dropping whole rooms first, then single inputs.

The method is delta debugging (Zeller's ddmin): drop half of the inputs, then quarters, and so on, as long as the same
invariant is violated. Workers' reports about transfers that no longer happen are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from kvctl.lab.replay.formatting import rooms_of
from kvctl.lab.replay.player import Breach, play
from kvctl.lab.replay.recordings import Input, Start

_T = TypeVar("_T")


class Shrunk(NamedTuple):
    """A shortened sequence of inputs that violates an invariant.

    Attributes:
        start: state of the machine before the first input.
        breach: the violation.
        early: whether the time limit ended the search before every input had been tried.
        fresh: whether `start` is a new machine instead of the recorded checkpoint.
    """

    start: Start
    inputs: list[Input]
    breach: Breach
    early: bool
    fresh: bool


def shrink(start: Start, inputs: Sequence[Input], breach: Breach, budget_s: float) -> Shrunk:
    """Returns the shortest sequence of inputs found within `budget_s` seconds that violates the same invariant.

    Args:
        start: state of the machine before the first input.
        inputs: the inputs, up to the violation.
        breach: the violation.
        budget_s: time limit.
    """
    return _Shrinker(start, list(inputs), breach, time.monotonic() + budget_s).run()


class _Shrinker:
    """One search, with the shortest sequence of inputs found so far."""

    def __init__(self, start: Start, inputs: list[Input], breach: Breach, deadline: float) -> None:
        self._start = start
        self._inputs = inputs
        self._breach = breach
        self._wanted = _identity(breach)
        self._deadline = deadline
        self._early = False

    def run(self) -> Shrunk:
        fresh = self._start_fresh()
        rooms = sorted({room for item in self._inputs for room in rooms_of(item.event)})
        if self._breach.room is not None:  # the room of the violation alone usually suffices
            self._try([item for item in self._inputs if not (rooms_of(item.event) - {self._breach.room})])
        self._minimise(rooms, lambda kept: [i for i in self._inputs if rooms_of(i.event) <= set(kept)])
        before = 0
        while before != len(self._inputs) and not self._early:
            before = len(self._inputs)
            self._minimise(self._inputs, lambda kept: list(kept))
        fresh = fresh or self._start_fresh()
        self._inputs = [item for item in self._inputs if item.number <= self._breach.item.number]
        return Shrunk(self._start, self._inputs, self._breach, self._early, fresh)

    def _start_fresh(self) -> bool:
        """Replaces the checkpoint by a new machine if that violates the same invariant; returns whether it does."""
        return self._try(self._inputs, self._start._replace(checkpoint=self._start.checkpoint.fresh()))

    def _try(self, inputs: Sequence[Input], start: Start | None = None) -> bool:
        """Adopts these inputs, up to the violation, if they violate the same invariant; returns whether they do.

        The machine starts in the state `start`, or in the current one if it is None.
        """
        if time.monotonic() > self._deadline:
            self._early = True
            return False
        start = start or self._start
        played = play(start, inputs, feasible=True)
        if played.breach is None or _identity(played.breach) != self._wanted:
            return False
        self._start, self._inputs, self._breach = start, list(inputs[: played.inputs]), played.breach
        return True

    def _minimise(self, whole: Sequence[_T], inputs_of: Callable[[Sequence[_T]], list[Input]]) -> None:
        """Drops as many elements of `whole` as possible while the invariant stays violated.

        `inputs_of` returns the inputs that remain if only the given elements are kept.
        """
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


def _identity(breach: Breach) -> tuple[str, str]:
    """Returns what two violations must share to count as the same.

    That is the invariant and, for an exception, its type and the function that raised it.
    """
    if breach.invariant != "exception":
        return breach.invariant, ""
    return breach.invariant, breach.text.partition(":")[0] + breach.text.rpartition("(in ")[2]
