"""Measurement programs: which cases run on a fleet, and in which order.

A program yields its cases stage by stage. The next stage is requested only after the previous one has been measured, so
a stage may depend on measured results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvctl.lab.ranks.plan import Plan


@dataclass(frozen=True, slots=True)
class Case:
    """One load on one path with one pipeline setting: the unit that the bench compares.

    Attributes:
        load: index into the plan's loads.
        layer_ms: simulated compute time of one layer for one chunk.
        turn: number of the stage for cases that belong to a point of `Ratios`, counted from 1; otherwise 0.
        busy_engine: ranks whose engine is busy between its calls, one of `BUSY_ENGINES`.
    """

    load: int
    path: str
    pipeline: str = "off"
    layer_ms: float = 0.0
    turn: int = 0
    busy_engine: str = "off"


Latency = Callable[[Case], float | None]
"""Returns the median latency of a case in milliseconds; None if the case has not been measured."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Cases that run in turns, `repeat` times each, so that machine drift does not look like a difference of cases."""

    cases: tuple[Case, ...]
    repeat: int

    def trials(self, plan: Plan) -> int:
        """Returns the number of trials: one per case, batch and repeat."""
        return self.repeat * sum(len(plan["loads"][case.load]["batches"]) for case in self.cases)


class Program(Protocol):
    """Determines which cases are measured on one fleet, and in which order."""

    def outline(self, plan: Plan) -> list[Stage]:
        """Returns all stages for the progress bar; only the number of cases of each load is meaningful."""

    def stages(self, plan: Plan, latency: Latency) -> Iterator[Stage]:
        """Yields the stages; each is created after the previous stage has been measured."""

    def derived(self, plan: Plan, case: Case, latency: Latency, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns additional fields of a case's `row` that depend on other cases of the program."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Compares every path with every pipeline setting and every choice of busy engines on every load, in turns."""

    layer_ms: float
    repeat: int
    busy_engines: tuple[str, ...] = ("off",)

    def outline(self, plan: Plan) -> list[Stage]:
        cases = (
            Case(load, path, pipeline, self.layer_ms, busy_engine=busy)
            for load in range(len(plan["loads"]))
            for path in plan["paths"]
            for pipeline in plan["pipelines"]
            for busy in self.busy_engines
        )
        return [Stage(tuple(cases), self.repeat)]

    def stages(self, plan: Plan, latency: Latency) -> Iterator[Stage]:
        yield from self.outline(plan)

    def derived(self, plan: Plan, case: Case, latency: Latency, row: Mapping[str, Any]) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class Ratios:
    """Measures rooms whose simulated compute time has a fixed ratio to their transfer time.

    The transfer without compute is measured first, with the same prompt length at the lowest concurrency; the compute
    time per layer of each ratio is derived from it.

    Attributes:
        points: index of a load and its ratio of transfer to compute time, in the order of measurement.
    """

    points: tuple[tuple[int, float], ...]
    repeat: int

    def outline(self, plan: Plan) -> list[Stage]:
        return [self._plain(plan), *(self._at(plan, turn, 1.0) for turn in range(len(self.points)))]

    def stages(self, plan: Plan, latency: Latency) -> Iterator[Stage]:
        yield self._plain(plan)
        for turn, (load, ratio) in enumerate(self.points):
            # All paths get the compute time of the slowest, so that they are compared on the same work.
            slowest = max(
                (latency(Case(_lowest_concurrency(plan, load), path)) or 0.0 for path in plan["paths"]), default=0.0
            )
            yield self._at(plan, turn, slowest / ratio / plan["shape"]["layers"])

    def derived(self, plan: Plan, case: Case, latency: Latency, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `ratio` and `transfer_ms`; a case without compute has no such fields."""
        transfer_ms = latency(Case(_lowest_concurrency(plan, case.load), case.path))
        if not case.layer_ms or not transfer_ms:
            return {}
        return {"ratio": self.points[case.turn - 1][1], "transfer_ms": transfer_ms}

    def _plain(self, plan: Plan) -> Stage:
        loads = dict.fromkeys(_lowest_concurrency(plan, load) for load, _ in self.points)
        return Stage(tuple(Case(load, path) for load in loads for path in plan["paths"]), self.repeat)

    def _at(self, plan: Plan, turn: int, layer_ms: float) -> Stage:
        load = self.points[turn][0]
        cases = (
            Case(load, path, pipeline, layer_ms, turn + 1) for path in plan["paths"] for pipeline in plan["pipelines"]
        )
        return Stage(tuple(cases), self.repeat)


def _lowest_concurrency(plan: Plan, load: int) -> int:
    """Returns the index of the load with the same prompt lengths and the lowest concurrency."""
    loads = plan["loads"]
    same = (at for at, other in enumerate(loads) if other["tokens"] == loads[load]["tokens"])
    return min(same, key=lambda at: loads[at]["concurrency"])
