"""The published tables with KV on GPUs: as published, not scaled down, and with the path that only GPUs have."""

from __future__ import annotations

from dataclasses import replace

from kvctl.lab.bench.preset_views import PIPELINE_COMPUTED
from kvctl.lab.bench.presets import PRESETS, Part, Preset

POINT_S = 5.0
"""A path that posts every row by itself moves a room of a large model in a second; it gets this long for each load."""

# Takes part wherever staging is compared with something.
_DIRECT = "direct"
_COMPARED = {"slice", "bulk"}

# Rooms one after another: a GPU computes one forward at a time, so that more in flight would measure the queue.
_PIPELINE_SWEEP = Preset(
    "pipeline-sweep",
    "layer groups beside forwards that are computed for real: exposed transfer and TTFT over prompt lengths",
    {
        "model": "qwen2.5-72b",
        "paths": ("staged",),
        "pipelines": ("off", "on"),
        "concurrency": 1,
        "sweep": (("tokens", [1024 << power for power in range(5)]),),
    },
    PIPELINE_COMPUTED,
    parts=(Part(),),
    within=("path", "transport"),
    rooms=lambda concurrency: 8 * concurrency,
)


def on_gpus(name: str, compute: str) -> Preset:
    """The preset of that name with KV pools on GPUs; `compute` is one of `contract.rig.COMPUTES`."""
    preset = PRESETS[name]
    if name == _PIPELINE_SWEEP.name and compute == "gpu":
        return _PIPELINE_SWEEP
    paths = tuple(preset.options.get("paths", ()))
    if _COMPARED & set(paths):
        return replace(preset, options={**preset.options, "paths": (*paths, _DIRECT)})
    return preset
