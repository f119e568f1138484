"""A plan and a report of a run, as far as the results of a bench read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SHAPE = {
    "model": "",
    "kind": "mha",
    "layers": 2,
    "kv_heads": 2,
    "head_dim": 8,
    "v_head_dim": 8,
    "dtype": "bf16",
    "draft": None,
    "groups": [],
    "states": [],
}


def bench_plan(batches: Sequence[Sequence[int]], room: dict[str, Any], shape: dict[str, Any], **changes: Any) -> Any:
    """Returns a plan with one load, whose rooms of 64 tokens are all alike.

    Args:
        batches: [first, end) of the rooms of each batch.
        room: Fields of a room that are not the default, with its bytes.
        shape: Fields of the model's shape that are not the default.
        changes: Fields of the plan.
    """
    alike = {"tokens": 64, "prefix_tokens": 0, "decode_dp": 0, "arrival_ms": None, "output_tokens": 0}
    windows = [1] * (batches[0][1] - batches[0][0])
    load = {
        "concurrency": len(windows),
        "in_flight": len(windows),
        "windows": windows,
        "tokens": "64",
        "tokens_mean": 64.0,
        "rooms": [{**alike, **room} for _ in range(batches[-1][1])],
        "batches": [list(batch) for batch in batches],
    }
    return {
        "shape": {**_SHAPE, **shape},
        "page_size": 16,
        "decode_page_size": 16,
        "transfer_page": 16,
        "cp_interleave": None,
        "kv_layouts": ["nhd", "nhd"],
        "page_order": "random",
        "transport": "nixl",
        "device": "cpu",
        "ranks": [],
        "pipelines": ["off"],
        "cp_mode": "rank0",
        "loads": [load],
        **changes,
    }


def run_report(**changes: Any) -> Any:
    """Returns the report of a rank on a run in which it did nothing, but for `changes`."""
    return {
        "rooms": [],
        "hidden": [],
        "groups": 0,
        "failures": [],
        "held": [],
        "counters": {},
        "stages": {},
        "ring_high_water_bytes": 0,
        "cpu_ns": 0,
        "peak_rss_bytes": 0,
        **changes,
    }
