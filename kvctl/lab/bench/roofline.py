"""What a machine can do at best: which limits are measured where, and which of them a room is held against."""

from __future__ import annotations

from collections.abc import Mapping

from kvctl.lab.ranks.plan import Plan
from kvctl.lab.ranks.request import FloorKind

ON_HOST: tuple[FloorKind, ...] = ("memcpy", "write")
ON_GPUS: tuple[FloorKind, ...] = ("write", "device", "peer")
EVERY: tuple[FloorKind, ...] = ("memcpy", "write", "device", "peer")


def measured(plan: Plan) -> tuple[FloorKind, ...]:
    """The limits that say something about this plan."""
    return ON_HOST if plan["device"] == "cpu" else ON_GPUS


def copy_floor(plan: Plan, floors: Mapping[str, float | None]) -> float | None:
    """GB/s of the best way from a prefill rank's GPU to a decode rank's; None on hosts, and where there is none.

    Within one GPU that is its own copy, whether or not ranks can map each other's memory.
    """
    if plan["device"] == "cpu":
        return None
    shared = len({rank["device"] for rank in plan["ranks"]}) == 1
    return floors["peer"] or (floors["device"] if shared else None)
