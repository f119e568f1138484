"""What the laps of one path cost, summed over ranks: descriptors, writes, processor time, memory, stage times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvctl.lab.bench.room_timing import Finished
from kvctl.lab.ranks.messages import Ready, RunReport
from kvctl.lab.ranks.plan import PlannedRank
from kvctl_agent.contract.choices import HOST

STAGED = "staged"


class Costs:
    """Sums over some laps."""

    def __init__(self, laps: Sequence[Finished], names: Mapping[str, PlannedRank], ready: Mapping[str, Ready]) -> None:
        self._laps = laps
        self._names = names
        self._ready = ready
        self._rooms = sum(len(finished.passages) for finished in laps)

    def per_room(self, metric: str) -> float | None:
        """Growth of a counter on the writers' side for each room that succeeded."""
        return sum(self.by_label(metric, "prefill").values()) / self._rooms if self._rooms else None

    def by_label(self, metric: str, role: str) -> dict[str, int]:
        """Growth of a counter over all ranks of a role, by label."""
        sums: dict[str, int] = {}
        for _, report in self._reports(role):
            for label, value in report["counters"].get(metric, {}).items():
                sums[label] = sums.get(label, 0) + round(value)
        return sums

    def stage(self, name: str) -> list[int]:
        """Sampled times of parts in a stage, in nanoseconds."""
        return [
            value
            for role in ("prefill", "decode")
            for _, r in self._reports(role)
            for value in r["stages"].get(name, [])
        ]

    @property
    def fallbacks(self) -> int:
        """Parts that took another path than the chosen one."""
        return sum(self.by_label("kvctl_fallbacks_total", "prefill").values())

    @property
    def cpu_seconds(self) -> float:
        """Processor time of all ranks during the runs."""
        return sum(report["cpu_ns"] for role in ("prefill", "decode") for _, report in self._reports(role)) / 1e9

    @property
    def peak_rss_bytes(self) -> int:
        """Most memory that any rank had up to the last of these laps."""
        return max(report["peak_rss_bytes"] for role in ("prefill", "decode") for _, report in self._reports(role))

    @property
    def rss_overhead_bytes(self) -> int | None:
        """The same beyond the rank's own pool, ring and staging buffers; None where these are on a GPU or not known."""
        beyond = [
            report["peak_rss_bytes"] - ready["pool_bytes"] - ready["ring_bytes"] - ready["staging_bytes"]
            for role in ("prefill", "decode")
            for name, report in self._reports(role)
            if (ready := self._ready.get(name)) is not None and self._names[name]["device"] == HOST
        ]
        return max(beyond, default=None)

    @property
    def ring_high_water_bytes(self) -> int:
        """Most bytes of any ring in use at once so far; 0 where these laps staged nothing."""
        if not self.by_label("kvctl_parts_total", "decode").get(STAGED):
            return 0
        return max(report["ring_high_water_bytes"] for _, report in self._reports("decode"))

    def _reports(self, role: str) -> Iterator[tuple[str, RunReport]]:
        for finished in self._laps:
            for name, report in finished.lap.reports.items():
                if self._names[name]["role"] == role:
                    yield name, report
