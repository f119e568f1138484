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
        turn: number of the stage for cases that belong to a point of `Ratios`, counted from 1; otherwise 0.
        observed: whether `kvctl top` and `kvctl status` observe the fleet meanwhile.
        busy_engine: ranks whose engine thread runs Python between its calls, one of `BUSY_ENGINES`.
    """

    load: int
    path: str
    pipeline: str = "off"
    layer_ms: float = 0.0
    turn: int = 0
    observed: bool = False
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
    """Compares every path with every pipeline setting and every choice of busy engines on every load, in turns.

    With `observe` each case runs twice: without observers, and observed by `kvctl top` and `kvctl status`.
    """

    layer_ms: float
    repeat: int
    observe: bool = False
    busy_engines: tuple[str, ...] = ("off",)

    def outline(self, plan: Plan) -> list[Stage]:
        cases = (
            Case(load, path, pipeline, self.layer_ms, observed=observed, busy_engine=busy)
            for load in range(len(plan["loads"]))
            for path in plan["paths"]
            for pipeline in plan["pipelines"]
            for busy in self.busy_engines
            for observed in ((False, True) if self.observe else (False,))
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
    time per layer of each ratio is derived from it. Rooms that run one at a time are also compared with the model of
    pipelining (`exposed_by_model`); its inputs, the transfer time in groups and in one piece, come from cases without
    compute that run in turns with the others.

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
        """Returns `ratio` and `transfer_ms`; for rooms that run one at a time also the prediction of the model.

        A case without compute has no such fields.
        """
        plain_ms = latency(Case(_lowest_concurrency(plan, case.load), case.path))
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
        loads = dict.fromkeys(_lowest_concurrency(plan, load) for load, _ in self.points)
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
    """Predicts the exposed transfer time of a room whose layers are sent in `groups` equal groups, in milliseconds.

    With compute time C, transfer time T and N groups, a room takes C + T/N if T < C (only the transfer of the last
    group remains after the forward), and C/N + T otherwise (the transfer starts after the first group). The longer of
    the two applies, and C of it is compute. T is measured differently in the two terms: the last group is sent alone
    and takes an Nth of a room sent in one piece, while consecutive groups overlap, because one group is gathered while
    the previous one is scattered.

    Args:
        compute_ms: Compute time of all layers.
        transfer_ms: Transfer time of all groups in a row.
        whole_ms: Transfer time of the same room in one piece.
    """
    return max(whole_ms / groups, compute_ms / groups + transfer_ms - compute_ms)


def _lowest_concurrency(plan: Plan, load: int) -> int:
    """Returns the index of the load with the same prompt lengths and the lowest concurrency."""
    loads = plan["loads"]
    same = (at for at, other in enumerate(loads) if other["tokens"] == loads[load]["tokens"])
    return min(same, key=lambda at: loads[at]["concurrency"])
