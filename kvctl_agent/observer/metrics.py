"""Metrics of one agent: its counters as in its region, and gauges, histograms and counters of the observer."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from operator import itemgetter
from typing import Final

from kvctl_agent.contract.metrics import METRICS_BY_NAME, Metric
from kvctl_agent.contract.snapshots import MetricFamily, MetricSample
from kvctl_agent.telemetry.metrics import Counters, Series
from kvctl_agent.telemetry.region import MOST_COUNTERS


class _Histogram:
    """Observations of a histogram, in seconds: a count per bucket (the last has no upper bound), and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds: Final = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0


class _OwnMemory:
    def __init__(self) -> None:
        self.counters = array("d", bytes(8 * MOST_COUNTERS))


class Metrics(Counters):
    """Values of the declared metrics; errors as for `Counters`.

    Attributes:
        written: counters of the agent; those that are added here are counted besides.
    """

    def __init__(self, declared: Mapping[str, Metric] = METRICS_BY_NAME) -> None:
        super().__init__(_OwnMemory(), declared)
        self.written: dict[Series, float] = {}
        self._histograms: dict[str, dict[tuple[str, ...], _Histogram]] = {}
        self._gauges: dict[Series, float | None] = {}

    def values(self) -> dict[Series, float]:
        found = self.written.copy()
        for series, value in super().values().items():
            found[series] = found.get(series, 0) + value
        return found

    def observe(self, name: str, value_seconds: float, *labels: str) -> None:
        """Adds one observation, in seconds, to a histogram; a negative value counts as zero.

        The difference of two times measured by different threads may be slightly negative, which is no error.
        """
        try:
            histogram = self._histograms[name][labels]
        except KeyError:
            histogram = _Histogram(self._check("histogram", name, labels).buckets)
            self._histograms.setdefault(name, {})[labels] = histogram
        if value_seconds > 0:
            histogram.counts[bisect_left(histogram.bounds, value_seconds)] += 1
            histogram.sum += value_seconds
        else:
            histogram.counts[0] += 1

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """Sets a gauge; None means that the value is unknown."""
        key = (name, labels)
        if key not in self._gauges:
            self._check("gauge", name, labels)
        self._gauges[key] = value

    def snapshot(self, only: Collection[str] = ()) -> list[MetricFamily]:
        """Returns declared metric families, in order of declaration, with their current values.

        A counter without labels that was never incremented is 0; other metrics without a value have no samples.

        Args:
            only: names of the families; empty: all.
        """
        declared = [metric for metric in self._declared.values() if not only or metric.name in only]
        samples: dict[str, list[MetricSample]] = {metric.name: [] for metric in declared}
        scalars: Iterable[tuple[Series, float | None]] = (*self.values().items(), *self._gauges.items())
        for (name, labels), value in sorted((each for each in scalars if each[0][0] in samples), key=itemgetter(0)):
            samples[name].append({"labels": self._labels(name, labels), "value": value})
        for name, histograms in self._histograms.items():
            for labels, histogram in sorted(histograms.items(), key=itemgetter(0)) if name in samples else ():
                samples[name].append(self._histogram_sample(name, labels, histogram))
        for metric in declared:
            if metric.kind == "counter" and not metric.labels and not samples[metric.name]:
                samples[metric.name].append({"labels": {}, "value": 0})
        return [
            {"name": metric.name, "kind": metric.kind, "unit": metric.unit, "help": metric.help, "samples": found}
            for metric, found in zip(declared, samples.values(), strict=True)
        ]

    def declares(self, name: str, labels: tuple[str, ...]) -> bool:
        """Returns whether there is a counter of this name with so many labels."""
        metric = self._declared.get(name)
        return metric is not None and metric.kind == "counter" and len(metric.labels) == len(labels)

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
