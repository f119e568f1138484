"""Collects what has been measured on one fleet; can be asked at any time, also of a bench that was cut short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvctl.lab.bench import roofline as limits
from kvctl.lab.bench.case import Case
from kvctl.lab.bench.room_timing import Finished, join, observer_cost
from kvctl.lab.bench.rows import mismatches, row_of
from kvctl.lab.bench.statistics import percentile
from kvctl.lab.bench.trials import LOAD_STRIDE, Trial
from kvctl.lab.ranks.messages import Mismatch, Ready
from kvctl.lab.ranks.plan import Plan, PlannedRank

_MOST_LINES = 3


class Results:
    """The laps of one fleet, and the rows they make.

    Attributes:
        plan: what was planned for the fleet.
        names: its ranks.
        ready: what each rank said of itself when it was up.
        floors: every figure measured, by kind.
    """

    def __init__(self, plan: Plan, names: Mapping[str, PlannedRank], verify: str) -> None:
        self.plan = plan
        self.names = names
        self.ready: Mapping[str, Ready] = {}
        self.floors: dict[str, list[float]] = {kind: [] for kind in limits.EVERY}
        self._verify = verify
        self._laps: dict[Case, list[Finished]] = {}
        self._nbytes = {
            load * LOAD_STRIDE + index: room["bytes"]
            for load, planned in enumerate(plan["loads"])
            for index, room in enumerate(planned["rooms"])
        }

    def add(self, lap: Trial) -> None:
        """Take a lap in."""
        self._laps.setdefault(lap.case, []).append(join(lap, self.names, self._nbytes))

    @property
    def verified(self) -> bool | None:
        """Whether every byte was where it belongs; None where nobody looked."""
        if not self._laps or self._verify == "off":
            return None
        every = [finished for laps in self._laps.values() for finished in laps]
        return not any(finished.failures or mismatches(finished) for finished in every)

    @property
    def trouble(self) -> list[str]:
        """What kept the bench from being a success, in a few lines."""
        every = [finished for laps in self._laps.values() for finished in laps]
        causes = [text for finished in every for text in finished.failures.values()]
        wrong = [mismatch for finished in every for mismatch in mismatches(finished)]
        counts = {text: causes.count(text) for text in dict.fromkeys(causes)}
        lines = [f"{count} room{'s' * (count > 1)} failed: {text}" for text, count in counts.items()][:_MOST_LINES]
        reports = [report for finished in every for report in finished.lap.reports.values()]
        lines += [line for report in reports if "faults" in report for line in report["faults"]["left"]][:_MOST_LINES]
        return lines + [_explained(mismatch) for mismatch in wrong[:_MOST_LINES]]

    def floor(self, kind: str) -> float | None:
        """The best figure seen: a floor is what this machine can do, not what it had left at a moment."""
        return max(self.floors[kind], default=None)

    def latency_ms(self, case: Case) -> float | None:
        """Median latency of a case's rooms so far."""
        ordered = sorted(
            passage.latency_ns / 1e6 for finished in self._laps.get(case, ()) for passage in finished.passages.values()
        )
        return percentile(ordered, 0.5) if ordered else None

    def laps(self) -> Mapping[Case, Sequence[Finished]]:
        """Everything measured, by case, in the plan's order."""
        paths, pipelines = self.plan["paths"], self.plan["pipelines"]

        def order(case: Case) -> tuple[int, int, float, int, int, bool]:
            how = pipelines.index(case.pipeline) if case.pipeline in pipelines else -1
            return case.load, case.turn, case.layer_ms, paths.index(case.path), how, case.observed

        return {case: self._laps[case] for case in sorted(self._laps, key=order)}

    def rows(self) -> list[dict[str, Any]]:
        """One row per case that ran, in the plan's order."""
        floors = {kind: self.floor(kind) for kind in self.floors}
        looked = self._verify != "off"
        every = self.laps()
        return [
            {
                **row_of(laps, self.plan, self.names, self.ready, floors, looked),
                "observer_cost_ratio": observer_cost(every.get(replace(case, observed=False), ()), laps)
                if case.observed
                else None,
            }
            for case, laps in every.items()
        ]


def _explained(wrong: Mismatch) -> str:
    where = f"room {wrong['room']} {wrong['where']}" if wrong["room"] else wrong["where"]
    return f"{where}: expected {wrong['expected']}, found {wrong['found']} ({wrong['hint']})"
