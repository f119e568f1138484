"""Ranks of a small fleet as the planner names them, without any process."""

from __future__ import annotations

from kvctl.lab.ranks.plan import PlannedRank
from kvctl.lab.ranks.request import Role
from kvctl_agent.contract.choices import HOST


def planned_ranks(prefill: tuple[int, ...] = (2, 1), decode_dp: int = 2, decode_tp: int = 1) -> dict[str, PlannedRank]:
    """Returns ranks by name: prefill instances of so many TP ranks each, and dp groups of so many TP ranks."""
    sizes = {"pp": 0, "cp": 0, "heads": [0, 1], "layers": [0, 1], "pool_pages": 2, "state_slots": {}, "pool_bytes": 0}

    def planned(role: Role, instance: int, unique: int, dp: int, tp: int) -> PlannedRank:
        at = {"role": role, "instance": instance, "unique": unique, "dp": dp, "tp": tp, "device": HOST}
        return {**sizes, **at}  # type: ignore[typeddict-item,return-value]

    found = {
        f"p{instance}-prefill-{tp}": planned("prefill", instance, tp, 0, tp)
        for instance, size in enumerate(prefill)
        for tp in range(size)
    }
    for unique in range(decode_dp * decode_tp):
        found[f"decode-{unique}"] = planned("decode", -1, unique, unique // decode_tp, unique % decode_tp)
    return found
