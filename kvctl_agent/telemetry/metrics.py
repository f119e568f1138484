"""Counters, gauges and histograms of the declared metrics, cheap enough for every part.

`counter[key] += 1` reads and writes in separate bytecodes: two threads on one dict lose counts. So each thread
counts in a shard of its own and `snapshot` adds the shards up. A thread that ended leaves its shard to the common
one at the next snapshot, so threads that come and go do not pile up. Gauges are last-write-wins and need no shard.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

from kvctl_agent.contract.metrics import METRICS_BY_NAME, Metric
from kvctl_agent.contract.snapshots import MetricFamily, MetricSample

_Key = tuple[str, tuple[str, ...]]

OTHER = "other"
_MOST_SERIES = 1024  # some labels are what a peer said: it must not be able to fill our memory with them


class _Histogram:
    """Observations of one thread: a count per bucket (the last one above every bound), and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds: Final = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def take(self, other: _Histogram) -> None:
        for place, count in enumerate(other.counts):
            self.counts[place] += count
        self.sum += other.sum


class _Shard:
    """What one thread counted."""

    __slots__ = ("counters", "histograms", "owner")

    def __init__(self, owner: threading.Thread | None) -> None:
        self.owner = owner
        self.counters: dict[_Key, float] = {}
        self.histograms: dict[_Key, _Histogram] = {}

    def take(self, other: _Shard) -> None:
        for key, value in other.counters.copy().items():
            self.counters[key] = self.counters.get(key, 0) + value
        for key, histogram in other.histograms.copy().items():
            mine = self.histograms.get(key)
            if mine is None:
                mine = self.histograms[key] = _Histogram(histogram.bounds)
            mine.take(histogram)


class _Local(threading.local):
    shard: _Shard | None = None


class Metrics:
    """Registry over the declared metrics.

    A name that is not declared raises KeyError; a wrong kind, label count or sign raises ValueError. Both are
    mistakes of our own code, found by the first call of the line.
    """

    def __init__(self, declared: Mapping[str, Metric] = METRICS_BY_NAME) -> None:
        self._declared = declared
        self._local = _Local()
        self._register = threading.Lock()  # guards the list of shards, taken once per thread and per snapshot
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
        """Sets a gauge; None means that the value is not known."""
        key = (name, labels)
        if key not in self._gauges:
            self._check("gauge", name, labels)
        self._gauges[key] = value

    def observe(self, name: str, value_seconds: float, *labels: str) -> None:
        """Counts one observation of a histogram, in seconds; below zero counts as zero.

        Two moments that different threads took may be a tick out of order: no reason to fail a transfer.
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

    def total(self, name: str, *labels: str) -> float:
        """Value of a counter: of one label set, or over all of them when no label is given."""
        totals = self.totals(name)
        if labels:
            self._check("counter", name, labels)
            return totals.get(labels, 0)
        return sum(totals.values())

    def totals(self, name: str) -> dict[tuple[str, ...], float]:
        """Values of a counter by label set; only those that were counted."""
        declared = self._declared[name]
        if declared.kind != "counter":
            raise ValueError(f"{name} is a {declared.kind}, not a counter")
        counters = self._sum().counters
        return {labels: value for (counter, labels), value in counters.items() if counter == name}

    def snapshot(self) -> list[MetricFamily]:
        """Every declared family, in the order of declaration; clears nothing.

        A counter without labels that was never touched is 0; whatever else was never touched has no sample.
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
                self._ended.take(shard)
                self._shards.remove(shard)
            total.take(self._ended)
            for shard in self._shards:
                total.take(shard)
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
        seen = 0
        for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
            seen += count
            buckets.append([None if bound == math.inf else bound, seen])
        return {
            "labels": self._labels(name, labels),
            "value": None,
            "buckets": buckets,
            "sum": histogram.sum,
            "count": seen,
        }
