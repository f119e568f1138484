"""What is compared: one load on one path, pipelined in one way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.lab.ranks.plan import Plan


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared with others of the same fleet: one load on one path, pipelined in one way.

    Attributes:
        load: number of the plan's load.
        layer_ms: simulated compute of one layer for one chunk.
        turn: cases that ran in turns with each other have the same one, so that a machine's drift is not taken for a
            difference between cases.
        observed: people watch the fleet meanwhile.
    """

    load: int
    path: str
    pipeline: str = "off"
    layer_ms: float = 0.0
    turn: int = 0
    observed: bool = False


def cases_of(plan: Plan, layer_ms: float, observe: bool = False) -> list[Case]:
    """Every load on every path, pipelined in every way; with `observe` each of them alone and watched, in turns."""
    return [
        Case(load, path, pipeline, layer_ms, observed=observed)
        for load in range(len(plan["loads"]))
        for path in plan["paths"]
        for pipeline in plan["pipelines"]
        for observed in ((False, True) if observe else (False,))
    ]


def length(plan: Plan, cases: Sequence[Case]) -> int:
    """Number of laps that these cases take once."""
    return sum(len(plan["loads"][case.load]["lots"]) for case in cases)
