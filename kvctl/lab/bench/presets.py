"""Published tables that the bench reproduces, each declared as options and columns.

They were measured on racks of GPUs. In host memory they run with a small model, and some with shorter prompts, which
leaves the comparison of paths valid; a note says so. With KV pools on GPUs they run as published. Options on the
command line replace the preset's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvctl.lab.bench.preset_views import CP, MULTI_TURN, PIPELINE, PROMPTS, STAGING, STRESS
from kvctl.lab.ranks.request import Tokens
from kvctl.render.view import View

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Name and options of one of the fleets that a preset compares."""

    label: str
    options: Options


ONE_FLEET = ((FleetOptions("", {}),),)

# A minute or two on two cores; larger pools take longer to fill and to verify than to transfer.
_SMALL: Options = {"layers": 4, "kv_heads": 4, "head_dim": 64}
_SHORT: Options = {"tokens": Tokens(values=(256,))}
_SIZES = {"layers": "layers", "kv_heads": "KV heads", "head_dim": "elements per head", "tokens": "tokens per prompt"}


@dataclass(frozen=True, slots=True)
class Preset:
    """One published table.

    Attributes:
        title: description of the table.
        options: values that replace the options' defaults.
        table: columns of the output.
        fleets: fleets that are compared with each other; several lists of them run one after another.
        within: fields that compared rows have in common besides the load.
        rooms: returns the requests of a load from its concurrency, if the load does not define them.
        in_host_memory: values that replace those of `options` with pools in host memory.
    """

    name: str
    title: str
    options: Options
    table: View
    fleets: tuple[tuple[FleetOptions, ...], ...] = ONE_FLEET
    within: tuple[str, ...] = ()
    rooms: Callable[[int], int] = lambda concurrency: max(16, concurrency)
    in_host_memory: Options = field(default_factory=lambda: _SMALL)


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "staging-sweep",
            "TP4 to DP4, slice against staged, over concurrency",
            {
                "prefill_tp": 4,
                "decode_dp": 4,
                "paths": ("slice", "staged"),
                "sweep": (("concurrency", [1 << power for power in range(11)]),),
            },
            STAGING,
            in_host_memory={**_SMALL, **_SHORT},
        ),
        Preset(
            "staging-overhead",
            "what staging costs: TP4 to DP4 staged against DP4 to DP4, which needs none",
            {"sweep": (("concurrency", [1, 4, 16, 64]),)},
            STAGING,
            fleets=(
                (
                    FleetOptions("homogeneous", {"prefill_dp": 4, "decode_dp": 4, "paths": ("bulk",)}),
                    FleetOptions("staged", {"prefill_tp": 4, "decode_dp": 4, "paths": ("staged",)}),
                ),
            ),
        ),
        *(
            Preset(
                f"p{prefill}d4",
                f"TP{prefill} to TP4 over the number of prompts, all at once, median of 4",
                {
                    "prefill_tp": prefill,
                    "decode_tp": 4,
                    "paths": paths,
                    "sweep": (("concurrency", [1 << power for power in range(10)]),),
                    "repeat": 4,
                },
                PROMPTS,
                rooms=lambda concurrency: concurrency,
                in_host_memory={**_SMALL, **_SHORT},
            )
            for prefill, paths in ((2, ("slice", "staged")), (4, ("bulk", "staged")))
        ),
        Preset(
            "pipeline-sweep",
            "layer groups: exposed transfer and TTFT over prompt lengths, with simulated compute",
            {
                # Rooms run one at a time: a second room would wait for the forward of the first one.
                # One rank per side: simulated compute takes no processor time, so the transfer alone uses the cores.
                "layers": 30,  # divisible into groups of one size
                "paths": ("staged",),
                "pipelines": ("off", "on", "auto"),
                "concurrency": 1,
                "layer_ms": 1.0,
                "sweep": (("tokens", [256 << power for power in range(7)]),),
            },
            PIPELINE,
            within=("path", "transport"),
            rooms=lambda concurrency: 8 * concurrency,
            in_host_memory={"kv_heads": 2, "head_dim": 64},
        ),
        Preset(
            "multi-turn",
            "16 conversations of 10 turns, each reusing the previous ones",
            {
                "prefill_tp": 4,
                "decode_dp": 4,
                "paths": ("slice", "staged"),
                "sessions": 16,
                "turns": 10,
                "tokens": Tokens(values=(512,)),
                "output_tokens": 128,
            },
            MULTI_TURN,
        ),
        Preset(
            "stress",
            "64 requests of 4,096 tokens at once",
            {"prefill_tp": 4, "decode_dp": 4, "concurrency": 64, "tokens": Tokens(values=(4096,))},
            STRESS,
            rooms=lambda concurrency: concurrency,
        ),
        Preset(
            "cp",
            "how 2 and 4 context-parallel ranks share the sending",
            {
                "cp_modes": ("rank0", "all", "all-chunk", "room-hash"),
                "tokens": Tokens(values=(2048,)),
                "chunk_tokens": 512,
                "paths": ("bulk", "staged"),
            },
            CP,
            fleets=tuple((FleetOptions(f"cp{size}", {"prefill_cp": size}),) for size in (2, 4)),
            within=("path",),
            rooms=lambda concurrency: max(24, concurrency),
        ),
    )
}

POINT_SECONDS = 5.0
"""Time limit per load and path on GPUs: path slice, with a descriptor per row, takes 1 s per room of a large model."""

_PIPELINE_SWEEP_COMPUTED = Preset(
    "pipeline-sweep",
    "layer groups with forwards computed on the GPU: exposed transfer and TTFT over prompt lengths",
    {
        "model": "qwen2.5-72b",
        "paths": ("staged",),
        "pipelines": ("off", "on"),
        "concurrency": 1,
        "sweep": (("tokens", [1024 << power for power in range(5)]),),
    },
    PIPELINE,
    within=("path", "transport"),
    rooms=lambda concurrency: 8 * concurrency,
)


def in_host_memory(preset: Preset, given: Collection[str]) -> tuple[Options, str]:
    """Returns the preset's options for pools in host memory, and a note on those that are not as published.

    Args:
        given: Names of the options that the command line sets, which replace the preset's. Heads are those of a model
            that is given.
    """
    kept = {*given, *(("kv_heads", "head_dim") if {"model", "kind"} & {*given} else ())}
    changed = {name: value for name, value in preset.in_host_memory.items() if name not in kept}
    words = [f"{value.text if isinstance(value, Tokens) else value} {_SIZES[name]}" for name, value in changed.items()]
    note = f"{preset.name} in host memory has {', '.join(words)}; options on the command line replace them"
    return {**preset.options, **changed}, note if words else ""


def on_gpus(name: str, compute: str) -> Preset:
    """Returns the preset for KV pools on GPUs; where it compares paths, path direct is added.

    Args:
        name: Name of the preset.
        compute: One of `COMPUTES`; `gpu` selects a pipeline sweep with forwards computed on the GPU.
    """
    preset = PRESETS[name]
    if name == _PIPELINE_SWEEP_COMPUTED.name and compute == "gpu":
        return _PIPELINE_SWEEP_COMPUTED
    paths = tuple(preset.options.get("paths", ()))
    if {"slice", "bulk"} & set(paths):
        return replace(preset, options={**preset.options, "paths": (*paths, "direct")})
    return preset
