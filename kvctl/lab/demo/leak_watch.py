"""Detects resource leaks of ranks: memory, file descriptors, threads, ring space, pages and room records.

All resources except memory must return to their initial value once all rooms are over. A memory leak is detected by the
growth rate within one process, a least-squares fit over the second half of the samples: during the first half, pools
are touched for the first time and bounded histories fill up.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import cast

from kvctl.lab.demo.fleet import LiveFleet
from kvctl.lab.ranks.group import Event
from kvctl.lab.ranks.messages import Tell, Usage

INTERVAL_S = 1.0
SWEEP_INTERVAL_S = 20.0
"""Interval at which every rank searches its free pages for stray writes."""

_MIN_SAMPLES = 60  # for a slope, at one sample per second
# Restarted peers, the engine's connections and an operator's queries may add descriptors and threads for good.
_SETTLING_S = 20.0
_SPARE_DESCRIPTORS = 16
_SPARE_THREADS = 4
# A megabyte every five minutes, if it adds up to more than an allocator's fluctuations.
_MAX_SLOPE = 3500.0
_MIN_GROWTH_BYTES = 24 << 20
_TOKEN = 0  # token of periodic reports; `LiveFleet.usage` waits for reports with other tokens

_MUST_BE_ZERO = ("rooms", "records", "ring_used_bytes", "quarantined_bytes", "buffers_in_use")


@dataclass(slots=True)
class ProcessHistory:
    """Resource usage of one process over time.

    Attributes:
        incarnation: incarnation of the process's agent.
        first, last: first and latest report.
        settled: maximum number of descriptors and threads during the first `_SETTLING_S`, while the process connects to
            its peers; later reports are compared with it.
        rss: resident memory as (seconds, bytes) of every report.
    """

    incarnation: str
    first: Usage
    last: Usage
    settled: Counter[str] = field(default_factory=Counter)
    rss: list[tuple[float, int]] = field(default_factory=list)

    def add(self, usage: Usage) -> None:
        """Adds a usage report of the process."""
        self.last = usage
        self.rss.append((usage["at_ns"] / 1e9, usage["rss_bytes"]))
        if usage["at_ns"] - self.first["at_ns"] <= _SETTLING_S * 1e9:
            self.settled |= Counter(fds=usage["fds"], threads=usage["threads"])

    @property
    def grown(self) -> Mapping[str, int]:
        """Growth of the number of descriptors and threads over `settled`."""
        return {
            "fds": self.last["fds"] - self.settled["fds"],
            "threads": self.last["threads"] - self.settled["threads"],
        }

    @property
    def slope(self) -> float | None:
        """Growth of memory over the second half of the samples in bytes per second; None if samples are too few."""
        if not self.rss:
            return None
        middle = (self.rss[0][0] + self.rss[-1][0]) / 2
        later = [sample for sample in self.rss if sample[0] >= middle]
        return linear_regression(*zip(*later, strict=True)).slope if len(later) >= _MIN_SAMPLES else None

    @property
    def leaks(self) -> list[str]:
        """Descriptions of the resources that grew by more than the allowed amount."""
        words = []
        for name, spare in (("fds", _SPARE_DESCRIPTORS), ("threads", _SPARE_THREADS)):
            if self.grown[name] > spare:
                words.append(f"{name} {self.settled[name]} -> {self.settled[name] + self.grown[name]}")
        slope = self.slope
        if slope is not None:
            seconds = (self.rss[-1][0] - self.rss[0][0]) / 2
            if slope > _MAX_SLOPE and slope * seconds > _MIN_GROWTH_BYTES:
                words.append(f"memory grows by {slope / 1024:.1f} KiB/s")
        return words


class LeakWatch:
    """Requests the resource usage of every rank periodically and detects leaks.

    Attributes:
        now: latest usage report of each running rank, by name.
        lives: usage histories of the processes of each rank, the oldest process first, by rank name.
    """

    def __init__(self, fleet: LiveFleet) -> None:
        self._fleet = fleet
        self._asked_at = self._swept_at = time.monotonic()
        self.now: dict[str, Usage] = {}
        self.lives: dict[str, list[ProcessHistory]] = {name: [] for name in fleet.ranks}

    def turn(self) -> None:
        """Requests usage reports if `INTERVAL_S` has passed; the reports arrive as events of the fleet."""
        now = time.monotonic()
        if now - self._asked_at < INTERVAL_S:
            return
        self._asked_at = now
        sweep = now - self._swept_at >= SWEEP_INTERVAL_S
        if sweep:
            self._swept_at = now
        for name, rank in self._fleet.ranks.items():
            if rank.serving:
                self._fleet.send(name, Tell(_TOKEN, sweep))

    def take(self, event: Event) -> None:
        """Handles an event of the fleet: records usage reports and exits."""
        if event.kind == "usage":
            self.add(event.rank, cast(Usage, event.data))
        elif event.kind == "died":
            self.now.pop(event.rank, None)

    def add(self, name: str, usage: Usage) -> None:
        """Adds a usage report of a rank to the history of its current process."""
        self.now[name] = usage
        lives, incarnation = self.lives[name], self._fleet.ranks[name].incarnation
        if not lives or lives[-1].incarnation != incarnation:
            lives.append(ProcessHistory(incarnation, usage, usage))
        lives[-1].add(usage)

    def leaks(self) -> dict[str, list[str]]:
        """Returns descriptions of leaked resources by rank name; call it when all rooms are over."""
        found = {}
        for name, usage in self.now.items():
            held = cast(Mapping[str, int], usage)
            words = [f"{what} {held[what]}" for what in _MUST_BE_ZERO if held[what]]
            words += [word for life in self.lives[name] for word in life.leaks]
            if words:
                found[name] = words
        return found

    @property
    def clean(self) -> bool:
        """Whether no rank holds resources of any room, according to the latest reports."""
        return not any(cast(Mapping[str, int], usage)[what] for usage in self.now.values() for what in _MUST_BE_ZERO)
