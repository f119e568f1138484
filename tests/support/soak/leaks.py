"""Finds resource leaks of ranks: memory, file descriptors, threads, ring space, pages and room records.

All resources except memory must return to their initial value once all rooms are over. A memory leak is a growth within
one process, by a least-squares fit over the second half of the samples: during the first half, pools are touched for
the first time and bounded histories fill up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import cast

from kvctl.lab.ranks.messages import Usage

_MIN_SAMPLES = 60  # for a slope, at one sample per second
# Restarted peers, the engine's connections and an operator's queries may add descriptors and threads for good.
_SETTLING_S = 20.0
_SPARE = {"fds": 16, "threads": 4}
# A megabyte every five minutes, if it adds up to more than an allocator's fluctuations.
_MAX_SLOPE = 3500.0
_MIN_GROWTH_BYTES = 24 << 20
_MUST_BE_ZERO = ("rooms", "records", "ring_used_bytes", "quarantined_bytes", "buffers_in_use")


@dataclass
class ProcessHistory:
    """Resource usage of one process over time.

    Attributes:
        settled: maximum number of descriptors and threads during the first `_SETTLING_S`, while the process connects to
            its peers; later reports are compared with it.
        rss: resident memory as (seconds, bytes) of every report.
    """

    last: Usage
    settled: Counter[str] = field(default_factory=Counter)
    rss: list[tuple[float, int]] = field(default_factory=list)

    def add(self, usage: Usage) -> None:
        """Adds a usage report of the process."""
        self.last = usage
        self.rss.append((usage["at_ns"] / 1e9, usage["rss_bytes"]))
        if self.rss[-1][0] - self.rss[0][0] <= _SETTLING_S:
            self.settled |= Counter(fds=usage["fds"], threads=usage["threads"])

    @property
    def leaks(self) -> list[str]:
        """Descriptions of the resources that grew by more than the allowed amount."""
        now = {"fds": self.last["fds"], "threads": self.last["threads"]}
        words = [
            f"{name} {self.settled[name]} -> {now[name]}"
            for name, spare in _SPARE.items()
            if now[name] > self.settled[name] + spare
        ]
        seconds = (self.rss[-1][0] - self.rss[0][0]) / 2
        later = [sample for sample in self.rss if sample[0] >= self.rss[0][0] + seconds]
        if len(later) >= _MIN_SAMPLES:
            slope = linear_regression(*zip(*later, strict=True)).slope
            if slope > _MAX_SLOPE and slope * seconds > _MIN_GROWTH_BYTES:
                words.append(f"memory grows by {slope / 1024:.1f} KiB/s")
        return words


def held(usage: Usage) -> list[str]:
    """Returns the resources of rooms that a rank holds; none once all rooms are over."""
    reported = cast(Mapping[str, int], usage)
    return [f"{what} {reported[what]}" for what in _MUST_BE_ZERO if reported[what]]
