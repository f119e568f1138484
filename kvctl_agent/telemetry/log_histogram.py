"""Histogram of durations whose quantiles are accurate to 3 %; takes 5 KB, and one array increment per value.

The buckets are log-linear: each power of two is divided into 16 equal slices, so the leading bits of a value are the
index of its bucket. Storing and sorting samples would be exact but needs memory per (layer group, path, stage).
"""

from __future__ import annotations

from array import array

_SLICE_BITS = 4
_SLICES = 1 << _SLICE_BITS
_TOP_BIT = 40  # 2**40 ns are 18 minutes; longer durations count as 18 minutes
_BUCKETS = (_TOP_BIT - _SLICE_BITS + 1) * _SLICES


class LogHistogram:
    """Durations in ns; one thread at a time adds, any thread reads."""

    __slots__ = ("_counts", "count")

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * _BUCKETS))
        self.count = 0

    def add(self, duration_ns: int) -> None:
        """Counts one duration; a negative one counts as zero."""
        if duration_ns < _SLICES:
            bucket = max(duration_ns, 0)
        else:
            shift = duration_ns.bit_length() - 1 - _SLICE_BITS
            # The leading bit is implied by the power of two, so only the slice bits remain.
            bucket = min((shift << _SLICE_BITS) + (duration_ns >> shift), _BUCKETS - 1)
        self._counts[bucket] += 1
        self.count += 1

    def quantiles(self, *wanted: float) -> list[int | None]:
        """Returns the duration at each quantile (ascending, 0 to 1), within 1/32 of the true one; None if empty."""
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


def _middle(bucket: int) -> int:
    """Returns the midpoint of the durations in `bucket`."""
    if bucket < 2 * _SLICES:
        return bucket
    shift = (bucket >> _SLICE_BITS) - 1
    low = (bucket - (shift << _SLICE_BITS)) << shift
    return low + (1 << shift) // 2
