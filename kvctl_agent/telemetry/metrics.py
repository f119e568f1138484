"""Counters, gauges and histograms of the declared metrics, cheap enough to update for every part.

`counter[key] += 1` reads and writes in separate bytecodes, so two threads that share a dict lose counts. Each thread
therefore counts in its own shard, and `snapshot` adds up the shards. The next snapshot merges the shard of a thread
that has ended into a common shard, so that shards do not accumulate. Gauges are last-write-wins and need no shard.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

from kvctl_agent.contract.metrics import METRICS_BY_NAME, Metric
from kvctl_agent.contract.snapshots import MetricFamily, MetricSample

_Key = tuple[str, tuple[str, ...]]
Sample = tuple[str, float, tuple[str, ...]]
"""Name of a metric, value, and values of its labels."""

OTHER = "other"
_MOST_SERIES = 1024  # peers supply the values of some labels and must not be able to exhaust the memory


class _Histogram:
    """Observations of one thread: a count per bucket (the last bucket has no upper bound), and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds: Final = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def merge(self, other: _Histogram) -> None:
        for bucket, count in enumerate(other.counts):
            self.counts[bucket] += count
        self.sum += other.sum


class _Shard:
    """Counters and histograms of one thread."""

    __slots__ = ("counters", "histograms", "owner")

    def __init__(self, owner: threading.Thread | None) -> None:
        self.owner = owner
        self.counters: dict[_Key, float] = {}
        self.histograms: dict[_Key, _Histogram] = {}

    def merge(self, other: _Shard) -> None:
        for key, value in other.counters.copy().items():
            self.counters[key] = self.counters.get(key, 0) + value
        for key, histogram in other.histograms.copy().items():
            total = self.histograms.get(key)
            if total is None:
                total = self.histograms[key] = _Histogram(histogram.bounds)
            total.merge(histogram)


class _Local(threading.local):
    shard: _Shard | None = None


class Metrics:
    """Values of the declared metrics.

    An undeclared name raises KeyError; a wrong kind, number of labels or sign raises ValueError. Both are programming
    errors that the first execution of the line reveals.
    """

    def __init__(self, declared: Mapping[str, Metric] = METRICS_BY_NAME) -> None:
        self._declared = declared
        self._local = _Local()
        self._register = threading.Lock()  # guards the list of shards; taken once per thread and once per snapshot
        self._shards: list[_Shard] = []
        self._ended = _Shard(None)
        self._gauges: dict[_Key, float | None] = {}

    def add(self, name: str, value: float, *labels: str) -> None:
        """Adds `value` >= 0 to a counter."""
        if value < 0:
            raise ValueError(f"counter {name} cannot go down (by {value})")
        counters = (self._local.shard or self._new_shard()).counters
        key = (name, labels)
        try:
            counters[key] += value
        except KeyError:
            self._check("counter", name, labels)
            if len(counters) >= _MOST_SERIES:
                key = (name, (OTHER,) * len(labels))
            counters[key] = counters.get(key, 0) + value

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """Sets a gauge; None means that the value is unknown."""
        key = (name, labels)
        if key not in self._gauges:
            self._check("gauge", name, labels)
        self._gauges[key] = value

    def observe(self, name: str, value_seconds: float, *labels: str) -> None:
        """Counts one observation of a histogram, in seconds; a negative one counts as zero.

        The difference of two times measured by different threads may be slightly negative, which is no error.
        """
        value_seconds = max(0.0, value_seconds)
        histograms = (self._local.shard or self._new_shard()).histograms
        key = (name, labels)
        histogram = histograms.get(key)
        if histogram is None:
            bounds = self._check("histogram", name, labels).buckets
            histogram = histograms[key] = _Histogram(bounds)
        histogram.counts[bisect_left(histogram.bounds, value_seconds)] += 1
        histogram.sum += value_seconds

    def update(self, counts: Iterable[Sample], durations: Iterable[Sample] = ()) -> None:
        """Adds to several counters, and observes several histograms, in one call."""
        for name, value, labels in counts:
            self.add(name, value, *labels)
        for name, value, labels in durations:
            self.observe(name, value, *labels)

    def total(self, name: str, *labels: str) -> float:
        """Returns the value of a counter for the given labels; without labels, the sum over all label values."""
        totals = self.totals(name)
        if labels:
            self._check("counter", name, labels)
            return totals.get(labels, 0)
        return sum(totals.values())

    def totals(self, name: str) -> dict[tuple[str, ...], float]:
        """Returns the values of a counter by label values; only those that were counted."""
        declared = self._declared[name]
        if declared.kind != "counter":
            raise ValueError(f"{name} is a {declared.kind}, not a counter")
        counters = self._sum().counters
        return {labels: value for (counter, labels), value in counters.items() if counter == name}

    def snapshot(self) -> list[MetricFamily]:
        """Returns all declared families in order of declaration; resets nothing.

        A counter without labels that was never incremented is 0; other metrics without a value have no samples.
        """
        total = self._sum()
        samples: dict[str, list[MetricSample]] = {name: [] for name in self._declared}
        for (name, labels), value in sorted(total.counters.items()):
            samples[name].append({"labels": self._labels(name, labels), "value": value})
        gauges = self._gauges.copy()
        for name, labels in sorted(gauges):
            samples[name].append({"labels": self._labels(name, labels), "value": gauges[name, labels]})
        for name, labels in sorted(total.histograms):
            samples[name].append(self._histogram_sample(name, labels, total.histograms[name, labels]))
        for metric in self._declared.values():
            if metric.kind == "counter" and not metric.labels and not samples[metric.name]:
                samples[metric.name].append({"labels": {}, "value": 0})
        return [
            {"name": metric.name, "kind": metric.kind, "unit": metric.unit, "help": metric.help, "samples": found}
            for metric, found in zip(self._declared.values(), samples.values(), strict=True)
        ]

    def _new_shard(self) -> _Shard:
        shard = _Shard(threading.current_thread())
        with self._register:
            self._shards.append(shard)
        self._local.shard = shard
        return shard

    def _sum(self) -> _Shard:
        total = _Shard(None)
        with self._register:
            for shard in [shard for shard in self._shards if shard.owner and not shard.owner.is_alive()]:
                self._ended.merge(shard)
                self._shards.remove(shard)
            total.merge(self._ended)
            for shard in self._shards:
                total.merge(shard)
        return total

    def _check(self, kind: str, name: str, labels: tuple[str, ...]) -> Metric:
        metric = self._declared.get(name)
        if metric is None:
            raise KeyError(f"metric {name!r} is not declared in contract/metrics.py")
        if metric.kind != kind:
            raise ValueError(f"metric {name} is a {metric.kind}, not a {kind}")
        if len(labels) != len(metric.labels):
            raise ValueError(f"metric {name} takes labels {metric.labels}, got {labels}")
        return metric

    def _labels(self, name: str, values: tuple[str, ...]) -> dict[str, str]:
        return dict(zip(self._declared[name].labels, map(str, values), strict=True))

    def _histogram_sample(self, name: str, labels: tuple[str, ...], histogram: _Histogram) -> MetricSample:
        buckets: list[list[float | None]] = []
        cumulative = 0
        for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
            cumulative += count
            buckets.append([None if bound == math.inf else bound, cumulative])
        return {
            "labels": self._labels(name, labels),
            "value": None,
            "buckets": buckets,
            "sum": histogram.sum,
            "count": cumulative,
        }
