"""The options of `kvctl bench`, in groups: there are too many for one list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvctl.commands.options import KvctlCommand
from kvctl.lab.bench.options import (
    parse_bench_faults,
    parse_cp_modes,
    parse_gpus,
    parse_instances,
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
from kvctl.lab.ranks.request import COMPUTES, DEVICES, DTYPE_BYTES, PAGE_ORDERS, VERIFY_MODES

_AXES = {
    "tp": "attention tensor-parallel ranks",
    "dp": "data-parallel groups",
    "cp": "context-parallel ranks",
    "pp": "pipeline stages",
}
_FILE = click.Path(path_type=Path, dir_okay=False)
_COUNT = click.IntRange(min=1)
_MILLISECONDS = click.FloatRange(min=0)


class GroupedOption(click.Option):
    """An option that is listed under its group's title."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(KvctlCommand):
    """A command that lists its options group by group."""

    def sections(self, ctx: click.Context) -> list[tuple[str, list[click.Parameter]]]:
        groups: dict[str, list[click.Parameter]] = {}
        ungrouped: list[click.Parameter] = []
        for _, params in super().sections(ctx):
            for param in params:
                (groups.setdefault(param.group, []) if isinstance(param, GroupedOption) else ungrouped).append(param)
        return [*groups.items(), ("Help", ungrouped)]


