"""Counters, gauges and histograms of the declared metrics, cheap enough to update for every part.

`counter[key] += 1` reads and writes in separate bytecodes, so two threads could lose counts: writers take the lock of
the metric for the few bytecodes of an update. Readers copy without it, so that no writer waits for a reader; nor for
one that first counts what was noted (`Telemetry.count_pending`), because that is counted in metrics of its own.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Final

from kvctl_agent.contract.metrics import METRICS_BY_NAME, Metric
from kvctl_agent.contract.snapshots import MetricFamily, MetricSample

Series = tuple[str, tuple[str, ...]]
"""Name of a metric, and values of its labels."""

Sample = tuple[str, float, tuple[str, ...]]
"""Name of a metric, value, and values of its labels."""

OTHER = "other"
_MOST_SERIES = 1024  # peers supply the values of some labels and must not be able to exhaust the memory


class _Histogram:
    """Observations of a histogram, in seconds: a count per bucket (the last has no upper bound), and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds: Final = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0


class _Locks(dict[str, threading.Lock]):
    """The locks of writers, by name of the metric."""

    def __missing__(self, name: str) -> threading.Lock:
        raise KeyError(f"metric {name!r} is not declared in contract/metrics.py")


class Metrics:
    """Values of the declared metrics.

    An undeclared name raises KeyError; a wrong kind, number of labels or sign raises ValueError. Both are programming
    errors that the first call reveals. Once there are 1024 series of counters, new label values count as "other".
    """

    def __init__(
        self, declared: Mapping[str, Metric] = METRICS_BY_NAME, before_reading: Callable[[], None] = lambda: None
    ) -> None:
        """Creates metrics without values; `before_reading` is called before any value is read, and may add to them."""
        self._declared = declared
        self._before_reading = before_reading
        self._locks = _Locks((name, threading.Lock()) for name in declared)
        self._new_series = threading.Lock()
        self._counters: dict[str, dict[tuple[str, ...], float]] = {}  # values by name and label values
        self._series = 0  # of counters
        self._histograms: dict[str, dict[tuple[str, ...], _Histogram]] = {}
        self._gauges: dict[Series, float | None] = {}

    def add(self, name: str, value: float, *labels: str) -> None:
        """Adds `value` >= 0 to a counter."""
        with self._locks[name]:
            self._add(name, value, labels)

    def observe(self, name: str, value_seconds: float, *labels: str) -> None:
        """Adds one observation, in seconds, to a histogram; a negative value counts as zero.

        The difference of two times measured by different threads may be slightly negative, which is no error.
        """
        with self._locks[name]:
            self._observe(name, (value_seconds,), labels)

    def update(self, counts: Mapping[Series, float], durations: Mapping[Series, Iterable[float]]) -> None:
        """Adds `counts` to counters, and `durations` (seconds) to histograms, as `add` and `observe`."""
        for (name, labels), value in counts.items():
            with self._locks[name]:
                self._add(name, value, labels)
        for (name, labels), values in durations.items():
            with self._locks[name]:
                self._observe(name, values, labels)

    def _add(self, name: str, value: float, labels: tuple[str, ...]) -> None:
        if value < 0:
            raise ValueError(f"counter {name} cannot go down (by {value})")
        try:
            self._counters[name][labels] += value
        except KeyError:
            self._check("counter", name, labels)
            with self._new_series:
                if self._series >= _MOST_SERIES:
                    labels = (OTHER,) * len(labels)
                values = self._counters.setdefault(name, {})
                self._series += labels not in values
            values[labels] = values.get(labels, 0) + value

    def _observe(self, name: str, values: Iterable[float], labels: tuple[str, ...]) -> None:
        try:
            histogram = self._histograms[name][labels]
        except KeyError:
            histogram = _Histogram(self._check("histogram", name, labels).buckets)
            self._histograms.setdefault(name, {})[labels] = histogram
        counts, bounds = histogram.counts, histogram.bounds
        for seconds in values:
            if seconds > 0:
                counts[bisect_left(bounds, seconds)] += 1
                histogram.sum += seconds
            else:
                counts[0] += 1

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """Sets a gauge; None means that the value is unknown."""
        key = (name, labels)
        if key not in self._gauges:
            self._check("gauge", name, labels)
        self._gauges[key] = value

    def total(self, name: str, *labels: str) -> float:
        """Returns the value of a counter for the given labels; without labels, the sum over all label values."""
        totals = self.totals(name)
        if labels:
            self._check("counter", name, labels)
            return totals.get(labels, 0)
        return sum(totals.values())

    def totals(self, name: str) -> dict[tuple[str, ...], float]:
        """Returns the values of a counter by label values, without those that were never incremented."""
        declared = self._declared[name]
        if declared.kind != "counter":
            raise ValueError(f"{name} is a {declared.kind}, not a counter")
        self._before_reading()
        return self.counted(name)

    def counted(self, name: str) -> dict[tuple[str, ...], float]:
        """As `totals`, but does not call `before_reading`: for threads that must not wait."""
        return self._counters.get(name, {}).copy()

    def snapshot(self) -> list[MetricFamily]:
        """Returns all declared metric families, in order of declaration, with their current values.

        A counter without labels that was never incremented is 0; other metrics without a value have no samples.
        """
        self._before_reading()
        samples: dict[str, list[MetricSample]] = {name: [] for name in self._declared}
        for name, values in self._counters.copy().items():
            for labels, value in sorted(values.copy().items()):
                samples[name].append({"labels": self._labels(name, labels), "value": value})
        gauges = self._gauges.copy()
        for name, labels in sorted(gauges):
            samples[name].append({"labels": self._labels(name, labels), "value": gauges[name, labels]})
        for name, histograms in self._histograms.copy().items():
            for labels, histogram in sorted(histograms.copy().items(), key=itemgetter(0)):
                samples[name].append(self._histogram_sample(name, labels, histogram))
        for metric in self._declared.values():
            if metric.kind == "counter" and not metric.labels and not samples[metric.name]:
                samples[metric.name].append({"labels": {}, "value": 0})
        return [
            {"name": metric.name, "kind": metric.kind, "unit": metric.unit, "help": metric.help, "samples": found}
            for metric, found in zip(self._declared.values(), samples.values(), strict=True)
        ]

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
        for bound, count in zip((*histogram.bounds, math.inf), histogram.counts[:], strict=True):
            cumulative += count
            buckets.append([None if bound == math.inf else bound, cumulative])
        return {
            "labels": self._labels(name, labels),
            "value": None,
            "buckets": buckets,
            "sum": histogram.sum,
            "count": cumulative,
        }
