"""Throughput over a time window, and latency quantiles.

Throughput is bytes divided by the wall-clock union of the transfer spans: dividing by the sum of overlapping spans
would divide the rate by the concurrency. A window without a transfer has no rate (None) instead of a rate of zero.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from kvctl_agent.contract.snapshots import LatencySummary, RateWindow

_Span = tuple[int, int, float]
"""Start and end of an interval with at least one transfer in progress, and the bytes transferred in it."""


class SpanRate:
    """Transfer rate over the last `window_ns`.

    Overlapping spans are merged when they are added, so the memory depends on the gaps between transfers and not on
    their number. A span stops growing at 1/64 of the window, which keeps the start of the window precise; of a span
    that crosses an end of the window, the proportional share of its bytes counts.
    """

    def __init__(self, window_ns: int) -> None:
        self._window = window_ns
        self._grain = max(1, window_ns // 64)
        self._writers = threading.Lock()
        self._version = 0  # odd while a writer changes the spans; a reader that notices it retries
        self._spans: deque[_Span] = deque()
        self._rooms: deque[int] = deque()
        self._latest = 0

    def add(self, start: int, end: int, nbytes: int) -> None:
        """Adds a transfer of `nbytes` from monotonic `start` to `end`; in any order, from any thread."""
        end = max(end, start + 1)
        with self._writers:
            self._version += 1
            self._merge(start, end, float(nbytes))
            self._prune(end)
            self._version += 1

    def room(self, at: int) -> None:
        """Counts a room that finished at monotonic `at`."""
        with self._writers:
            self._version += 1
            self._rooms.append(at)
            self._prune(at)
            self._version += 1

    def window(self, now: int) -> RateWindow:
        """Returns the rate over the window that ends at monotonic `now`."""
        spans, rooms = self._copy()
        since = now - self._window
        moved, busy = 0.0, 0
        for start, end, nbytes in spans:
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

    def _merge(self, start: int, end: int, nbytes: float) -> None:
        spans = self._spans
        later: list[_Span] = []
        while spans and spans[-1][1] >= start:
            last = spans.pop()
            last_start, last_end, last_bytes = last
            if last_start > end:
                later.append(last)
                continue
            if last_start <= start and last_end - last_start >= self._grain:
                # The last span has its maximum length: it gets its share of the bytes, the rest starts a new span.
                share = nbytes * (min(end, last_end) - start) / (end - start)
                spans.append((last_start, last_end, last_bytes + share))
                start, nbytes = last_end, nbytes - share
                break
            start, end, nbytes = min(start, last_start), max(end, last_end), nbytes + last_bytes
        if start < end:
            spans.append((start, end, nbytes))
        spans.extend(reversed(later))

    def _prune(self, moment: int) -> None:
        self._latest = max(self._latest, moment)
        since = self._latest - self._window
        while self._spans and self._spans[0][1] <= since:
            self._spans.popleft()
        while self._rooms and self._rooms[0] <= since:
            self._rooms.popleft()

    def _copy(self) -> tuple[list[_Span], list[int]]:
        while True:
            version = self._version
            if version % 2 == 0:
                try:
                    copy = list(self._spans), list(self._rooms)
                except RuntimeError:  # changed during the iteration
                    continue
                if version == self._version:
                    return copy
            time.sleep(0)  # let the writer finish


class Latencies:
    """Exact quantiles of the last `keep` latencies; `count` includes all earlier ones."""

    def __init__(self, keep: int = 1024) -> None:
        self._kept: deque[int] = deque(maxlen=keep)
        self._count = 0

    def add(self, latency_ns: int) -> None:
        """Adds one latency; only one thread may call it."""
        self._kept.append(latency_ns)
        self._count += 1

    def summary(self) -> LatencySummary:
        """Returns quantiles by nearest rank; None if there are no latencies."""
        while True:
            try:
                kept = sorted(self._kept)
                break
            except RuntimeError:  # a value was added during the iteration
                continue
        return {
            "p50_ns": nearest_rank(kept, 0.50),
            "p90_ns": nearest_rank(kept, 0.90),
            "p99_ns": nearest_rank(kept, 0.99),
            "count": self._count,
        }


def nearest_rank(ascending: list[int], quantile: float) -> int | None:
    """Returns the smallest value that at least the fraction `quantile` of all values do not exceed; None if empty."""
    if not ascending:
        return None
    rank = -int(-quantile * len(ascending) // 1)  # ceiling
    return ascending[max(0, rank - 1)]
