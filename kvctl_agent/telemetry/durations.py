"""Durations: their distribution and union, the latencies of rooms, and waits for the interpreter."""

from __future__ import annotations

from array import array
from collections import deque

from kvctl_agent import gil
from kvctl_agent.contract.snapshots import LatencySummary
from kvctl_agent.contract.values import nearest_rank

INTERPRETER_WINDOW_NS = 10_000_000_000
"""Time spent in waits after which `InterpreterWaits` computes its figure anew."""

_MOST_NOTED = 64
_MIN_WAITS = 20
_SLICE_BITS = 4
_SLICES = 1 << _SLICE_BITS
_TOP_BIT = 40  # 2**40 ns are 18 minutes; longer durations count as 18 minutes
_BUCKETS = (_TOP_BIT - _SLICE_BITS + 1) * _SLICES


class LogHistogram:
    """Histogram of durations in ns whose quantiles are accurate to 3 %; 5 KB, and one array increment per value.

    The buckets are log-linear: each power of two is divided into 16 equal slices, so the leading bits of a value are
    the index of its bucket. Storing all samples would be exact but needs too much memory per (layer group, path,
    stage). One thread at a time may call `add`; any thread may call `quantiles`.
    """

    __slots__ = ("_counts", "count")

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * _BUCKETS))
        self.count = 0

    def add(self, duration_ns: int) -> None:
        """Counts one duration; a negative duration counts as zero."""
        if duration_ns < _SLICES:
            bucket = max(duration_ns, 0)
        else:
            shift = duration_ns.bit_length() - 1 - _SLICE_BITS
            # The leading bit is implied by the power of two, so only the slice bits remain.
            bucket = min((shift << _SLICE_BITS) + (duration_ns >> shift), _BUCKETS - 1)
        self._counts[bucket] += 1
        self.count += 1

    def quantiles(self, *wanted: float) -> list[int | None]:
        """Returns the duration in ns at each quantile (0 to 1, ascending), accurate to 1/32; None if empty."""
        counts = self._counts[:]
        total = sum(counts)
        if not total:
            return [None] * len(wanted)
        durations: list[int | None] = []
        cumulative, bucket = 0, -1
        for quantile in wanted:
            rank = max(1, -int(-quantile * total // 1))
            while cumulative < rank:
                bucket += 1
                cumulative += counts[bucket]
            durations.append(_middle(bucket))
        return durations

    def summary(self) -> LatencySummary:
        """Returns some quantiles, and the number of durations."""
        p50, p90, p99 = self.quantiles(0.50, 0.90, 0.99)
        return {"p50_ns": p50, "p90_ns": p90, "p99_ns": p99, "count": self.count}


def _middle(bucket: int) -> int:
    """Returns the midpoint, in ns, of the range of bucket number `bucket`."""
    if bucket < 2 * _SLICES:
        return bucket
    shift = (bucket >> _SLICE_BITS) - 1
    low = (bucket - (shift << _SLICE_BITS)) << shift
    return low + (1 << shift) // 2


class BusyTime:
    """Union of time intervals in monotonic ns."""

    __slots__ = ("_spans",)

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def add(self, start: int, end: int) -> None:
        """Adds the interval from `start` to `end`; fast if intervals are added roughly in order of time."""
        spans = self._spans
        index = len(spans)
        later: list[tuple[int, int]] = []
        while index and spans[index - 1][1] >= start:
            index -= 1
            first, last = spans[index]
            if first > end:
                later.insert(0, spans[index])
            else:
                start, end = min(start, first), max(end, last)
        spans[index:] = [(start, end), *later]

    def __len__(self) -> int:
        return len(self._spans)

    def split(self, moment: int) -> tuple[int, int]:
        """Returns the total length of the union before and after the time `moment`, in ns."""
        before = after = 0
        for start, end in self._spans:
            before += max(0, min(end, moment) - start)
            after += max(0, end - max(start, moment))
        return before, after


class InterpreterWaits:
    """Measures how long the agent's loop waits for the Python interpreter (the GIL) after each timed wait.

    A timed wait ends late if the kernel has no core for the thread, or if another thread runs Python: it gives the
    interpreter up after `sys.getswitchinterval()`, by default 5 ms. The kernel counts the time without a core; the rest
    is the interpreter. One thread alone calls `note`; any thread reads `wait_ns`.

    Attributes:
        wait_ns: mean of the latest complete window; None if too few of its waits reached their time limit.
    """

    def __init__(self) -> None:
        self.wait_ns: float | None = None
        self._late = LogHistogram()
        self._late_ns = self._waited_ns = 0
        self._noted: list[tuple[int, int]] = []  # waits that are not counted yet: time limit and duration
        self._no_core_ns: int | None = None

    def note(self, asked_ns: int, took_ns: int) -> bool:
        """Notes a wait with a time limit of `asked_ns` that took `took_ns`; one that ended early shows nothing.

        Returns:
            whether that ended a window.
        """
        if self._no_core_ns is None:
            self._no_core_ns = gil.no_core_ns()
        self._waited_ns += min(asked_ns, took_ns)  # a stop of the whole process does not end the window
        self._noted.append((asked_ns, took_ns))
        ended = self._waited_ns >= INTERPRETER_WINDOW_NS
        if ended or len(self._noted) >= _MOST_NOTED:
            self._count()
        if ended:
            self._end_window(self._no_core_ns)
        return ended

    def _count(self) -> None:
        for asked_ns, took_ns in self._noted:
            if took_ns >= asked_ns > 0:
                self._late.add(took_ns - asked_ns)
                self._late_ns += took_ns - asked_ns
        self._noted.clear()

    def _end_window(self, no_core_before_ns: int) -> None:
        self._no_core_ns = gil.no_core_ns()
        if self._late.count < _MIN_WAITS:
            self.wait_ns = None
        else:
            late_ns = max(0, self._late_ns - (self._no_core_ns - no_core_before_ns))
            # A single long stop of the whole process raises the mean, but not the quantile.
            self.wait_ns = min(late_ns / self._late.count, self._late.quantiles(0.9)[0] or 0)
        self._late, self._late_ns, self._waited_ns = LogHistogram(), 0, 0


class Latencies:
    """Exact quantiles of the last `keep` room latencies; the reported count includes all earlier latencies."""

    def __init__(self, keep: int = 1024) -> None:
        self._latest: deque[int] = deque(maxlen=keep)
        self._count = 0
        self._summary: LatencySummary = {"p50_ns": None, "p90_ns": None, "p99_ns": None, "count": 0}

    def add(self, latency_ns: int) -> None:
        """Adds one latency; one thread at a time may call this method."""
        self._count += 1
        self._latest.append(latency_ns)

    def summary(self) -> LatencySummary:
        """Returns the quantiles in ns, by nearest rank (None before the first latency), and the number of latencies."""
        if self._summary["count"] != (count := self._count):
            # Sorted here, in 0.1 ms: to keep them in order would cost each room 2 µs.
            kept = sorted(self._latest)
            p50, p90, p99 = (nearest_rank(kept, share) for share in (0.50, 0.90, 0.99))
            self._summary = {"p50_ns": p50, "p90_ns": p90, "p99_ns": p99, "count": count}
        return self._summary
