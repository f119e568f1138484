"""Metrics of one agent: its counters as in its region, and gauges, histograms and counters of the observer."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from operator import itemgetter
from typing import Final

from kvctl_agent.contract.metrics import METRICS_BY_NAME, Metric
from kvctl_agent.contract.snapshots import MetricFamily, MetricSample
from kvctl_agent.telemetry.metrics import Counters, Totals
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
        written: returns a counter of the agent by labels; those that are added here are counted besides.
    """

    def __init__(self, declared: Mapping[str, Metric] = METRICS_BY_NAME) -> None:
        super().__init__(_OwnMemory(), declared)
        self.written: Callable[[str], Totals] = lambda _: {}
        self._histograms: dict[str, dict[tuple[str, ...], _Histogram]] = {}
        self._gauges: dict[str, dict[tuple[str, ...], float | None]] = {}

    def totals(self, name: str) -> Totals:
        found = self.written(name)
        for labels, value in super().totals(name).items() if name in self._places or not found else ():
            found[labels] = found.get(labels, 0) + value
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
        values = self._gauges.setdefault(name, {})
        if labels not in values:
            self._check("gauge", name, labels)
        values[labels] = value

    def snapshot(self, only: Collection[str] = ()) -> list[MetricFamily]:
        """Returns declared metric families with their current values.

        A counter without labels that was never incremented is 0; other metrics without a value have no samples.

        Args:
            only: names of the families, which then have neither help nor buckets; empty: all, as declared.
        """
        return [
            {
                "name": metric.name,
                "kind": metric.kind,
                "unit": metric.unit,
                "help": "" if only else metric.help,
                "samples": self._samples(metric, buckets=not only),
            }
            for metric in (self._declared[name] for name in only or self._declared)
        ]

    def _samples(self, metric: Metric, *, buckets: bool) -> list[MetricSample]:
        name = metric.name
        if metric.kind == "histogram":
            histograms = sorted(self._histograms.get(name, {}).items(), key=itemgetter(0))
            return [_histogram_sample(metric, *each, buckets=buckets) for each in histograms]
        values: Mapping[tuple[str, ...], float | None]
        if metric.kind == "gauge":
            values = self._gauges.get(name, {})
        else:
            values = self.totals(name) or ({} if metric.labels else {(): 0})
        return [{"labels": _labels(metric, labels), "value": value} for labels, value in sorted(values.items())]

    def declares(self, name: str, labels: tuple[str, ...]) -> bool:
        """Returns whether there is a counter of this name with so many labels."""
        metric = self._declared.get(name)
        return metric is not None and metric.kind == "counter" and len(metric.labels) == len(labels)


def _labels(metric: Metric, values: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(metric.labels, map(str, values), strict=True))


def _histogram_sample(metric: Metric, labels: tuple[str, ...], histogram: _Histogram, *, buckets: bool) -> MetricSample:
    sample: MetricSample = {"labels": _labels(metric, labels), "value": None}
    if buckets:
        bounds = (*histogram.bounds, None)
        sample["buckets"] = [list(each) for each in zip(bounds, accumulate(histogram.counts), strict=True)]
    sample["sum"], sample["count"] = histogram.sum, sum(histogram.counts)
    return sample
