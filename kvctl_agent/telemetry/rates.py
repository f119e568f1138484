"""Throughput and latency as operators mean them.

Throughput is bytes over the wall-clock *union* of the transfer spans: summing spans that overlap would divide the
rate by the concurrency. A window without a transfer has no rate (None), not a rate of zero.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from kvctl_agent.contract.snapshots import LatencySummary, RateWindow

_Stretch = tuple[int, int, float]
"""Start and end of a time in which something moved, and the bytes that moved in it."""


class SpanRate:
    """Transfer rate over the last `window_ns`.

    Spans that overlap are melted into one stretch as they come, so the memory is bounded by the gaps between
    transfers and not by their number. A stretch stops growing at 1/64 of the window, which keeps the window's left
    edge sharp; a span that reaches over an edge counts with its share.
    """

    def __init__(self, window_ns: int) -> None:
        self._window = window_ns
        self._grain = max(1, window_ns // 64)
        self._writers = threading.Lock()
        self._version = 0  # odd while the stretches are being changed; lets a reader notice and try again
        self._stretches: deque[_Stretch] = deque()
        self._rooms: deque[int] = deque()
        self._latest = 0

    def add(self, start: int, end: int, nbytes: int) -> None:
        """One transfer of `nbytes` from monotonic `start` to `end`; any order, any thread."""
        end = max(end, start + 1)
        with self._writers:
            self._version += 1
            self._melt(start, end, float(nbytes))
            self._prune(end)
            self._version += 1

    def room(self, at: int) -> None:
        """One room finished at monotonic `at`."""
        with self._writers:
            self._version += 1
            self._rooms.append(at)
            self._prune(at)
            self._version += 1

    def window(self, now: int) -> RateWindow:
        """Rate over the window that ends at monotonic `now`."""
        stretches, rooms = self._copy()
        since = now - self._window
        moved, busy = 0.0, 0
        for start, end, nbytes in stretches:
            inside = min(end, now) - max(start, since)
            if inside > 0:
                moved += nbytes * inside / (end - start)
                busy += inside
        finished = sum(since < at <= now for at in rooms)
        return {
            "window_ns": self._window,
            "bytes": round(moved),
            "gb_per_s": moved / busy if busy else None,  # bytes per ns are GB per s
            "rooms_per_s": finished * 1e9 / self._window if finished else None,
        }

    def _melt(self, start: int, end: int, nbytes: float) -> None:
        stretches = self._stretches
        later: list[_Stretch] = []
        while stretches and stretches[-1][1] >= start:
            last = stretches.pop()
            last_start, last_end, last_bytes = last
            if last_start > end:
                later.append(last)
                continue
            if last_start <= start and last_end - last_start >= self._grain:
                # Full: it keeps its share, the rest begins where it ends.
                share = nbytes * (min(end, last_end) - start) / (end - start)
                stretches.append((last_start, last_end, last_bytes + share))
                start, nbytes = last_end, nbytes - share
                break
            start, end, nbytes = min(start, last_start), max(end, last_end), nbytes + last_bytes
        if start < end:
            stretches.append((start, end, nbytes))
        stretches.extend(reversed(later))

    def _prune(self, moment: int) -> None:
        self._latest = max(self._latest, moment)
        since = self._latest - self._window
        while self._stretches and self._stretches[0][1] <= since:
            self._stretches.popleft()
        while self._rooms and self._rooms[0] <= since:
            self._rooms.popleft()

    def _copy(self) -> tuple[list[_Stretch], list[int]]:
        while True:
            version = self._version
            if version % 2 == 0:
                try:
                    copy = list(self._stretches), list(self._rooms)
                except RuntimeError:  # changed while we iterated
                    continue
                if version == self._version:
                    return copy
            time.sleep(0)  # let the writer finish


class Latencies:
    """The last `keep` latencies, summarised exactly; `count` counts all there ever were."""

    def __init__(self, keep: int = 1024) -> None:
        self._kept: deque[int] = deque(maxlen=keep)
        self._count = 0

    def add(self, latency_ns: int) -> None:
        """Adds one latency; belongs to one thread."""
        self._kept.append(latency_ns)
        self._count += 1

    def summary(self) -> LatencySummary:
        """Quantiles of the kept ones (nearest rank); None where there are none."""
        while True:
            try:
                kept = sorted(self._kept)
                break
            except RuntimeError:  # the owner appended while we iterated
                continue
        return {
            "p50_ns": nearest_rank(kept, 0.50),
            "p90_ns": nearest_rank(kept, 0.90),
            "p99_ns": nearest_rank(kept, 0.99),
            "count": self._count,
        }


def nearest_rank(ascending: list[int], quantile: float) -> int | None:
    """The smallest value that at least `quantile` of all values do not exceed; None for no values."""
    if not ascending:
        return None
    rank = -int(-quantile * len(ascending) // 1)  # ceiling
    return ascending[max(0, rank - 1)]
