"""The Start command of a small synthetic rank, and the shape of its model."""

from __future__ import annotations

from typing import Any

from kvctl.lab.ranks.messages import Start
from kvctl.lab.ranks.plan import PlannedShape
from kvctl.lab.ranks.request import Sizes

SHAPE: PlannedShape = {
    "model": "",
    "kind": "mha",
    "layers": 3,
    "kv_heads": 2,
    "head_dim": 8,
    "v_head_dim": 8,
    "dtype": "bf16",
    "dtype_bytes": 2,
    "k_scale_bytes": 0,
    "v_scale_bytes": 0,
    "draft": None,
    "groups": [],
    "states": [],
}


def start_command(shape: PlannedShape = SHAPE, **changes: Any) -> Start:
    """Returns the Start command of a decode rank, `decode-0` unless `changes` say otherwise."""
    wanted: dict[str, Any] = {
        "name": "decode-0",
        "fleet_dir": "",
        "role": "decode",
        "instance": -1,
        "unique": 0,
        "prefill": (Sizes(),),
        "bootstraps": ("",),
        "decode": Sizes(),
        "shape": shape,
        "page_size": 4,
        "page_order": "random",
        "pool_pages": 12,
        "state_slots": {each["name"]: 7 for each in (*shape["groups"], *shape["states"])},
        "aux_slots": 3,
        "seed": 5,
        **changes,
    }
    return Start(**wanted)
