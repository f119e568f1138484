"""Resolves the options of `kvctl bench` into plans of its fleets, and rejects contradictory options."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import click

from kvctl.commands.bench_options import TRANSPORTS, sweep_loads
from kvctl.commands.output import Output
from kvctl.lab.bench.machine import memory_budget_bytes
from kvctl.lab.bench.trials import Program
from kvctl.lab.bench.variants import Variant, expand, waves
from kvctl.lab.ranks.plan import Plan
from kvctl.lab.ranks.planner import plan as make_plan
from kvctl.lab.ranks.request import Load, PlanRequest, Sizes

_OUTPUT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """The fleets that result from the options of one bench.

    Attributes:
        waves: the fleets to run: those of one wave at the same time, one wave after the other.
    """

    options: Mapping[str, Any]
    program: Program
    waves: list[list[Variant]]

    @property
    def several(self) -> bool:
        """Whether the bench has more than one fleet."""
        return sum(map(len, self.waves)) > 1


def resolve(options: Mapping[str, Any], given: Collection[str]) -> BenchRequest:
    """Expands the options into fleets.

    Args:
        given: Names of the parameters that are on the command line.

    Raises:
        click.UsageError: Options contradict each other.
    """
    _check(options, given)
    try:
        loads = sweep_loads(options["concurrency"], options["tokens"], options["sweep"])
    except ValueError as error:
        raise _refused("--sweep", str(error)) from error
    seed = secrets.randbits(48) if options["seed"] is None else options["seed"]
    request = _plan_request(options, loads, seed, memory_budget_bytes())
    variants = expand(request, options["transports"], options["cp_modes"])
    program = Program(options["layer_ms"], options["repeat"], options["busy_engines"])
    return BenchRequest(options, program, waves(variants))


def plan_fleets(request: BenchRequest, output: Output) -> list[list[tuple[Variant, Plan]]]:
    """Plans every fleet before any process is started, and prints the notes of the plans.

    Returns:
        The fleets of each wave, each with its plan.

    Raises:
        CliError: A fleet cannot be planned.
    """
    planned = [[(variant, make_plan(variant.request)) for variant in wave] for wave in request.waves]
    for note in dict.fromkeys(note for pairs in planned for _, plan in pairs for note in plan["notes"]):
        output.note(note)
    return planned


def _check(options: Mapping[str, Any], given: Collection[str]) -> None:
    """Raises click.BadParameter if options contradict each other."""
    if not options["transports"]:
        raise _refused("--transport", f"no value is given; allowed: {', '.join(TRANSPORTS)}")
    if options["prefill_instances"] is not None:
        for axis in ("tp", "dp", "cp", "pp", "pp_layers"):
            if f"prefill_{axis}" in given:
                option = f"--prefill-{axis.replace('_', '-')}"
                raise _refused("--prefill-instances", f"it defines the sizes of every instance: leave out {option}")
    if "cp_interleave" in given and options["decode_cp"] < 2:
        raise _refused("--cp-interleave", "decode ranks share prompts only with --decode-cp 2 or more: add it")
    for role in ("prefill", "decode"):
        stages, size = options[f"{role}_pp_layers"], options[f"{role}_pp"]
        if stages and f"{role}_pp" in given and size != len(stages):
            text = ",".join(map(str, stages))
            raise _refused(f"--{role}-pp-layers", f"{text} are {len(stages)} stages, but --{role}-pp is {size}")


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
