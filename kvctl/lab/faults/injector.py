"""Stores the faults in force in one agent, decides randomly when they fire, and counts how often each kind has fired.

Faults are set and cleared from any thread and queried on the agent's threads; the query for a kind that is not in force
costs one lookup. Every kind has its own random generator, so that with the same seed a kind affects the n-th frame or
write of an agent in the same way, whatever other faults are in force.
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
    """The faults in force in one agent."""

    def __init__(self, name: str, seed: int = 0) -> None:
        """Starts without faults; the agent's `name` and `seed` determine all random decisions."""
        self._name = name
        self._seed = seed
        self._generators: dict[str, random.Random] = {}
        self._in_force: dict[str, _InForce] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def set(self, fault: Fault, seconds: float | None = None) -> None:
        """Puts a fault in force; replaces a fault of the same kind.

        Args:
            seconds: duration; None: until the fault is cleared.

        Raises:
            ValueError: an agent cannot inject a fault of this kind into itself.
        """
        if fault.kind.level != "agent":
            raise ValueError(
                f"{fault.text}: an agent cannot inject this fault into itself, it is a fault of a {fault.kind.level}"
            )
        until = None if seconds is None else time.monotonic_ns() + round(seconds * 1e9)
        with self._lock:
            self._generators.setdefault(fault.name, random.Random(f"{self._seed} {self._name} {fault.name}"))
            self._in_force[fault.name] = _InForce(fault, until)

    def clear(self, name: str | None = None) -> None:
        """Ends the fault of this kind, or all faults if `name` is None; no effect if no such fault is in force."""
        with self._lock:
            for each in list(self._in_force) if name is None else [name]:
                self._in_force.pop(each, None)

    def active(self) -> list[str]:
        """Returns the specs of the faults in force."""
        return [fault.text for name in list(self._in_force) if (fault := self.find(name)) is not None]

    def counts(self) -> dict[str, int]:
        """Returns how often each kind of fault has fired so far, including kinds no longer in force."""
        with self._lock:
            return dict(self._counts)

    def find(self, name: str) -> Fault | None:
        """Returns the fault of this kind that is in force, or None."""
        entry = self._in_force.get(name)
        if entry is None or (entry.until_ns is not None and time.monotonic_ns() >= entry.until_ns):
            return None
        return entry.fault

    def ns(self, name: str) -> int:
        """Returns the value in nanoseconds of a fault of unit "time" or "jump"; 0 while it is not in force."""
        fault = self.find(name)
        return fault.ns if fault is not None else 0

    def messages(self, name: str) -> tuple[str, ...]:
        """Returns the message types of a fault of unit "messages"; none while it is not in force."""
        fault = self.find(name)
        return fault.messages if fault is not None else ()

    def should_fire(self, name: str) -> random.Random | None:
        """Decides randomly whether a fault of unit "share" fires now, and counts it if it does.

        Returns:
            The random generator of this kind, for further decisions, if the fault fires; otherwise None.
        """
        fault = self.find(name)
        if fault is None:
            return None
        generator = self._generators[name]
        if generator.random() >= fault.share:
            return None
        self.count(name)
        return generator

    def count(self, name: str) -> None:
        """Counts one firing of a kind of fault."""
        with self._lock:
            self._counts[name] += 1
