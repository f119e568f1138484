"""Which faults are in force in an agent, whether one should_fire now, and how often each has.

Set and cleared from any thread, asked on the threads that do the work; a kind that is not in force costs a lookup.
Every kind has its own dice, so that with the same seed the n-th frame or write of an agent meets the same fate whatever
else is in force.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import NamedTuple

from kvctl.lab.faults.specification import Fault


class _InForce(NamedTuple):
    fault: Fault
    until_ns: int | None


class FaultInjector:
    """The faults of one agent."""

    def __init__(self, name: str, seed: int = 0) -> None:
        """`name` and `seed` decide the dice."""
        self._name = name
        self._seed = seed
        self._dice: dict[str, random.Random] = {}
        self._in_force: dict[str, _InForce] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def set(self, fault: Fault, seconds: float | None = None) -> None:
        """Put a fault in force, in place of another of its kind.

        Args:
            seconds: it ends by itself after so long; None: when it is cleared.

        Raises:
            ValueError: the fault is none that an agent can make happen.
        """
        if fault.kind.level != "agent":
            raise ValueError(f"{fault.text}: no agent can do this to itself, it is a fault of a {fault.kind.level}")
        until = None if seconds is None else time.monotonic_ns() + round(seconds * 1e9)
        with self._lock:
            self._dice.setdefault(fault.name, random.Random(f"{self._seed} {self._name} {fault.name}"))
            self._in_force[fault.name] = _InForce(fault, until)

    def clear(self, name: str | None = None) -> None:
        """End a kind of fault, or all of them; one that is not in force is fine."""
        with self._lock:
            for each in list(self._in_force) if name is None else [name]:
                self._in_force.pop(each, None)

    def active(self) -> list[str]:
        """Specs of those in force."""
        return [fault.text for name in list(self._in_force) if (fault := self.find(name)) is not None]

    def counts(self) -> dict[str, int]:
        """How often each kind has struck so far, whether it still is in force or not."""
        with self._lock:
            return dict(self._counts)

    def find(self, name: str) -> Fault | None:
        """The fault of this kind that is in force, or None."""
        here = self._in_force.get(name)
        if here is None or (here.until_ns is not None and time.monotonic_ns() >= here.until_ns):
            return None
        return here.fault

    def ns(self, name: str) -> int:
        """Of a kind that is a time: how long, 0 while it is not in force."""
        fault = self.find(name)
        return fault.ns if fault is not None else 0

    def messages(self, name: str) -> tuple[str, ...]:
        """Of a kind that is about types of messages: which ones, none while it is not in force."""
        fault = self.find(name)
        return fault.messages if fault is not None else ()

    def should_fire(self, name: str) -> random.Random | None:
        """Of a kind that is a share: its dice where it should_fire this time, for whatever else is left to chance."""
        fault = self.find(name)
        if fault is None:
            return None
        dice = self._dice[name]
        if dice.random() >= fault.share:
            return None
        self.count(name)
        return dice

    def count(self, name: str) -> None:
        """It has struck once more."""
        with self._lock:
            self._counts[name] += 1
