"""What is measured on one fleet, in which order: everything side by side, or compute that follows the transfer.

A program hands out cases stage by stage and is asked for the next stage only when the one before has been measured,
so that a stage can be made of what was measured before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvctl.lab.bench.case import Case, cases_of
from kvctl.lab.ranks.plan import Plan

Latency = Callable[[Case], float | None]
"""Median latency of a case that has been measured, in milliseconds."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Cases that run in turns, so often."""

    cases: tuple[Case, ...]
    repeat: int


class Program(Protocol):
    """What to measure."""

    def outlook(self, plan: Plan) -> list[Stage]:
        """All stages, for a progress bar: only how many cases of which load there are counts."""

    def stages(self, plan: Plan, latency: Latency) -> Iterator[Stage]:
        """The stages, each made when the one before it has been measured."""

    def remarks(self, plan: Plan, case: Case, latency: Latency, row: Mapping[str, Any]) -> dict[str, Any]:
        """What the program knows of a case that its own row does not tell."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Every load on every path, pipelined in every way, in turns."""

    layer_ms: float
    repeat: int
    observe: bool = False

    def outlook(self, plan: Plan) -> list[Stage]:
        return [Stage(tuple(cases_of(plan, self.layer_ms, self.observe)), self.repeat)]

    def stages(self, plan: Plan, latency: Latency) -> Iterator[Stage]:
        yield from self.outlook(plan)

    def remarks(self, plan: Plan, case: Case, latency: Latency, row: Mapping[str, Any]) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class Ratios:
    """Simulated compute that takes so many times less than the transfer: first the plain transfer, then each ratio.

    How long a layer takes follows from plain rooms: of the same prompt length, fewest in flight, nothing computed, on
    the same fleet. Loads of lone rooms are held against the model of pipelining; their transfer time T is then that of
    rooms cut into the same groups with nothing computed, in turns with those that compute, and what one group takes
    alone follows from rooms in one piece, in turns too.

    Attributes:
        points: load and transfer : compute, in the order in which they are measured.
    """

    points: tuple[tuple[int, float], ...]
    repeat: int

    def outlook(self, plan: Plan) -> list[Stage]:
        return [self._plain(plan), *(self._at(plan, turn, 1.0) for turn in range(len(self.points)))]

    def stages(self, plan: Plan, latency: Latency) -> Iterator[Stage]:
        yield self._plain(plan)
        for turn, (load, ratio) in enumerate(self.points):
            # One pace for all paths, or they would not be compared on the same work.
            slowest = max((latency(Case(_lone(plan, load), path)) or 0.0 for path in plan["paths"]), default=0.0)
            yield self._at(plan, turn, slowest / ratio / plan["shape"]["layers"])

    def remarks(self, plan: Plan, case: Case, latency: Latency, row: Mapping[str, Any]) -> dict[str, Any]:
        """`ratio`, as asked for; `transfer_ms`, T; of lone rooms what the model of pipelining says.

        Empty for rooms with nothing computed.
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
        paces = (0.0, layer_ms) if plan["loads"][load]["concurrency"] == 1 and layer_ms else (layer_ms,)
        cases = (
            Case(load, path, how, pace, turn + 1)
            for path in plan["paths"]
            for how in plan["pipelines"]
            for pace in paces
        )
        return Stage(tuple(cases), self.repeat)


def exposed_by_model(compute_ms: float, transfer_ms: float, whole_ms: float, groups: int) -> float:
    """Transfer that is waited for after the forward, when the layers go in so many groups of one size.

    With compute C, transfer T and N groups a room takes C + T/N where T < C (the last group's transfer is left) and
    C/N + T otherwise (the transfer begins after the first group): the longer of the two; C of it is compute. The two T
    differ a little: the last group goes alone, an Nth of a room in one piece, while groups in a row overlap, one being
    gathered while the one before is scattered.

    Args:
        transfer_ms: of all groups, one right after the other.
        whole_ms: of the same room in one piece.
    """
    return max(whole_ms / groups, compute_ms / groups + transfer_ms - compute_ms)


def _lone(plan: Plan, load: int) -> int:
    """Of the loads with the same prompts, the one with the fewest in flight."""
    loads = plan["loads"]
    same = (at for at, other in enumerate(loads) if other["tokens"] == loads[load]["tokens"])
    return min(same, key=lambda at: loads[at]["concurrency"])
