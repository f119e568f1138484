"""Published tables that the bench reproduces, each declared as options and columns.

They were measured on racks of GPUs. What does not fit this machine is scaled down (`kvctl.lab.bench.scale`), and a note
says what was; any option given on the command line replaces the preset's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvctl.lab.bench.options import sweep_loads
from kvctl.lab.bench.preset_views import (
    CP,
    MULTI_TURN,
    PIPELINE,
    STRESS,
    Measure,
    best_tokens_per_s,
    best_ttft,
    tokens_per_s,
    ttft,
)
from kvctl.lab.bench.program import Program, Ratios, SideBySide
from kvctl.lab.ranks.request import Load, Tokens
from kvctl.render.view import View

Options = Mapping[str, Any]

_TOKENS_PER_S = Measure("tok/s", tokens_per_s, better="more")
_TTFT = Measure("TTFT", ttft, better="less")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A table with a line per load, and for each measure a column per contestant with Δ against the first.

    Attributes:
        by: what the load is called, and the header over it.
    """

    by: tuple[str, str]
    measures: tuple[Measure, ...]


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Options of one of several fleets that are compared, and what to call it."""

    label: str
    options: Options


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured on fleets of its own.

    Attributes:
        name: what remarks call it, where there are several.
        fleets: compared with each other.
        loads: for these options.
        program: what is measured of the loads.
        laps: how often each case of a load is measured, if that is more than `repeat`.
        weight: what may be moved, against what another table may.
    """

    name: str = ""
    fleets: tuple[FleetOptions, ...] = (FleetOptions("", {}),)
    loads: Callable[[Options], tuple[Load, ...]] = lambda options: sweep_loads(
        options["concurrency"], options["tokens"], options["sweep"]
    )
    program: Callable[[Options], Program] = lambda options: SideBySide(
        options["layer_ms"], options["repeat"], options["observe"]
    )
    laps: int = 1
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Preset:
    """One published table.

    Attributes:
        title: what it shows.
        options: values in place of the options' defaults.
        table: how it is shown.
        parts: what is measured, one after another. Where sessions give the requests, the loads only say what to scale
            by.
        within: what rows must have in common to be compared, besides the load.
        rooms: requests of a load with this concurrency, where the load does not say.
        least: what scaling leaves of layers, KV heads, head dim and tokens.
        in_flight: rooms that must fit into memory at once, where a load has more in flight.
    """

    name: str
    title: str
    options: Options
    table: Comparison | View
    parts: tuple[Part, ...] = (Part(),)
    within: tuple[str, ...] = ()
    rooms: Callable[[int], int] = lambda concurrency: max(16, concurrency)
    least: Mapping[str, int] = field(default_factory=lambda: {"layers": 4, "kv_heads": 4, "head_dim": 64, "tokens": 64})
    in_flight: int = 1024


_RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
# Long enough for a chunk to be worth cutting, and a single chunk, as the model of pipelining assumes.
_RATIO_TOKENS = 8192
# Few rooms often: what is compared takes turns every second or so.
_RATIO_ROOMS = 2
_RATIO_TURNS = 4
_LONE_ROOMS = 6


def _lengths(options: Options) -> list[Tokens]:
    swept = dict(options["sweep"]).get("tokens")
    return [Tokens(values=(value,)) for value in swept] if swept else [options["tokens"]]


def _ratio_load(options: Options) -> tuple[Load, ...]:
    """The longest prompt that is a single chunk."""
    lengths = sorted(max(length.values) for length in _lengths(options))
    most = max((length for length in lengths if length <= _RATIO_TOKENS), default=lengths[0])
    return (Load(1, Tokens(values=(most,)), _RATIO_ROOMS),)


def _crowded_loads(options: Options) -> tuple[Load, ...]:
    """Lone rooms and crowded ones of each prompt length."""
    lengths = _lengths(options)
    lone = [Load(1, length, _LONE_ROOMS) for length in lengths]
    return (*lone, *(Load(options["concurrency"], length) for length in lengths))


def _crowded(options: Options) -> Program:
    count = len(_lengths(options))
    return Ratios(tuple((count + at, 1.0) for at in range(count)), options["repeat"])


def _session_load(options: Options) -> tuple[Load, ...]:
    """The longest prompt, and as many rooms of it as move what all turns do: each moves what is new."""
    turn = max(options["tokens"].values) + options["output_tokens"]
    longest = Tokens(values=(turn * options["turns"],))
    return (Load(options["sessions"], longest, options["sessions"]),)


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
            Comparison(("concurrency", "CONC"), (_TOKENS_PER_S, _TTFT)),
        ),
        Preset(
            "staging-overhead",
            "what staging costs: TP4 to DP4 staged against DP4 to DP4, which needs none",
            {"sweep": (("concurrency", [1, 4, 16, 64]),)},
            Comparison(("concurrency", "CONC"), (_TOKENS_PER_S, _TTFT)),
            parts=(
                Part(
                    fleets=(
                        FleetOptions("homogeneous", {"prefill_dp": 4, "decode_dp": 4, "paths": ("bulk",)}),
                        FleetOptions("staged", {"prefill_tp": 4, "decode_dp": 4, "paths": ("staged",)}),
                    )
                ),
            ),
        ),
        *(
            Preset(
                f"p{prefill}d4",
                f"TP{prefill} to TP4 over the number of prompts, all at once, best of 4",
                {
                    "prefill_tp": prefill,
                    "decode_tp": 4,
                    "paths": paths,
                    "sweep": (("concurrency", [1 << power for power in range(10)]),),
                    "repeat": 4,
                },
                Comparison(
                    ("prompts", "PROMPTS"),
                    (Measure("tok/s", best_tokens_per_s, better="more"), Measure("TTFT", best_ttft, better="less")),
                ),
                rooms=lambda concurrency: concurrency,
            )
            for prefill, paths in ((2, ("slice", "staged")), (4, ("bulk", "staged")))
        ),
        Preset(
            "pipeline-sweep",
            "layer groups: exposed transfer against the model, then TTFT and throughput over prompt lengths",
            {
                # One rank a side: compute is simulated by waiting, so transfer alone should keep the cores busy.
                "layers": 30,  # as many make groups of one size, as the model of pipelining assumes
                "paths": ("staged",),
                "pipelines": ("off", "on", "measured"),
                "concurrency": 32,
                "sweep": (("tokens", [256 << power for power in range(7)]),),
            },
            PIPELINE,
            parts=(
                # Rooms so large that their transfer is long against what a part costs besides.
                Part(
                    name="at ratios",
                    loads=_ratio_load,
                    program=lambda options: Ratios(
                        tuple((0, ratio) for ratio in _RATIOS), _RATIO_TURNS * options["repeat"]
                    ),
                    laps=2 * _RATIO_TURNS * len(_RATIOS),
                    weight=4.0,
                ),
                Part(name="over lengths", loads=_crowded_loads, program=_crowded),
            ),
            rooms=lambda concurrency: concurrency,
            least={"layers": 30, "kv_heads": 2, "head_dim": 16, "tokens": 256},
            in_flight=8,
        ),
        Preset(
            "multi-turn",
            "16 conversations of 10 turns, each reusing what was said",
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
            parts=(Part(loads=_session_load),),
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
            parts=tuple(Part(fleets=(FleetOptions(f"cp{size}", {"prefill_cp": size}),)) for size in (2, 4)),
            within=("path",),
            rooms=lambda concurrency: max(24, concurrency),
        ),
    )
}
