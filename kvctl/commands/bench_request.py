"""Resolves the options of `kvctl bench` into plans of its fleets, and rejects contradictory options."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import click

from kvctl.commands.output import Output
from kvctl.lab.bench.machine import memory_budget_bytes
from kvctl.lab.bench.options import TRANSPORTS, sweep_loads
from kvctl.lab.bench.presets import ONE_FLEET, POINT_SECONDS, PRESETS, Preset, in_host_memory, on_gpus
from kvctl.lab.bench.trace import TraceError, read, scaled
from kvctl.lab.bench.traffic import Source, sessions, with_requests
from kvctl.lab.bench.trials import Program
from kvctl.lab.bench.variants import Variant, expand, waves
from kvctl.lab.ranks.plan import Plan
from kvctl.lab.ranks.planner import plan as make_plan
from kvctl.lab.ranks.request import Load, PlanRequest, Sizes, draw_arrivals

_TRACE_REQUESTS = 500
_TRACE_CONCURRENCY = 32
_TURNS = 10
_OUTPUT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Wave:
    """Fleets that run at the same time, and the program that each of them runs."""

    variants: tuple[Variant, ...]
    program: Program


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Options of one bench after presets and defaults were applied, and the fleets that result from them.

    Attributes:
        options: values by parameter name; values of the preset replace defaults.
        source: requests of --trace or --sessions; None if the requests are generated from --tokens.
        waves: the fleets to run, one wave after the other.
        notes: remarks for the user, such as the sizes of a preset in host memory.
    """

    options: Mapping[str, Any]
    preset: Preset | None
    source: Source | None
    waves: tuple[Wave, ...]
    notes: tuple[str, ...]

    @property
    def several(self) -> bool:
        """Whether the bench has more than one fleet."""
        return sum(len(wave.variants) for wave in self.waves) > 1


def resolve(options: Mapping[str, Any], given: Collection[str]) -> BenchRequest:
    """Applies presets and defaults to the options, and expands them into fleets.

    Args:
        options: Values by parameter name.
        given: Names of the parameters that are on the command line.

    Raises:
        click.UsageError: Options contradict each other, or a file cannot be used.
    """
    cuda = options["device"] == "cuda"
    preset = None
    if options["preset"]:
        preset = on_gpus(options["preset"], options["compute"]) if cuda else PRESETS[options["preset"]]
    notes: list[str] = []
    if preset is not None:
        if cuda:  # the plan limits rooms in flight to the GPUs' memory, and the time is limited
            chosen: Mapping[str, Any] = {**preset.options, "point_seconds": POINT_SECONDS}
        else:
            sets_lengths = not {"trace", "sessions"}.isdisjoint(given) or "tokens" in dict(options["sweep"])
            chosen, note = in_host_memory(preset, {*given, "tokens"} if sets_lengths else given)
            notes += [note] if note else []
        defaults = {name: value for name, value in chosen.items() if name not in given}
        if "sweep" in defaults:
            defaults["sweep"] = tuple((axis, values) for axis, values in defaults["sweep"] if axis not in given)
        options, given = {**options, **defaults}, {*given, *defaults}
    _check(options, given)
    seed = secrets.randbits(48) if options["seed"] is None else options["seed"]
    source, source_notes = _source(options, seed)
    notes += source_notes
    settled = _with_defaults(options, given, source)
    loads = _loads(preset, settled, source)
    resolved: list[Wave] = []
    for fleets in ONE_FLEET if preset is None else preset.fleets:
        variants: list[Variant] = []
        for each in fleets:
            merged = {**settled, **{name: value for name, value in each.options.items() if name not in given}}
            planned = _plan_request(merged, loads, seed, memory_budget_bytes())
            for variant in expand(planned, merged["transports"], merged["cp_modes"]):
                variants.append(replace(variant, fleet=each.label))
        resolved += [Wave(tuple(wave), _program(settled)) for wave in waves(variants)]
    return BenchRequest(options, preset, source, tuple(resolved), tuple(notes))


def plan_fleets(request: BenchRequest, output: Output) -> list[tuple[Wave, list[tuple[Variant, Plan]]]]:
    """Plans every fleet before any process is started, and prints the notes of the plans.

    Returns:
        The fleets of each wave, each with its plan.

    Raises:
        CliError: A fleet cannot be planned.
    """
    planned = []
    notes: dict[str, None] = {}
    for wave in request.waves:
        pairs = []
        for variant in wave.variants:
            plan = make_plan(variant.request)
            if request.source is not None:
                with_traffic = with_requests(variant.request, request.source, plan["shape"])
                variant, plan = replace(variant, request=with_traffic), make_plan(with_traffic)
            pairs.append((variant, plan))
            notes.update(dict.fromkeys(plan["notes"]))
        planned.append((wave, pairs))
    for note in notes:
        output.note(note)
    return planned


def _check(options: Mapping[str, Any], given: Collection[str]) -> None:
    """Raises click.BadParameter if options contradict each other."""
    if not options["transports"]:
        raise _refused("--transport", f"no value is given; allowed: {', '.join(TRANSPORTS)}")
    if options["trace"] is not None and options["sessions"] is not None:
        raise _refused("--trace", "the trace defines the requests: leave out --sessions")
    for needed, names in (("trace", ("speedup", "tokens_scale")), ("sessions", ("turns",))):
        for name in names:
            if name in given and options[needed] is None:
                raise _refused(f"--{name.replace('_', '-')}", f"requires --{needed}")
    if "cache_tokens" in given and options["trace"] is None and options["sessions"] is None:
        raise _refused("--cache-tokens", "requires --trace or --sessions")
    if options["trace"] is not None and "tokens" in given:
        raise _refused("--tokens", "the trace defines the lengths: scale them with --tokens-scale")
    if options["trace"] is not None or options["sessions"] is not None:
        if options["prefix_hit"]:
            raise _refused("--prefix-hit", "the requests determine the prefix hits")
        if "tokens" in dict(options["sweep"]):
            raise _refused("--sweep", "the requests define the lengths; only concurrency can be swept")
    if options["sessions"] is not None and not options["tokens"].values:
        raise _refused("--tokens", "with --sessions it is a length or a list of lengths, not a range")
    if options["sessions"] is not None and options["rooms"] is not None:
        raise _refused("--rooms", "their number is --sessions times --turns")
    if options["prefill_instances"] is not None:
        for axis in ("tp", "dp", "cp", "pp", "pp_layers"):
            if f"prefill_{axis}" in given:
                option = f"--prefill-{axis.replace('_', '-')}"
                raise _refused("--prefill-instances", f"it defines the sizes of every instance: leave out {option}")
    if "cp_interleave" in given and options["decode_cp"] < 2:
        raise _refused("--cp-interleave", "decode ranks share prompts only with --decode-cp 2 or more: add it")
    _check_device(options, given)
    for role in ("prefill", "decode"):
        stages, size = options[f"{role}_pp_layers"], options[f"{role}_pp"]
        if stages and f"{role}_pp" in given and size != len(stages):
            text = ",".join(map(str, stages))
            raise _refused(f"--{role}-pp-layers", f"{text} are {len(stages)} stages, but --{role}-pp is {size}")


def _check_device(options: Mapping[str, Any], given: Collection[str]) -> None:
    """Raises click.BadParameter for GPU options without --device cuda, and for --layer-ms with --compute gpu."""
    requires_cuda = (
        ("compute", options["compute"] == "gpu"),
        ("prefill_gpus", options["prefill_gpus"]),
        ("decode_gpus", options["decode_gpus"]),
        ("direct_sms", options["direct_sms"] is not None),
        ("path", "direct" in options["paths"]),
    )
    for name, wanted in requires_cuda:
        if wanted and options["device"] == "cpu":
            raise _refused(f"--{name.replace('_', '-')}", "requires KV pools on GPUs: add --device cuda")
    if options["compute"] == "gpu" and "layer_ms" in given:
        raise _refused("--layer-ms", "--compute gpu computes the layers for real: leave it out")


def _program(options: Mapping[str, Any]) -> Program:
    return Program(options["layer_ms"], options["repeat"], options["busy_engines"])


def _with_defaults(options: Mapping[str, Any], given: Collection[str], source: Source | None) -> dict[str, Any]:
    """Returns the options, completed with the defaults that depend on other options or on the requests of `source`."""
    settled = dict(options)
    if "concurrency" not in given:
        if options["sessions"] is not None:
            settled["concurrency"] = options["sessions"]
        elif options["trace"] is not None:
            settled["concurrency"] = _TRACE_CONCURRENCY
    if source is not None:
        settled["tokens"] = source.longest
    return settled


def _source(options: Mapping[str, Any], seed: int) -> tuple[Source | None, list[str]]:
    """Returns the requests of --trace or --sessions, or None without these options, and notes for the user."""
    notes: list[str] = []
    facts: dict[str, Any]
    if options["trace"] is not None:
        try:
            trace = read(options["trace"], options["rooms"] or _TRACE_REQUESTS)
        except TraceError as error:
            raise _refused("--trace", str(error)) from error
        notes = trace.notes
        if options["rooms"] is None and len(trace.requests) == _TRACE_REQUESTS:
            notes.append(f"the first {_TRACE_REQUESTS} requests of {trace.file}; --rooms N sets another number")
        speedup = options["speedup"]
        traffic = scaled(trace, options["tokens_scale"], speedup)
        facts = {
            "kind": "trace",
            "file": trace.file,
            "tokens_scale": float(options["tokens_scale"]),
            "speedup": None if math.isinf(speedup) else speedup,
            "skipped_lines": {str(number): why for number, why in trace.skipped.items()},
        }
    elif options["sessions"] is not None:
        turns = options["turns"] or _TURNS
        new_tokens = options["tokens"].values
        block_tokens = (options["decode_page_size"] or options["page_size"]) * options["decode_cp"]
        traffic = sessions(
            options["sessions"], turns, new_tokens, options["output_tokens"] or _OUTPUT_TOKENS, block_tokens
        )
        facts = {"kind": "sessions", "sessions": options["sessions"], "turns": turns}
    else:
        return None, notes
    if options["rate"] is not None:
        arrivals = draw_arrivals(options["rate"], len(traffic.prompts), seed)
        prompts = (replace(each, arrival_ms=at) for each, at in zip(traffic.prompts, arrivals, strict=True))
        traffic = replace(traffic, prompts=tuple(prompts))
    return Source(facts, traffic, options["cache_tokens"]), notes


def _loads(preset: Preset | None, options: Mapping[str, Any], source: Source | None) -> tuple[Load, ...]:
    """Returns the loads; those of a preset have as many rooms as the published table, unless --rooms is given."""
    try:
        loads = sweep_loads(options["concurrency"], options["tokens"], options["sweep"])
    except ValueError as error:
        raise _refused("--sweep", str(error)) from error
    if preset is None or source is not None:
        return loads
    return tuple(replace(load, rooms=options["rooms"] or preset.rooms(load.concurrency)) for load in loads)


def _plan_request(options: Mapping[str, Any], loads: tuple[Load, ...], seed: int, memory_bytes: int) -> PlanRequest:
    """Builds the request to the planner; `expand` adds the transports and CP modes."""
    prefill = options["prefill_instances"] or (_sizes(options, "prefill"),)
    decodes = options["decode_ms"] > 0
    alike = {field.name: options[field.name] for field in fields(PlanRequest) if field.name in options}
    given = {
        "prefill": prefill,
        "decode": _sizes(options, "decode"),
        "loads": loads,
        "memory_bytes": memory_bytes,
        "seed": seed,
        "states": options["states"] or None,
        "output_tokens": (options["output_tokens"] or _OUTPUT_TOKENS) if decodes else 0,
        "rate": options["rate"] or 0.0,
    }
    return PlanRequest(**{**alike, **given})


def _sizes(options: Mapping[str, Any], role: str) -> Sizes:
    stages = options[f"{role}_pp_layers"]
    sizes = {axis: options[f"{role}_{axis}"] for axis in ("dp", "pp", "cp", "tp")}
    return Sizes(**{**sizes, "pp": len(stages) or sizes["pp"]}, layers=stages)


def _refused(option: str, text: str) -> click.BadParameter:
    return click.BadParameter(text, param_hint=option)
