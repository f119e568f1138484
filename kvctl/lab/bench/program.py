"""Measurement programs: which cases run on a fleet, and in which order.

A program yields its cases stage by stage. The next stage is requested only after the previous one has been measured, so
a stage may depend on measured results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvctl.lab.ranks.plan import Plan


@dataclass(frozen=True, slots=True)
class Case:
    """One load on one path with one pipeline setting: the unit that the bench compares.

    Attributes:
        load: index into the plan's loads.
        layer_ms: simulated compute time of one layer for one chunk.
        turn: number shared by cases that run in turns, so that machine drift does not look like a difference between
            them.
        observed: whether `kvctl top` and `kvctl status` watch the fleet meanwhile.
    """

    load: int
    path: str
    pipeline: str = "off"
    layer_ms: float = 0.0
    turn: int = 0
    observed: bool = False


Latency = Callable[[Case], float | None]
"""Median latency of a measured case, in milliseconds."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Cases that run in turns, `repeat` times."""

    cases: tuple[Case, ...]
    repeat: int

    def trials(self, plan: Plan) -> int:
        """Number of trials of the stage."""
        return self.repeat * sum(len(plan["loads"][case.load]["batches"]) for case in self.cases)


class Program(Protocol):
    """The cases to measure on one fleet."""

    def outline(self, plan: Plan) -> list[Stage]:
        """All stages, for the progress bar: only the number of cases of each load is meaningful."""

    def stages(self, plan: Plan, latency: Latency) -> Iterator[Stage]:
        """The stages, each created after the previous one has been measured."""

    def derived(self, plan: Plan, case: Case, latency: Latency, row: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a case's row that depend on other cases of the program."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Every load on every path with every pipeline setting, in turns.

    With `observe` each case runs twice, alone and watched.
    """

    layer_ms: float
    repeat: int
    observe: bool = False

    def outline(self, plan: Plan) -> list[Stage]:
        cases = (
            Case(load, path, pipeline, self.layer_ms, observed=observed)
            for load in range(len(plan["loads"]))
            for path in plan["paths"]
            for pipeline in plan["pipelines"]
            for observed in ((False, True) if self.observe else (False,))
        )
        return [Stage(tuple(cases), self.repeat)]

    def stages(self, plan: Plan, latency: Latency) -> Iterator[Stage]:
        yield from self.outline(plan)

    def derived(self, plan: Plan, case: Case, latency: Latency, row: Mapping[str, Any]) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class Ratios:
    """Rooms with simulated compute that takes a fixed multiple of the plain transfer time.

    The plain transfer is measured first: same prompt length, lowest concurrency, no compute, same fleet. It sets the
    compute time per layer of each ratio. Rooms that run one at a time are also compared with the model of pipelining
    (`exposed_by_model`); its inputs, the transfer time in groups and in one piece, come from cases without compute that
    run in turns with the others.

    Attributes:
        points: (load, transfer : compute), in the order of measurement.
    """

    points: tuple[tuple[int, float], ...]
    repeat: int

    def outline(self, plan: Plan) -> list[Stage]:
        return [self._plain(plan), *(self._at(plan, turn, 1.0) for turn in range(len(self.points)))]

    def stages(self, plan: Plan, latency: Latency) -> Iterator[Stage]:
        yield self._plain(plan)
        for turn, (load, ratio) in enumerate(self.points):
            # All paths get the compute time of the slowest, so that they are compared on the same work.
            slowest = max((latency(Case(_lone(plan, load), path)) or 0.0 for path in plan["paths"]), default=0.0)
            yield self._at(plan, turn, slowest / ratio / plan["shape"]["layers"])

    def derived(self, plan: Plan, case: Case, latency: Latency, row: Mapping[str, Any]) -> dict[str, Any]:
        """The requested `ratio` and `transfer_ms`; for rooms that run one at a time also the model's prediction.

        Empty for cases without compute.
        """
        plain_ms = latency(Case(_lone(plan, case.load), case.path))
        if not case.layer_ms or not plain_ms:
            return {}
        ratio = self.points[case.turn - 1][1]
        transfer_ms = latency(replace(case, layer_ms=0.0))
        compute_ms, exposed_ms = row["compute_ms"]["p50"], row["exposed_ms"]["p50"]
        if transfer_ms is None or compute_ms is None or exposed_ms is None:
            return {"ratio": ratio, "transfer_ms": plain_ms}
        whole_ms = latency(replace(case, layer_ms=0.0, pipeline="off")) or plain_ms
        model_ms = exposed_by_model(compute_ms, transfer_ms, whole_ms, row["groups"] or 1)
        return {
            "ratio": ratio,
            "transfer_ms": transfer_ms,
            "model_exposed_ms": model_ms,
            "off_model_ratio": exposed_ms / model_ms - 1,
            "off_total_ratio": (compute_ms + exposed_ms) / (compute_ms + model_ms) - 1,
        }

    def _plain(self, plan: Plan) -> Stage:
        loads = dict.fromkeys(_lone(plan, load) for load, _ in self.points)
        return Stage(tuple(Case(load, path) for load in loads for path in plan["paths"]), self.repeat)

    def _at(self, plan: Plan, turn: int, layer_ms: float) -> Stage:
        load = self.points[turn][0]
        layer_times = (0.0, layer_ms) if plan["loads"][load]["concurrency"] == 1 and layer_ms else (layer_ms,)
        cases = (
            Case(load, path, pipeline, each_ms, turn + 1)
            for path in plan["paths"]
            for pipeline in plan["pipelines"]
            for each_ms in layer_times
        )
        return Stage(tuple(cases), self.repeat)


def exposed_by_model(compute_ms: float, transfer_ms: float, whole_ms: float, groups: int) -> float:
    """Predict the exposed transfer time of a room whose layers are sent in `groups` equal groups.

    With compute C, transfer T and N groups a room takes C + T/N if T < C (the last group's transfer remains), and
    C/N + T otherwise (the transfer starts after the first group): the longer of the two, C of which is compute. The two
    T differ slightly: the last group goes alone, an Nth of a room sent in one piece, while groups in a row overlap,
    because one is gathered while the previous one is scattered.

    Args:
        transfer_ms: Transfer of all groups, one after the other.
        whole_ms: Transfer of the same room in one piece.
    """
    return max(whole_ms / groups, compute_ms / groups + transfer_ms - compute_ms)


def _lone(plan: Plan, load: int) -> int:
    """Returns the load with the same prompts and the lowest concurrency."""
    loads = plan["loads"]
    same = (at for at, other in enumerate(loads) if other["tokens"] == loads[load]["tokens"])
    return min(same, key=lambda at: loads[at]["concurrency"])