def _reader(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A click callback that turns a ValueError into a usage error naming the option."""

    def read(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            if isinstance(value, tuple):
                return tuple(parse(each) for each in value)
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return read


def _option(group: str, *names: str, parse: Callable[[str], Any] | None = None, **more: Any) -> click.Option:
    if parse is not None:
        more["callback"] = _reader(parse)
    return GroupedOption(list(names), group=group, **more)


def _layout() -> list[click.Option]:
    group = "Layout"
    options = [
        _option(
            group, f"--{role}-{axis}", default=1, show_default=True, metavar="N", help=f"{role.capitalize()}: {text}."
        )
        for role in ("prefill", "decode")
        for axis, text in _AXES.items()
    ]
    return [
        *options,
        _option(
            group,
            "--prefill-instances",
            metavar="A,B,…",
            parse=parse_instances,
            help="Several prefill instances at once, such as tp4,tp2:pp2,cp2; pp10+22 gives layers of stages.",
        ),
        _option(
            group, "--prefill-pp-layers", default="", metavar="A,B,…", parse=parse_stages, help="Layers of each stage."
        ),
        _option(
            group, "--decode-pp-layers", default="", metavar="A,B,…", parse=parse_stages, help="The same for decode."
        ),
        _option(
            group,
            "--cp-mode",
            "cp_modes",
            default="rank0",
            show_default=True,
            metavar="A,B,…",
            parse=parse_cp_modes,
            help="How CP ranks share the sending: rank0, all, all-chunk, room-hash; several side by side.",
        ),
    ]


def _model() -> list[click.Option]:
    group = "Model"
    return [
        _option(group, "--model", metavar="NAME", help="A known model's KV shape. [default: llama-3.1-8b]"),
        _option(group, "--layers", type=int, metavar="N", help="Layers, in place of the model's."),
        _option(group, "--kv-heads", type=int, metavar="N", help="KV heads of the whole model."),
        _option(group, "--head-dim", type=int, metavar="N", help="Elements of one head's row of K, and of V."),
        _option(group, "--v-head-dim", type=int, metavar="N", help="Elements of V's rows, where they differ from K's."),
        _option(
            group, "--mla", is_flag=True, help="One latent row per token (of --head-dim), the same on all TP ranks."
        ),
        _option(group, "--dtype", metavar="|".join(DTYPE_BYTES), help="Element type. [default: the model's]"),
        _option(
            group,
            "--scale-bytes",
            default="",
            metavar="K[,V]",
            parse=parse_scale_bytes,
            help="Bytes of quantisation scale per page and head. [default: the type's]",
        ),
        _option(
            group, "--draft-layers", type=int, metavar="N", help="Layers of a draft model, in a pool of their own."
        ),
        _option(group, "--draft-heads", type=int, metavar="N", help="Its KV heads. [default: the model's]"),
        _option(group, "--draft-dim", type=int, metavar="N", help="Its head dim. [default: the model's]"),
        _option(
            group,
            "--state",
            "states",
            multiple=True,
            metavar="NAME:RxHxB",
            parse=parse_state,
            help="State per request, rows x heads x bytes: conv:4x1x256, swa:1x8x256:window=512, idx:1x1x132:pages. "
            "Repeatable.",
        ),
        _option(group, "--page-size", default=16, show_default=True, metavar="N", help="Tokens per page."),
        _option(group, "--page-order", default=PAGE_ORDERS[0], show_default=True, metavar="|".join(PAGE_ORDERS)),
    ]


def _load() -> list[click.Option]:
    group = "Load"
    return [
        _option(
            group,
            "--tokens",
            default="1024",
            show_default=True,
            metavar="N|A,B,…|LO..HI",
            parse=parse_tokens,
            help="Prompt lengths: fixed, in turn, or uniform. With --sessions: what each turn adds.",
        ),
        _option(
            group, "--prefix-hit", default=0.0, show_default=True, help="Part of each prompt that decode has cached."
        ),
        _option(
            group, "--rooms", type=int, metavar="N", help="Requests per path. [default: enough for a good measurement]"
        ),
        _option(group, "--concurrency", default=4, show_default=True, metavar="N", help="Requests in flight."),
        _option(
            group,
            "--rate",
            type=click.FloatRange(min=0, min_open=True),
            metavar="R",
            help="Requests arrive at random, R a second, with at most --concurrency in flight.",
        ),
        _option(
            group,
            "--sweep",
            multiple=True,
            metavar="AXIS=A,B,…",
            parse=parse_sweep,
            help="concurrency=1,4,16 or tokens=256..16384 (powers of two). Repeatable.",
        ),
        _option(
            group,
            "--repeat",
            default=1,
            show_default=True,
            metavar="N",
            type=_COUNT,
            help="Measure N times, in turns: median, best.",
        ),
        _option(
            group,
            "--point-seconds",
            type=click.FloatRange(min=0, min_open=True),
            metavar="X",
            help="Stop each path at each load after about so long: a slow one runs fewer rooms, which is said. "
            "[default: no limit; 5 with --preset and --device cuda]",
        ),
        _option(
            group,
            "--seed",
            type=click.IntRange(min=0),
            metavar="N",
            help="Draw lengths, arrivals and pages as another run did.",
        ),
        _option(
            group,
            "--preset",
            type=click.Choice(list(PRESETS)),
            metavar="NAME",
            help="A published table: " + ", ".join(PRESETS) + ".",
        ),
    ]


def _traffic() -> list[click.Option]:
    group = "Real traffic"
    return [
        _option(
            group,
            "--trace",
            type=_FILE,
            metavar="FILE",
            help="Replay requests in Mooncake's format; --rooms: the first N.",
        ),
        _option(
            group,
            "--tokens-scale",
            default="1",
            show_default=True,
            metavar="X",
            parse=parse_scale,
            help="Scale its lengths.",
        ),
        _option(
            group,
            "--speedup",
            default=1.0,
            show_default=True,
            type=click.FloatRange(min=0, min_open=True),
            metavar="X",
            help="Replay it so much faster; inf: as fast as --concurrency allows.",
        ),
        _option(group, "--strict", is_flag=True, help="Stop at a line that does not parse, instead of skipping it."),
        _option(
            group, "--sessions", type=_COUNT, metavar="N", help="N conversations, each turn reusing what was said."
        ),
        _option(group, "--turns", type=_COUNT, metavar="N", help="Turns of each conversation. [default: 10]"),
        _option(
            group,
            "--cache-tokens",
            type=click.IntRange(min=0),
            metavar="N",
            help="Prefix cache of each decode dp group. [default: half of what memory holds]",
        ),
    ]


def _engine() -> list[click.Option]:
    group = "Engine"
    return [
        _option(
            group,
            "--transport",
            "transports",
            default="nixl",
            show_default=True,
            metavar="A,B,…",
            parse=parse_names,
            help="nixl, mooncake, or loopback where no engine is installed; several side by side.",
        ),
        _option(
            group,
            "--path",
            "paths",
            default="",
            metavar="A,B,…",
            parse=parse_names,
            help="Paths to compare side by side: bulk, slice, staged, direct (between GPUs), auto. [default: those "
            "that suit the layouts]",
        ),
        _option(
            group,
            "--ring-mb",
            type=int,
            metavar="N",
            help="Staging ring of each decode rank. [default: what the load needs]",
        ),
        _option(group, "--chunk-tokens", type=int, metavar="N", help="Tokens per chunk of the grid. [default: 8192]"),
        _option(group, "--workers", type=int, metavar="N", help="Transfer workers per prefill rank."),
    ]


def _device() -> list[click.Option]:
    group = "GPUs"
    return [
        _option(
            group,
            "--device",
            type=click.Choice(DEVICES),
            default=DEVICES[0],
            show_default=True,
            help="Where KV pools and staging are: host memory, or the memory of NVIDIA GPUs.",
        ),
        _option(
            group,
            "--prefill-gpus",
            default="",
            metavar="A,B,…",
            parse=parse_gpus,
            help="Numbers of the GPUs that prefill ranks take in turn; 0,0 is the same as 0. [default: the first half]",
        ),
        _option(
            group,
            "--decode-gpus",
            default="",
            metavar="A,B,…",
            parse=parse_gpus,
            help="The same for decode ranks. [default: the other half; the same GPU where there is one]",
        ),
        _option(
            group,
            "--direct-sms",
            type=_COUNT,
            metavar="N",
            help="Multiprocessors that a copy on path direct may take from compute. [default: the agent's]",
        ),
    ]


def _compute() -> list[click.Option]:
    group = "Compute"
    return [
        _option(
            group,
            "--compute",
            type=click.Choice(COMPUTES),
            default=COMPUTES[0],
            show_default=True,
            help="What stands for a forward: a pause of --layer-ms, or the model's matrix products and attention on "
            "the prefill GPU.",
        ),
        _option(
            group,
            "--pipeline",
            "pipelines",
            default="off",
            show_default=True,
            metavar="A,B,…",
            parse=parse_pipelines,
            help="Send layer groups while later layers are computed: off, on, measured, or layers per group; several "
            "side by side.",
        ),
        _option(
            group,
            "--layer-ms",
            default=0.0,
            show_default=True,
            metavar="X",
            type=_MILLISECONDS,
            help="Time per layer and chunk.",
        ),
        _option(
            group,
            "--decode-ms",
            default=0.0,
            show_default=True,
            metavar="X",
            type=_MILLISECONDS,
            help="Time per decode step.",
        ),
        _option(
            group,
            "--output-tokens",
            type=_COUNT,
            metavar="N",
            help="Tokens decoded for each request. [default: 32 with --decode-ms]",
        ),
    ]


def _result() -> list[click.Option]:
    group = "Result"
    return [
        _option(
            group,
            "--verify",
            type=click.Choice(VERIFY_MODES),
            default="full",
            show_default=True,
            help="How much is compared.",
        ),
        _option(
            group, "--plan", "plan_only", is_flag=True, help="Print who would send what to whom, and move nothing."
        ),
        _option(group, "--save", type=_FILE, metavar="FILE", help="Write the result as JSON."),
        _option(
            group,
            "--html",
            type=_FILE,
            metavar="FILE",
            help="Write a report with plots: one page that needs nothing else.",
        ),
        _option(group, "--baseline", type=_FILE, metavar="FILE", help="Compare with a saved result: PASS or FAIL."),
        _option(
            group,
            "--max-regress",
            default="5%",
            show_default=True,
            metavar="PERCENT",
            parse=parse_percent,
            help="GB/s that may be missing against the baseline.",
        ),
        _option(
            group,
            "--faults",
            metavar="SPEC,…",
            parse=parse_bench_faults,
            default="",
            help="Faults to go through, such as abort=10%,control-loss=5%,pause=decode-1@2s+3s; rooms that fail by "
            "them are counted apart.",
        ),
        _option(
            group,
            "--observe",
            is_flag=True,
            help="Run everything twice, in turns: alone, and watched by kvctl top and kvctl status -w 0.1; say what "
            "that costs. Take --repeat 5.",
        ),
        _option(group, "--hold", is_flag=True, help="Keep the fleet up under light traffic afterwards, until Ctrl-C."),
    ]


def bench_options() -> list[click.Parameter]:
    """Fresh parameters in the order of the help."""
    return [*_layout(), *_model(), *_load(), *_traffic(), *_engine(), *_device(), *_compute(), *_result()]
