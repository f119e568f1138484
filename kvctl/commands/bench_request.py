"""From the options of `kvctl bench` to what its fleets are asked to do; what contradicts itself is refused by name."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from kvctl.lab.bench import scale
from kvctl.lab.bench.gpu_presets import POINT_S, on_gpus
from kvctl.lab.bench.machine import cores, memory_budget_bytes
from kvctl.lab.bench.options import TRANSPORTS, sweep_loads
from kvctl.lab.bench.presets import PRESETS, Part, Preset
from kvctl.lab.bench.program import Program
from kvctl.lab.bench.prompts import poisson, sessions
from kvctl.lab.bench.trace import TraceError, read, scaled
from kvctl.lab.bench.traffic import Source
from kvctl.lab.bench.variants import Variant, expand, waves
from kvctl.lab.ranks.request import Load, PlanRequest, Sizes, Tokens

_TRACE_REQUESTS = 500
_TRACE_CONCURRENCY = 32
_TURNS = 10
_OUTPUT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Fleets:
    """Fleets that are alive together, and what each of them measures."""

    variants: tuple[Variant, ...]
    program: Program


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Everything that the options ask for.

    Attributes:
        options: as given, with a preset's in place of defaults.
        notes: what people should know of how they were understood.
    """

    options: Mapping[str, Any]
    preset: Preset | None
    source: Source | None
    waves: tuple[Fleets, ...]
    notes: tuple[str, ...]

    @property
    def several(self) -> bool:
        """Whether there is more than one fleet."""
        return sum(len(wave.variants) for wave in self.waves) > 1


def understand(options: Mapping[str, Any], given: Collection[str]) -> BenchRequest:
    """Resolve options.

    Args:
        options: values by parameter name.
        given: names of those that were given on the command line.

    Raises:
        click.UsageError: some contradict each other, or a file cannot be used.
    """
    cuda = options["device"] == "cuda"
    preset = None
    if options["preset"]:
        preset = on_gpus(options["preset"], options["compute"]) if cuda else PRESETS[options["preset"]]
    notes: list[str] = []
    parts = [(Part(), options)]
    if preset is not None:
        mine = {name: value for name, value in preset.options.items() if name not in given}
        if "sweep" in mine:
            mine["sweep"] = tuple((axis, values) for axis, values in mine["sweep"] if axis not in given)
        if cuda:  # the plan limits what GPUs do not hold; time is what a slow path would run out of
            mine |= {} if "point_seconds" in given else {"point_seconds": POINT_S}
            fitted: list[tuple[Part, Mapping[str, Any], str]]
            fitted = [(part, {**options, **mine}, "") for part in preset.parts]
        else:
            fitted = [(part, *_scaled(preset, part, {**options, **mine}, given)) for part in preset.parts]
        parts = [(part, scaled) for part, scaled, _ in fitted]
        notes += [note for note in dict.fromkeys(note for _, _, note in fitted) if note]
        options, given = parts[0][1], {*given, *mine}
    _check(options, given)
    seed = secrets.randbits(48) if options["seed"] is None else options["seed"]
    source, remarks = _source(options, given, seed)
    notes += remarks
    fleets = []
    for part, its in parts:
        settled = _settled(its, given, source)
        loads = _loads(preset, part, settled, source)
        variants: list[Variant] = []
        for each in part.fleets:
            merged = {**settled, **{name: value for name, value in each.options.items() if name not in given}}
            request = _request(merged, loads, seed, _memory(preset))
            for variant in expand(request, merged["transports"], merged["cp_modes"]):
                variants.append(replace(variant, fleet=each.label))
        fleets += [Fleets(tuple(wave), part.program(settled)) for wave in waves([variants])]
    asked = BenchRequest(options, preset, source, tuple(fleets), tuple(notes))
    if options["hold"] and asked.several:
        raise _wrong("--hold", "one fleet can be held, and this bench has several: leave it out, or compare nothing")
    return asked


def _check(options: Mapping[str, Any], given: Collection[str]) -> None:
    """Refuse what contradicts itself."""
    if not options["transports"]:
        raise _wrong("--transport", f"nothing is named; allowed: {', '.join(TRANSPORTS)}")
    if options["trace"] is not None and options["sessions"] is not None:
        raise _wrong("--trace", "a trace is its own traffic: leave out --sessions")
    for needed, names in (("trace", ("speedup", "tokens_scale", "strict")), ("sessions", ("turns",))):
        for name in names:
            if name in given and options[needed] is None:
                raise _wrong(f"--{name.replace('_', '-')}", f"it needs --{needed}")
    if "cache_tokens" in given and options["trace"] is None and options["sessions"] is None:
        raise _wrong("--cache-tokens", "it needs --trace or --sessions")
    if options["trace"] is not None and "tokens" in given:
        raise _wrong("--tokens", "the trace gives the lengths: scale them with --tokens-scale")
    if options["trace"] is not None or options["sessions"] is not None:
        if options["prefix_hit"]:
            raise _wrong("--prefix-hit", "the requests give the prefix hits")
        if "tokens" in dict(options["sweep"]):
            raise _wrong("--sweep", "the requests give the lengths; concurrency can be swept")
    if options["sessions"] is not None and not options["tokens"].values:
        raise _wrong("--tokens", "turns add a length or a list of lengths, not a range")
    if options["sessions"] is not None and options["rooms"] is not None:
        raise _wrong("--rooms", "there are as many as --sessions times --turns")
    if options["prefill_instances"] is not None:
        for axis in ("tp", "dp", "cp", "pp", "pp_layers"):
            if f"prefill_{axis}" in given:
                option = f"--prefill-{axis.replace('_', '-')}"
                raise _wrong("--prefill-instances", f"it gives the sizes of every instance: leave out {option}")
    _check_device(options, given)
    for role in ("prefill", "decode"):
        stages, size = options[f"{role}_pp_layers"], options[f"{role}_pp"]
        if stages and f"{role}_pp" in given and size != len(stages):
            text = ",".join(map(str, stages))
            raise _wrong(f"--{role}-pp-layers", f"{text} are {len(stages)} stages, but --{role}-pp is {size}")


def _check_device(options: Mapping[str, Any], given: Collection[str]) -> None:
    """Refuse what needs GPUs where there are to be none, and compute of two kinds at once."""
    needs_cuda = (
        ("compute", options["compute"] == "gpu"),
        ("prefill_gpus", options["prefill_gpus"]),
        ("decode_gpus", options["decode_gpus"]),
        ("direct_sms", options["direct_sms"] is not None),
        ("path", "direct" in options["paths"]),
    )
    for name, wanted in needs_cuda:
        if wanted and options["device"] == "cpu":
            raise _wrong(f"--{name.replace('_', '-')}", "it needs KV on GPUs: add --device cuda")
    if options["compute"] == "gpu" and "layer_ms" in given:
        raise _wrong("--layer-ms", "with --compute gpu layers take what they take: leave it out")


def _settled(options: Mapping[str, Any], given: Collection[str], source: Source | None) -> dict[str, Any]:
    """The options with the defaults that depend on others."""
    settled = dict(options)
    if "concurrency" not in given:
        if options["sessions"] is not None:
            settled["concurrency"] = options["sessions"]
        elif options["trace"] is not None:
            settled["concurrency"] = _TRACE_CONCURRENCY
    if source is not None:
        settled["tokens"] = source.longest
    return settled


def _source(options: Mapping[str, Any], given: Collection[str], seed: int) -> tuple[Source | None, list[str]]:
    """The trace or the sessions that were asked for, and what should be said about them."""
    notes: list[str] = []
    facts: dict[str, Any]
    if options["trace"] is not None:
        try:
            trace = read(options["trace"], options["rooms"] or _TRACE_REQUESTS, options["strict"])
        except TraceError as error:
            raise _wrong("--trace", str(error)) from error
        notes = trace.notes
        if options["rooms"] is None and len(trace.requests) == _TRACE_REQUESTS:
            notes.append(f"the first {_TRACE_REQUESTS} requests of {trace.file}; --rooms N takes more, or fewer")
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
        traffic = sessions(
            options["sessions"], turns, new_tokens, options["output_tokens"] or _OUTPUT_TOKENS, options["page_size"]
        )
        facts = {"kind": "sessions", "sessions": options["sessions"], "turns": turns}
    else:
        return None, notes
    if options["rate"] is not None:
        traffic = replace(traffic, prompts=poisson(traffic.prompts, options["rate"], seed))
    return Source(facts, traffic, options["cache_tokens"]), notes


def _loads(preset: Preset | None, part: Part, options: Mapping[str, Any], source: Source | None) -> tuple[Load, ...]:
    try:
        if preset is not None and source is None:
            return _filled(preset, options, part.loads(options))
        return sweep_loads(options["concurrency"], options["tokens"], options["sweep"])
    except ValueError as error:
        raise _wrong("--sweep", str(error)) from error


def _filled(preset: Preset, options: Mapping[str, Any], loads: Sequence[Load]) -> tuple[Load, ...]:
    """A preset's loads with the number of rooms that was given, or else is published."""
    return tuple(
        replace(load, rooms=options["rooms"] or load.rooms or preset.rooms(load.concurrency)) for load in loads
    )


def _scaled(
    preset: Preset, part: Part, options: Mapping[str, Any], given: Collection[str]
) -> tuple[Mapping[str, Any], str]:
    """The options with the load of one of a preset's parts made to fit, and the remark on it."""
    geometry = ("layers", "kv_heads", "head_dim")
    wanted = scale.published(options["model"], {name: options[name] for name in geometry})
    if wanted is None:
        return options, ""
    kept = {*given, *(["tokens"] if "sweep" in given else [])}
    least = {name: size for name, size in preset.least.items() if name not in kept}
    together = len(part.fleets) * len(options["transports"]) * len(options["cp_modes"])
    limits = scale.Limits(
        memory_bytes=_memory(preset) // together,
        moved_bytes=round(cores() * scale.MOVED_PER_CORE_BYTES * part.weight),
        in_flight=preset.in_flight,
        # Every context-parallel rank has all of a room's KV.
        copies=1 + max(fleet.options.get("prefill_cp", options["prefill_cp"]) for fleet in part.fleets),
    )
    found = scale.fit(
        wanted,
        least,
        loads=lambda divisor: _filled(preset, options, part.loads(_shortened(options, divisor))),
        cases=together * max(1, len(options["paths"])) * len(options["pipelines"]) * options["repeat"] * part.laps,
        dtype=options["dtype"],
        limits=limits,
    )
    changed = {name: getattr(found, name) for name in geometry if getattr(found, name) != getattr(wanted, name)}
    name = f"{preset.name} {part.name}".strip()
    return {**_shortened(options, found.tokens), **changed}, scale.remark(name, wanted, found)


def _memory(preset: Preset | None) -> int:
    """Memory for all pools and rings."""
    budget = memory_budget_bytes()
    return min(budget, cores() * scale.MEMORY_PER_CORE_BYTES) if preset else budget


def _shortened(options: Mapping[str, Any], divisor: int) -> Mapping[str, Any]:
    """The options with every prompt length divided."""
    tokens: Tokens = options["tokens"]
    sweep = tuple(
        (axis, list(dict.fromkeys(max(1, value // divisor) for value in values)) if axis == "tokens" else values)
        for axis, values in options["sweep"]
    )
    values = tuple(max(1, value // divisor) for value in tokens.values)
    return {**options, "sweep": sweep, "tokens": Tokens(values, tokens.low // divisor, tokens.high // divisor)}


def _request(options: Mapping[str, Any], loads: tuple[Load, ...], seed: int, memory_bytes: int) -> PlanRequest:
    """What is asked of the planner for the first transport and CP mode."""
    prefill = options["prefill_instances"] or (_sizes(options, "prefill"),)
    k_scale_bytes, v_scale_bytes = options["scale_bytes"]
    decodes = options["decode_ms"] > 0
    same = (
        "model layers kv_heads head_dim v_head_dim dtype draft_layers draft_heads draft_dim page_size page_order "
        "prefix_hit rooms paths ring_mb chunk_tokens workers pipelines layer_ms decode_ms "
        "device compute prefill_gpus decode_gpus direct_sms"
    )
    return PlanRequest(
        prefill=prefill,
        decode=_sizes(options, "decode"),
        loads=loads,
        memory_bytes=memory_bytes,
        seed=seed,
        kind="mla" if options["mla"] else None,
        k_scale_bytes=k_scale_bytes,
        v_scale_bytes=v_scale_bytes,
        states=options["states"] or None,
        output_tokens=(options["output_tokens"] or _OUTPUT_TOKENS) if decodes else 0,
        rate=options["rate"] or 0.0,
        faults=tuple(fault.text for fault in options["faults"]),
        **{name: options[name] for name in same.split()},
    )


def _sizes(options: Mapping[str, Any], role: str) -> Sizes:
    stages = options[f"{role}_pp_layers"]
    sizes = {axis: options[f"{role}_{axis}"] for axis in ("dp", "pp", "cp", "tp")}
    return Sizes(**{**sizes, "pp": len(stages) or sizes["pp"]}, layers=stages)


def _wrong(option: str, text: str) -> click.BadParameter:
    return click.BadParameter(text, param_hint=option)
