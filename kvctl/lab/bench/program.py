"""Which cases a bench measures on a fleet: every path, pipeline setting and choice of busy engines on every load."""

from __future__ import annotations

from dataclasses import dataclass

from kvctl.lab.ranks.plan import Plan


@dataclass(frozen=True, slots=True)
class Case:
    """One load on one path with one pipeline setting: the unit that the bench compares.

    Attributes:
        load: index into the plan's loads.
        layer_ms: simulated compute time of one layer for one chunk.
        busy_engine: ranks whose engine is busy between its calls, one of `BUSY_ENGINES`.
    """

    load: int
    path: str
    pipeline: str = "off"
    layer_ms: float = 0.0
    busy_engine: str = "off"


@dataclass(frozen=True, slots=True)
class Program:
    """Runs all cases of a plan in turns, `repeat` times each, so that machine drift does not look like a difference."""

    layer_ms: float
    repeat: int
    busy_engines: tuple[str, ...] = ("off",)

    def cases(self, plan: Plan) -> list[Case]:
        """Returns the cases in the order of loads, paths, pipeline settings and busy engines."""
        return [
            Case(load, path, pipeline, self.layer_ms, busy)
            for load in range(len(plan["loads"]))
            for path in plan["paths"]
            for pipeline in plan["pipelines"]
            for busy in self.busy_engines
        ]

    def trials(self, plan: Plan) -> int:
        """Returns the number of trials: one per case, batch and repeat."""
        return self.repeat * sum(len(plan["loads"][case.load]["batches"]) for case in self.cases(plan))
