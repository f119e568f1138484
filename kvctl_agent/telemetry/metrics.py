"""Counters of the declared metrics, cheap enough to update for every part.

`cells[index] += value` reads and writes in separate bytecodes, so two threads could lose counts: writers take a lock
for the few bytecodes of an update.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, MutableSequence
from typing import Protocol

from kvctl_agent.contract.metrics import METRICS_BY_NAME, Metric

Series = tuple[str, tuple[str, ...]]
"""Name of a metric, and values of its labels."""

Totals = dict[tuple[str, ...], float]
"""Values of one counter, by the values of its labels."""

Sample = tuple[str, float, tuple[str, ...]]
"""Name of a metric, value, and values of its labels."""

OTHER = "other"
_MOST_SERIES = 1024  # peers supply the values of some labels and must not be able to exhaust the memory
_MOST_BYTES = 96 << 10  # of names and labels, which have to fit into a document
_SERIES_BYTES = 16


class CounterMemory(Protocol):
    """Memory of the counters: one number each."""

    @property
    def counters(self) -> MutableSequence[float] | memoryview[float]: ...


class Counters:
    """Values of the declared counters.

    An undeclared name raises KeyError; a wrong kind, number of labels or sign raises ValueError. Both are programming
    errors that the first call reveals. Once there are 1024 series of counters, new label values count as "other".

    Attributes:
        series: all series, in the order of their numbers in the memory.
    """

    def __init__(self, memory: CounterMemory, declared: Mapping[str, Metric] = METRICS_BY_NAME) -> None:
        self._memory = memory
        self._declared = declared
        self._adding = threading.RLock()  # a signal handler that closes the agent may interrupt its owner
        self._places: dict[str, dict[tuple[str, ...], int]] = {}
        self._bytes = 0
        self.series: list[Series] = []

    def add(self, name: str, value: float, *labels: str) -> None:
        """Adds `value` >= 0 to a counter."""
        if value < 0:
            raise ValueError(f"counter {name} cannot go down (by {value})")
        try:
            place = self._places[name][labels]
        except KeyError:
            place = self._new(name, labels)
        with self._adding:
            self._memory.counters[place] += value

    def total(self, name: str, *labels: str) -> float:
        """Returns the value of a counter for the given labels; without labels, the sum over all label values."""
        totals = self.totals(name)
        if labels:
            self._check("counter", name, labels)
            return totals.get(labels, 0)
        return sum(totals.values())

    def totals(self, name: str) -> Totals:
        """Returns the values of a counter by label values, without those that were never incremented."""
        declared = self._declared[name]
        if declared.kind != "counter":
            raise ValueError(f"{name} is a {declared.kind}, not a counter")
        cells, places = self._memory.counters, self._places.get(name, {})
        return {labels: whole(cells[place]) for labels, place in places.copy().items()}

    def _new(self, name: str, labels: tuple[str, ...]) -> int:
        """Returns the place of a series that has none yet, or of the series of all others."""
        self._check("counter", name, labels)
        with self._adding:
            size = _SERIES_BYTES + sum(len(text.encode("utf-8", "backslashreplace")) for text in (name, *labels))
            if len(self.series) >= _MOST_SERIES or self._bytes + size > _MOST_BYTES:
                labels = (OTHER,) * len(labels)
            places = self._places.setdefault(name, {})
            if labels not in places:
                self._bytes += size
                places[labels] = len(self.series)
                self.series.append((name, labels))
            return places[labels]

    def _check(self, kind: str, name: str, labels: tuple[str, ...]) -> Metric:
        metric = self._declared.get(name)
        if metric is None:
            raise KeyError(f"metric {name!r} is not declared in contract/metrics.py")
        if metric.kind != kind:
            raise ValueError(f"metric {name} is a {metric.kind}, not a {kind}")
        if len(labels) != len(metric.labels):
            raise ValueError(f"metric {name} takes labels {metric.labels}, got {labels}")
        return metric


def whole(value: float) -> float:
    """Returns a number without a fraction as an integer."""
    return int(value) if value.is_integer() else value
