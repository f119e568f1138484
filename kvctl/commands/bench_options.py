"""Declares the options of `kvctl bench`, grouped for the help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import click

from kvctl.commands.options import KvctlCommand, Parsed
from kvctl.lab.bench.sglang_pairs import SIDES, UNDIVIDED, parse_sides
from kvctl.lab.ranks.request import (
    BUSY_ENGINES,
    CP_MODES,
    VERIFY_MODES,
    ComputeOptions,
    DeviceOptions,
    EngineOptions,
    Load,
    ModelOptions,
    Tokens,
    parse_choices,
    parse_instances,
    parse_names,
    parse_stages,
    parse_tokens,
    positive,
)
from kvctl_agent.contract.config import KEYS_BY_NAME

TRANSPORTS = KEYS_BY_NAME["transport"].choices
AXES = ("concurrency", "tokens")
_MAX_POINTS = 64
_AXES = {
    "tp": "attention tensor-parallel ranks",
    "dp": "data-parallel groups",
    "cp": "context-parallel ranks",
    "pp": "pipeline stages",
}
_FILE = click.Path(path_type=Path, dir_okay=False)
_COUNT = click.IntRange(min=1)
_POSITIVE = click.FloatRange(min=0, min_open=True)


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
        flags: The option's flag, followed by the parameter's name if that differs.
        parse: Parses a value; ValueError becomes a usage error that names the option.
    """
    if parse is not None:
        more["type"] = Parsed((metavar or "value").lower(), parse)
    shown = more.get("default") not in (None, "")
    return GroupedOption(flags.split(), group=group, metavar=metavar, help=text, show_default=shown, **more)


def bench_options() -> list[click.Parameter]:
    """Creates the options of `kvctl bench`, in the order of the help."""
    return [
        *_layout(),
        *_declared("Model", ModelOptions),
        *_load(),
        *_engine(),
        *_declared("GPUs", DeviceOptions),
        *_compute(),
        *_servers(),
        *_result(),
    ]


def _declared(group: str, part: type) -> list[click.Option]:
    """Creates the options that are declared by the fields of a part of `PlanRequest`."""
    hints = get_type_hints(part)
    return [_option_of(group, field, hints[field.name]) for field in fields(part)]


def _option_of(group: str, field: Field[Any], hint: Any) -> click.Option:
    declared = field.metadata
    default, metavar, parse = (declared[key] for key in ("default", "metavar", "parse"))
    more: dict[str, Any] = {"default": default}
    if parse is not None:
        more["multiple"] = not isinstance(default, str)
    elif "value" in declared:
        more |= {"is_flag": True, "flag_value": declared["value"]}
    elif metavar is None:
        more["type"] = click.Choice(declared["choices"])
    else:
        kinds, least = {hint, *get_args(hint)}, declared.get("least", 1)
        ranges = {int: click.IntRange, float: click.FloatRange}
        more["type"] = next((kind(min=least) for number, kind in ranges.items() if number in kinds), str)
    flag = declared.get("flag") or field.name.replace("_", "-")
    return grouped_option(group, f"--{flag} {field.name}", metavar, declared["text"], parse, **more)


def _layout() -> list[click.Option]:
    option = partial(grouped_option, "Layout")
    instances = "Several prefill instances at once, such as tp4,tp2:pp2,cp2; pp10+22 gives the layers of each stage."
    modes = "Division of the sending among CP ranks: rank0, all, all-chunk, room-hash; several are compared."
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
    ]


def _load() -> list[click.Option]:
    option = partial(grouped_option, "Load")
    tokens = "Prompt lengths: fixed, in turn, or uniform."
    rate = "Requests arrive at random, R per second, with at most --concurrency in flight."
    sweep = "concurrency=1,4,16 or tokens=256..16384 (powers of two). Repeatable."
    point = (
        "Stop each path at each load after about X seconds; a slow path then runs fewer rooms, with a note. "
        "[default: no limit]"
    )
    return [
        option("--tokens", "N|A,B,…|LO..HI", tokens, parse_tokens, default="1024"),
        option("--prefix-hit", None, "Part of each prompt that decode has cached.", default=0.0),
        option("--rooms", "N", "Requests per path. [default: enough for a stable result]", type=int),
        option("--concurrency", "N", "Requests in flight.", default=4),
        option("--rate", "R", rate, type=_POSITIVE),
        option("--sweep", "AXIS=A,B,…", sweep, parse_sweep, multiple=True),
        option("--repeat", "N", "Measure N times, in turns, and report the median.", type=_COUNT, default=1),
        option("--point-seconds", "X", point, type=_POSITIVE),
        option("--seed", "N", "Draw the same lengths, arrivals and pages as another run.", type=click.IntRange(min=0)),
    ]


