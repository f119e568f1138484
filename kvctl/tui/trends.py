"""Short memories of numbers, for sparklines."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from kvctl.render.status import FleetSummary, Rates, rates, summarise
from kvctl.render.view import Row

# A value per reading, for a line as wide as the widest screen.
_KEPT = 240


class Series:
    """The latest values of one number, oldest first; None where it was not known."""

    def __init__(self) -> None:
        self._values: deque[float | None] = deque(maxlen=_KEPT)

    def add(self, value: float | None) -> None:
        self._values.append(value)

    def __iter__(self) -> Iterator[float | None]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def last(self) -> float | None:
        return self._values[-1] if self._values else None

    def peak(self) -> float | None:
        return max((value for value in self._values if value is not None), default=None)


class Trends:
    """What the fleet did lately: rates between readings, latency as agents tell it, use of each ring."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets everything, as a recording that is turned back must."""
        self.throughput, self.finished, self.failed = Series(), Series(), Series()
        self.p50, self.p99 = Series(), Series()
        self.rings: dict[str, Series] = {}
        self.rates = Rates()
        self._before: tuple[FleetSummary, int] | None = None

    def add(self, statuses: Sequence[Row], tick_ns: int) -> None:
        """One reading: of all agents that answered `status`, and when on a clock of the source's."""
        summary = summarise(statuses)
        if self._before is not None:
            if tick_ns <= self._before[1]:
                return
            self.rates = rates(self._before[0], summary, tick_ns - self._before[1])
            self.throughput.add(self.rates.gb_per_s)
            self.finished.add(self.rates.succeeded_per_s)
            self.failed.add(self.rates.failed_per_s)
        self._before = (summary, tick_ns)
        self.p50.add(summary.p50_ns)
        self.p99.add(summary.p99_ns)
        for status in statuses:
            ring = status.get("ring")
            if ring and ring["size_bytes"]:
                series = self.rings.setdefault(status["name"], Series())
                series.add(ring["used_bytes"] / ring["size_bytes"])
