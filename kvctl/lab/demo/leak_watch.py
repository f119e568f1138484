"""Looks for what a rank does not give back: memory, descriptors, threads, ring, pages, what it knows of rooms.

Everything but memory must be as it was once all rooms are over. Memory is judged by its slope over one life, fitted
by least squares over the second half of that life: in the first one pools are touched and bounded histories fill.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from kvctl.lab.demo.fleet import SteadyFleet
from kvctl.lab.ranks.group import Event
from kvctl.lab.ranks.messages import Tell, Usage

EVERY_S = 1.0
SWEEP_EVERY_S = 20.0
"""How often all free pages of every rank are searched."""

_LEAST_SAMPLES = 60  # at one a second
# What peers' new lives, engine's connections and an operator's look may add for good.
_SETTLING_S = 20.0
_SPARE_DESCRIPTORS = 16
_SPARE_THREADS = 4
# Mooncake cannot forget a peer: a writer keeps the sockets of its lanes to each life of a reader that has ended.
_LANES_KEPT = {"mooncake": 4}
# A megabyte every five minutes, where it has added up to more than an allocator's whims.
_MOST_SLOPE = 3500.0
_LEAST_GROWTH_BYTES = 24 << 20
_TOKEN = 0  # of answers that nobody waits for

_EMPTY = ("rooms", "records", "ring_used_bytes", "quarantined_bytes", "buffers_in_use")


@dataclass(slots=True)
class ProcessHistory:
    """Samples of one process.

    Attributes:
        settled: most descriptors and threads in its first while, in which it meets its peers; later ones are compared
            with these.
        rss: (seconds, bytes), of every sample.
        kept: descriptors that its engine is known to keep for peers that have ended.
    """

    incarnation: str
    first: Usage
    last: Usage
    settled: Counter[str] = field(default_factory=Counter)
    rss: list[tuple[float, int]] = field(default_factory=list)
    kept: int = 0

    def add(self, usage: Usage) -> None:
        """One more sample."""
        self.last = usage
        self.rss.append((usage["at_ns"] / 1e9, usage["rss_bytes"]))
        if usage["at_ns"] - self.first["at_ns"] <= _SETTLING_S * 1e9:
            self.settled |= Counter(fds=usage["fds"], threads=usage["threads"])

    @property
    def grown(self) -> Mapping[str, int]:
        """Descriptors and threads that it has more than when it had settled."""
        return {
            "fds": self.last["fds"] - self.settled["fds"],
            "threads": self.last["threads"] - self.settled["threads"],
        }

    @property
    def slope(self) -> float | None:
        """Bytes a second that its memory grows by in the second half; None: too short to tell."""
        return fitted_slope(self._second_half)

    @property
    def _second_half(self) -> list[tuple[float, int]]:
        if not self.rss:
            return []
        middle = (self.rss[0][0] + self.rss[-1][0]) / 2
        return [sample for sample in self.rss if sample[0] >= middle]

    @property
    def leaks(self) -> list[str]:
        """What grew by more than it may, in words."""
        words = []
        for name, spare in (("fds", _SPARE_DESCRIPTORS + self.kept), ("threads", _SPARE_THREADS)):
            if self.grown[name] > spare:
                words.append(f"{name} {self.settled[name]} -> {self.settled[name] + self.grown[name]}")
        slope = self.slope
        if slope is not None:
            seconds = (self.rss[-1][0] - self.rss[0][0]) / 2
            if slope > _MOST_SLOPE and slope * seconds > _LEAST_GROWTH_BYTES:
                words.append(f"memory grows by {slope / 1024:.1f} KiB/s")
        return words


class LeakWatch:
    """Asks every rank again and again what it holds."""

    def __init__(self, fleet: SteadyFleet) -> None:
        self._fleet = fleet
        self._asked_at = self._swept_at = time.monotonic()
        self.now: dict[str, Usage] = {}
        self.lives: dict[str, list[ProcessHistory]] = {name: [] for name in fleet.ranks}

    def turn(self) -> None:
        """Ask when it is time; answers come as events."""
        now = time.monotonic()
        if now - self._asked_at < EVERY_S:
            return
        self._asked_at = now
        sweep = now - self._swept_at >= SWEEP_EVERY_S
        if sweep:
            self._swept_at = now
        for name, rank in self._fleet.ranks.items():
            if rank.serving:
                self._fleet.tell(name, Tell(_TOKEN, sweep))

    def take(self, event: Event) -> None:
        """An event of the fleet."""
        if event.kind == "usage":
            self.add(event.rank, cast(Usage, event.data))
        elif event.kind == "died":
            self.now.pop(event.rank, None)
            self._died(event.rank)

    def _died(self, name: str) -> None:
        """A reader's end leaves its writers what their engine keeps of it."""
        if self._fleet.ranks[name].planned["role"] != "decode":
            return
        for other, lives in self.lives.items():
            if lives and self._fleet.ranks[other].planned["role"] == "prefill":
                lives[-1].kept += _LANES_KEPT.get(self._fleet.plan.transport, 0)

    def add(self, name: str, usage: Usage) -> None:
        """What a rank holds."""
        self.now[name] = usage
        lives, incarnation = self.lives[name], self._fleet.ranks[name].incarnation
        if not lives or lives[-1].incarnation != incarnation:
            lives.append(ProcessHistory(incarnation, usage, usage))
        lives[-1].add(usage)

    def leaks(self) -> dict[str, list[str]]:
        """What is left or has grown, by rank; asked when all rooms are over."""
        found = {}
        for name, usage in self.now.items():
            held = cast(Mapping[str, int], usage)
            words = [f"{what} {held[what]}" for what in _EMPTY if held[what]]
            words += [word for life in self.lives[name] for word in life.leaks]
            if words:
                found[name] = words
        return found

    @property
    def clean(self) -> bool:
        """Whether nothing of any room is left anywhere, by the latest answers."""
        return not any(cast(Mapping[str, int], usage)[what] for usage in self.now.values() for what in _EMPTY)


def fitted_slope(samples: list[tuple[float, int]]) -> float | None:
    """Slope of the line through samples, by least squares; None where they are too few."""
    if len(samples) < _LEAST_SAMPLES:
        return None
    count = len(samples)
    mean_x, mean_y = sum(x for x, _ in samples) / count, sum(y for _, y in samples) / count
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    if not spread:
        return None
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread
