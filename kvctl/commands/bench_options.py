"""Declares the options of `kvctl bench`, grouped for the help."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvctl.commands.options import KvctlCommand
from kvctl.lab.bench.options import (
    parse_bench_faults,
    parse_busy_engines,
    parse_cp_modes,
    parse_gpus,
    parse_instances,
    parse_kv_group,
    parse_kv_layouts,
    parse_names,
    parse_percent,
    parse_pipelines,
    parse_scale,
    parse_scale_bytes,
    parse_stages,
    parse_state,
    parse_sweep,
    parse_tokens,
)
from kvctl.lab.bench.presets import PRESETS
from kvctl.lab.ranks.request import COMPUTES, DEVICES, DTYPE_BYTES, KV_LAYOUTS, PAGE_ORDERS, VERIFY_MODES

_AXES = {
    "tp": "attention tensor-parallel ranks",
    "dp": "data-parallel groups",
    "cp": "context-parallel ranks",
    "pp": "pipeline stages",
}
_FILE = click.Path(path_type=Path, dir_okay=False)
_COUNT = click.IntRange(min=1)
_POSITIVE = click.FloatRange(min=0, min_open=True)
_MILLISECONDS = click.FloatRange(min=0)


class GroupedOption(click.Option):
    """Option that the help lists under the title of its group."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(KvctlCommand):
    """Command whose help lists the options by group."""

    def sections(self, ctx: click.Context) -> list[tuple[str, list[click.Parameter]]]:
        groups: dict[str, list[click.Parameter]] = {}
        ungrouped: list[click.Parameter] = []
        for _, params in super().sections(ctx):
            for param in params:
                (groups.setdefault(param.group, []) if isinstance(param, GroupedOption) else ungrouped).append(param)
        return [*groups.items(), ("Help", ungrouped)]


def grouped_option(
    group: str,
    flags: str,
    metavar: str | None = None,
    text: str | None = None,
    parse: Callable[[str], Any] | None = None,
    **more: Any,
) -> click.Option:
    """Returns an option of a group.

    Args:
        group: Title of the group in the help.
        flags: The option's flag, followed by the parameter's name if that differs.
        text: The help text; defaults that are computed are part of it.
        parse: Parses a value; ValueError becomes a usage error that names the option.
    """
    if parse is not None:
        more["callback"] = partial(_parsed, parse)
    shown = more.get("default") not in (None, "")
    return GroupedOption(flags.split(), group=group, metavar=metavar, help=text, show_default=shown, **more)


def bench_options() -> list[click.Parameter]:
    """Creates the options of `kvctl bench`, in the order of the help."""
    return [*_layout(), *_model(), *_load(), *_traffic(), *_engine(), *_gpus(), *_compute(), *_result()]


def _parsed(parse: Callable[[str], Any], ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    try:
        if isinstance(value, tuple):
            return tuple(parse(each) for each in value)
        return None if value is None else parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _layout() -> list[click.Option]:
    option = partial(grouped_option, "Layout")
    instances = "Several prefill instances at once, such as tp4,tp2:pp2,cp2; pp10+22 gives the layers of each stage."
    modes = "Division of the sending among CP ranks: rank0, all, all-chunk, room-hash; several are compared."
    interleave = "Consecutive tokens of a prompt on each of the --decode-cp ranks that share it."
    return [
        *(
            option(f"--{role}-{axis}", "N", f"{role.capitalize()}: {text}.", default=1)
            for role in ("prefill", "decode")
            for axis, text in _AXES.items()
        ),
        option("--prefill-instances", "A,B,…", instances, parse_instances),
        option("--prefill-pp-layers", "A,B,…", "Layers of each stage.", parse_stages, default=""),
        option("--decode-pp-layers", "A,B,…", "The same for decode.", parse_stages, default=""),
        option("--cp-mode cp_modes", "A,B,…", modes, parse_cp_modes, default="rank0"),
        option("--cp-interleave", "TOKENS", interleave, default=1),
    ]


def _model() -> list[click.Option]:
    option = partial(grouped_option, "Model")
    scales = "Bytes of quantisation scale per page and head. [default: the element type's]"
    state = (
        "State per request, rows x heads x bytes: conv:4x1x256, swa:1x8x256:window=512, idx:1x1x132:pages. Repeatable."
    )
    groups = (
        "Layers with page tables of their own, as swa:layers=16,page=16,window=1024: decode receives the pages of the "
        "window at the end of a prompt, without window all; heads=N and dim=N if unlike the model's. Repeatable."
    )
    layouts = f"Order of the axes in the KV pools, of both sides or of each: {', '.join(KV_LAYOUTS)}."
    return [
        option("--model", "NAME", "A known model's KV shape. [default: llama-3.1-8b]"),
        option("--layers", "N", "Layers. [default: the model's]", type=int),
        option("--kv-heads", "N", "KV heads of the whole model.", type=int),
        option("--head-dim", "N", "Elements per head of a row of K, and of V.", type=int),
        option("--v-head-dim", "N", "Elements per head of a row of V, if they differ from K's.", type=int),
        option("--mla", None, "One latent row per token (of --head-dim), the same on all TP ranks.", is_flag=True),
        option("--dtype", "|".join(DTYPE_BYTES), "Element type. [default: the model's]"),
        option("--scale-bytes", "K[,V]", scales, parse_scale_bytes, default=""),
        option("--draft-layers", "N", "Layers of a draft model, in a pool of their own.", type=int),
        option("--draft-heads", "N", "KV heads of the draft model. [default: the model's]", type=int),
        option("--draft-dim", "N", "Head dim of the draft model. [default: the model's]", type=int),
        option("--state states", "NAME:RxHxB", state, parse_state, multiple=True),
        option("--kv-group groups", "NAME:FIELD=N,…", groups, parse_kv_group, multiple=True),
        option("--page-size", "N", "Tokens per page.", default=16),
        option("--prefill-page-size", "N", "Tokens per page of the prefill side. [default: --page-size]", type=int),
        option("--decode-page-size", "N", "The same for decode; the smaller page divides the larger.", type=int),
        option("--kv-layout kv_layouts", "PREFILL[,DECODE]", layouts, parse_kv_layouts, default="nhd"),
        option("--page-order", "|".join(PAGE_ORDERS), "Order of a room's pages in the pools.", default=PAGE_ORDERS[0]),
    ]


def _load() -> list[click.Option]:
    option = partial(grouped_option, "Load")
    tokens = "Prompt lengths: fixed, in turn, or uniform. With --sessions: tokens that each turn adds."
    rate = "Requests arrive at random, R per second, with at most --concurrency in flight."
    sweep = "concurrency=1,4,16 or tokens=256..16384 (powers of two). Repeatable."
    point = (
        "Stop each path at each load after about X seconds; a slow path then runs fewer rooms, with a note. "
        "[default: no limit; 5 with --preset and --device cuda]"
    )
    presets = f"A published table: {', '.join(PRESETS)}."
    return [
        option("--tokens", "N|A,B,…|LO..HI", tokens, parse_tokens, default="1024"),
        option("--prefix-hit", None, "Part of each prompt that decode has cached.", default=0.0),
        option("--rooms", "N", "Requests per path. [default: enough for a stable result]", type=int),
        option("--concurrency", "N", "Requests in flight.", default=4),
        option("--rate", "R", rate, type=_POSITIVE),
        option("--sweep", "AXIS=A,B,…", sweep, parse_sweep, multiple=True),
        option(
            "--repeat", "N", "Measure N times, in turns, and report the median and the best.", type=_COUNT, default=1
        ),
        option("--point-seconds", "X", point, type=_POSITIVE),
        option("--seed", "N", "Draw the same lengths, arrivals and pages as another run.", type=click.IntRange(min=0)),
        option("--preset", "NAME", presets, type=click.Choice(list(PRESETS))),
    ]


def _traffic() -> list[click.Option]:
    option = partial(grouped_option, "Real traffic")
    trace = "Replay requests in Mooncake's format; --rooms limits them to the first N."
    speedup = "Divide the arrival times by X; inf: as fast as --concurrency allows."
    cache = "Prefix cache of each decode dp group. [default: half of its memory]"
    return [
        option("--trace", "FILE", trace, type=_FILE),
        option("--tokens-scale", "X", "Multiply the trace's lengths by X.", parse_scale, default="1"),
        option("--speedup", "X", speedup, default=1.0, type=_POSITIVE),
        option("--strict", None, "Stop at a line that does not parse, instead of skipping it.", is_flag=True),
        option("--sessions", "N", "N conversations; each turn reuses the previous ones.", type=_COUNT),
        option("--turns", "N", "Turns of each conversation. [default: 10]", type=_COUNT),
        option("--cache-tokens", "N", cache, type=click.IntRange(min=0)),
    ]


def _engine() -> list[click.Option]:
    option = partial(grouped_option, "Engine")
    transports = "nixl, mooncake, or loopback, which needs no engine; several are compared."
    paths = "Paths to compare: bulk, slice, staged, direct (between GPUs), auto. [default: those that suit the layouts]"
    ring = "Staging ring of each decode rank. [default: sized for the load]"
    return [
        option("--transport transports", "A,B,…", transports, parse_names, default="nixl"),
        option("--path paths", "A,B,…", paths, parse_names, default=""),
        option("--ring-mb", "N", ring, type=int),
        option("--chunk-tokens", "N", "Tokens per chunk of the grid. [default: 8192]", type=int),
    ]


def _gpus() -> list[click.Option]:
    option = partial(grouped_option, "GPUs")
    device = "Memory of KV pools and staging: host memory, or that of NVIDIA GPUs."
    prefill = "GPU numbers that prefill ranks take in turn; 0,0 is the same as 0. [default: the first half]"
    decode = "The same for decode ranks. [default: the other half; the same GPU if there is only one]"
    sms = "Multiprocessors that a copy on path direct may use. [default: the agent's]"
    return [
        option("--device", None, device, type=click.Choice(DEVICES), default=DEVICES[0]),
        option("--prefill-gpus", "A,B,…", prefill, parse_gpus, default=""),
        option("--decode-gpus", "A,B,…", decode, parse_gpus, default=""),
        option("--direct-sms", "N", sms, type=_COUNT),
    ]


def _compute() -> list[click.Option]:
    option = partial(grouped_option, "Compute")
    compute = (
        "Simulation of a forward: a pause of --layer-ms, or the model's matrix products and attention on the prefill "
        "GPU."
    )
    pipeline = (
        "Send layer groups while later layers are computed: off, on, measured, or layers per group; several are "
        "compared."
    )
    busy = (
        "Ranks whose engine thread runs Python between its calls, as a scheduler does: off, prefill, decode, both; "
        "several are compared. Use with --rate."
    )
    output = "Tokens decoded for each request. [default: 32 with --decode-ms]"
    return [
        option("--compute", None, compute, type=click.Choice(COMPUTES), default=COMPUTES[0]),
        option("--pipeline pipelines", "A,B,…", pipeline, parse_pipelines, default="off"),
        option("--busy-engine busy_engines", "A,B,…", busy, parse_busy_engines, default="off"),
        option("--layer-ms", "X", "Compute time per layer and chunk.", type=_MILLISECONDS, default=0.0),
        option("--decode-ms", "X", "Time per decode step.", type=_MILLISECONDS, default=0.0),
        option("--output-tokens", "N", output, type=_COUNT),
    ]


def _result() -> list[click.Option]:
    option = partial(grouped_option, "Result")
    verify = "Compare all received bytes, a sample, or none."
    html = "Write a report with charts as one self-contained page."
    faults = (
        "Faults to inject, such as abort=10%,control-loss=5%,pause=decode-1@2s+3s; rooms that fail because of them are "
        "counted separately."
    )
    observe = (
        "Run everything twice, in turns: alone, and watched by kvctl top and kvctl status -w 0.1; report the cost. "
        "Use with --repeat 5."
    )
    regress = (
        "Allowed loss of GB/s against --baseline. FAIL: the spreads of both results are farther apart; UNDECIDED, with "
        "exit status 0: more is lost, but the spreads are not so far apart even after more rounds, so it may be noise."
    )
    hold = "Keep the fleet running under light traffic afterwards, until Ctrl-C."
    return [
        option("--verify", None, verify, type=click.Choice(VERIFY_MODES), default="full"),
        option("--plan plan_only", None, "Print what each rank would send to which, and start nothing.", is_flag=True),
        option("--save", "FILE", "Write the result as JSON.", type=_FILE),
        option("--html", "FILE", html, type=_FILE),
        option("--baseline", "FILE", "Compare with a saved result: PASS, FAIL or UNDECIDED.", type=_FILE),
        option("--max-regress", "PERCENT", regress, parse_percent, default="5%"),
        option("--faults", "SPEC,…", faults, parse_bench_faults, default=""),
        option("--observe", None, observe, is_flag=True),
        option("--hold", None, hold, is_flag=True),
    ]