def _engine() -> list[click.Option]:
    option = partial(grouped_option, "Engine")
    transports = "nixl, mooncake, or loopback, which needs no engine; several are compared."
    return [
        option("--transport transports", "A,B,…", transports, parse_names, default="nixl"),
        *_declared("Engine", EngineOptions),
    ]


def _compute() -> list[click.Option]:
    option = partial(grouped_option, "Compute")
    busy = (
        "Ranks whose engine thread runs Python between its calls, as a scheduler does: off, prefill, decode, both. "
        "prefill:spin runs short turns with brief releases of the interpreter, as an idle scheduler; prefill:launch "
        "launches for 22 ms at a time, as a forward; prefill:long sits in calls of 20 ms that release the interpreter. "
        "Several are compared. Use with --rate."
    )
    output = "Tokens decoded for each request. [default: 32 with --decode-ms or --engine sglang]"
    return [
        *_declared("Compute", ComputeOptions),
        option("--busy-engine busy_engines", "A,B,…", busy, parse_busy_engines, default="off"),
        option("--output-tokens", "N", output, type=_COUNT),
    ]


def _servers() -> list[click.Option]:
    option = partial(grouped_option, "Servers")
    engine = "sglang: real servers of the SGLang that is installed beside kvctl, in place of synthetic ranks."
    sides = (
        f"What is compared with the first of them: {', '.join(name for name in SIDES if name != UNDIVIDED)}; with "
        "/KEY=VALUE for variables of its servers, as kvctl/KVCTL_PATH=staged."
    )
    together = "Run the servers of all sides at the same time and measure in turns, where the memory suffices."
    return [
        option("--engine", None, engine, type=click.Choice(["synthetic", "sglang"]), default="synthetic"),
        option("--sides", "A,B,…", sides, parse_sides, default="nixl,kvctl"),
        option("--together", None, together, is_flag=True),
        option("--server-args", "TEXT", "Further flags of every server, as '--mem-fraction-static 0.7'.", default=""),
    ]


def _result() -> list[click.Option]:
    option = partial(grouped_option, "Result")
    verify = "Compare all received bytes, a sample, or none."
    html = "Write charts and the tables as one self-contained page."
    return [
        option("--verify", None, verify, type=click.Choice(VERIFY_MODES), default="full"),
        option("--plan plan_only", None, "Print what each rank would send to which, and start nothing.", is_flag=True),
        option("--save", "FILE", "Write the result as JSON.", type=_FILE),
        option("--html", "FILE", html, type=_FILE),
    ]


# ---- syntax of values; each function raises ValueError for a malformed value, with an example of a correct one ------


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """Parses a sweep into its axis and values: `concurrency=1,4,16`, or `tokens=256..16384`, doubling at each step."""
    axis, separator, values = text.partition("=")
    if not separator or axis not in AXES:
        raise ValueError(f"{text!r}: write {' or '.join(f'{axis}=1,4,16' for axis in AXES)}, or =1..1024")
    first, ranged, last = values.partition("..")
    if not ranged:
        points = [positive(word, text) for word in values.split(",")]
    else:
        low, high = positive(first, text), positive(last, text)
        if high < low:
            raise ValueError(f"{text!r}: the end of the range is below its start")
        points = []
        while low < high:
            points.append(low)
            low *= 2
        points.append(high)
    if len(points) > _MAX_POINTS:
        raise ValueError(f"{text!r}: {len(points)} points, at most {_MAX_POINTS}")
    return axis, list(dict.fromkeys(points))


def sweep_loads(concurrency: int, tokens: Tokens, sweeps: list[tuple[str, list[int]]]) -> tuple[Load, ...]:
    """Returns a load for every combination of swept values; an axis without a sweep keeps the value of its option."""
    axes = dict(sweeps)
    if len(axes) < len(sweeps):
        raise ValueError("each axis can be swept once")
    lengths = [Tokens(values=(value,)) for value in axes["tokens"]] if "tokens" in axes else [tokens]
    return tuple(Load(at, length) for length in lengths for at in axes.get("concurrency", [concurrency]))


def parse_cp_modes(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of CP modes (`CP_MODES`)."""
    return parse_choices(text, CP_MODES, lambda word: word in CP_MODES)


def parse_busy_engines(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of `BUSY_ENGINES`."""
    return parse_choices(text, BUSY_ENGINES, lambda word: word in BUSY_ENGINES)
