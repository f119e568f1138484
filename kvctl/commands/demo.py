"""`kvctl demo`: runs a small local fleet with endless traffic, to observe and to inject faults into."""

from __future__ import annotations

import contextlib
import math
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn, cast

import click

from kvctl.commands.options import Parsed, command, given
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import print_error
from kvctl.exit_codes import ExitCode
from kvctl.lab.demo.fault_schedule import Kind, ScheduledFault
from kvctl.lab.demo.fleet import CALM_TIMINGS, FleetPlan, LiveFleet, replaceable
from kvctl.lab.demo.live_run import Run
from kvctl.lab.demo.scenarios import SCENARIOS_BY_NAME, Scenario, combined, listed
from kvctl.lab.demo.traffic import TrafficOptions
from kvctl.lab.faults.specification import FAULTS_BY_NAME, Fault, parse_faults
from kvctl.lab.ranks.group import FleetError
from kvctl.lab.ranks.request import Sizes, Tokens, parse_instances, parse_tokens
from kvctl.render.demo import FAULTS, MOMENTS
from kvctl.render.report import Report
from kvctl_agent.contract.values import near

_COUNT = click.IntRange(min=1)
_SHOWN_FAULTS = ("control-loss", "write-error", "abort", "kill", "pause", "replace")
# For watching: a fleet that leaves most of the CPU to others, and rooms that last long enough.
_CALM_RATE = 6.0
_CALM_CONCURRENCY = 8
_CALM_GAP_S = 0.4
# Time for which a replaced process is resumed before it is ended.
_REPLACED_RESUMES_S = 5.0


def _faults(ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]) -> tuple[Scenario | Fault, ...]:
    words = [word.strip() for text in texts for word in text.split(",")]
    scenarios = [SCENARIOS_BY_NAME[word] for word in dict.fromkeys(words) if word in SCENARIOS_BY_NAME]
    specs = [word for word in words if word not in SCENARIOS_BY_NAME]
    for word in specs:
        if word and "=" not in word and word not in FAULTS_BY_NAME:
            hint = near(word, [*SCENARIOS_BY_NAME, *FAULTS_BY_NAME]) or "; kvctl demo --list-faults lists them"
            raise click.BadParameter(f"{word!r} is not a fault{hint}", ctx, param)
    try:
        if scenarios:
            combined(scenarios)
        return (*scenarios, *(parse_faults(",".join(specs)) if specs else ()))
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _tokens(text: str) -> Tokens:
    tokens = parse_tokens(text)
    if not tokens.values and tokens.low > tokens.high:
        raise ValueError(f"{text}: the range ends before it begins")
    return tokens


@command(
    examples=[
        ("A fleet with traffic, until Ctrl-C", "kvctl demo"),
        ("A fleet in which one room hangs", "kvctl demo --fault stuck-room"),
        ("A rank that is killed and comes back", "kvctl demo --fault kill=decode-1@5s+10s"),
    ]
)
@click.option("--transport", default="nixl", show_default=True, metavar="NAME", help="nixl, mooncake or loopback.")
@click.option("--prefill-tp", default=2, show_default=True, metavar="N", type=_COUNT, help="Prefill TP ranks.")
@click.option(
    "--prefill-instances",
    metavar="A,B,…",
    type=Parsed("instances", lambda text: parse_instances(text) if text else ()),
    help="Several prefill instances, such as tp2,tp1.",
)
@click.option("--decode-tp", default=1, show_default=True, metavar="N", type=_COUNT, help="Decode TP ranks.")
@click.option("--decode-dp", default=2, show_default=True, metavar="N", type=_COUNT, help="Decode dp groups.")
@click.option(
    "--tokens",
    default="16..1024",
    show_default=True,
    metavar="LO..HI",
    type=Parsed("tokens", _tokens),
    help="Tokens of a prompt.",
)
@click.option(
    "--concurrency", metavar="N", type=_COUNT, help="Rooms in flight at all times, instead of rooms per second."
)
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="R",
    help=f"Rooms per second, at random times. [default: {_CALM_RATE:g} in bursts, without --concurrency]",
)
@click.option(
    "--ring-mb", type=_COUNT, metavar="N", help="MiB of each decode rank's ring. [default: less than the load needs]"
)
@click.option(
    "--fault",
    "given",
    multiple=True,
    metavar="FAULT",
    callback=_faults,
    shell_complete=lambda ctx, param, incomplete: [name for name in SCENARIOS_BY_NAME if name.startswith(incomplete)],
    help=f"A scenario: {', '.join(SCENARIOS_BY_NAME)}; or faults such as "
    + ", ".join(FAULTS_BY_NAME[name].example for name in _SHOWN_FAULTS)
    + ". Repeatable.",
)
@click.option("--list-faults", is_flag=True, help="List the scenarios and faults with their effects, and end.")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="Repeat the rooms of the run with this seed.")
def demo(settings: Settings, **options: Any) -> None:
    """Run a small fleet with traffic on this machine, verify every byte, and inject faults if wanted.

    Prints one line per second; use kvctl status, top, rooms or doctor in a second terminal. A scenario, such as --fault
    stuck-room, begins after a few seconds and lasts, so that it can be found. Ctrl-C ends the fleet and leaves nothing
    behind.
    """
    output = Output(settings)
    if options["list_faults"]:
        output.emit(Report(FAULTS, listed(), answered=1))
        return
    output.selection(MOMENTS)
    scenarios = [fault for fault in options["given"] if isinstance(fault, Scenario)]
    scenario = combined(scenarios) if scenarios else None
    if scenario is not None:
        options |= {name: value for name, value in scenario.options.items() if name not in given(options)}
    with sigterm_unwinds():
        code = _run(output, _plan(options, scenario), options, scenarios)
    raise click.exceptions.Exit(code)


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Makes SIGTERM stop the ranks cleanly, as Ctrl-C does; ranks that are killed would leave their sockets behind."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _plan(options: dict[str, Any], scenario: Scenario | None) -> FleetPlan:
    tokens: Tokens = options["tokens"]
    lengths = tokens.values or (tokens.low, tokens.high)
    seed = options["seed"]
    plan = FleetPlan(
        prefill=options["prefill_instances"] or (Sizes(tp=options["prefill_tp"]),),
        decode=Sizes(dp=options["decode_dp"], tp=options["decode_tp"]),
        transport=options["transport"],
        seed=secrets.randbelow(1 << 31) if seed is None else seed,
        concurrency=options["concurrency"] or _CALM_CONCURRENCY,
        tokens=(min(lengths), max(lengths)),
        ring_mb=options["ring_mb"] or 0,
        config=CALM_TIMINGS,
    )
    return plan if scenario is None else replace(plan, **scenario.plan, config={**plan.config, **scenario.config})


def _traffic(options: dict[str, Any], aborts: float) -> TrafficOptions:
    calm = options["rate"] is None and options["concurrency"] is None
    return TrafficOptions(_CALM_RATE if calm else options["rate"] or 0.0, calm, aborts, _CALM_GAP_S)


def _run(output: Output, plan: FleetPlan, options: dict[str, Any], scenarios: Sequence[Scenario]) -> ExitCode:
    output.note(f"seed {plan.seed}")
    began = time.monotonic()

    def say(scenario: Scenario | None, line: str) -> None:
        name, look = ("", ["kvctl doctor"]) if scenario is None else (f"{scenario.name}: ", scenario.look)
        output.note(f"{name}{line}; try {', '.join(look)}")

    try:
        with LiveFleet(plan) as fleet:
            schedule, everywhere, aborts = _requested_faults(fleet, options)
            fleet.start()
            output.note(f"{', '.join(fleet.ranks)} serve after {time.monotonic() - began:.1f} s; Ctrl-C ends them")
            run = Run(fleet, _traffic(options, aborts), schedule, everywhere, scenarios, say)
            run.run(math.inf, lambda row: output.stream(MOMENTS, [row]))
    except FleetError as error:
        print_error(str(error))
        return ExitCode.FAILED
    except KeyboardInterrupt:
        pass
    return ExitCode.INTERRUPTED


def _requested_faults(fleet: LiveFleet, options: dict[str, Any]) -> tuple[list[ScheduledFault], str, float]:
    """Reads the requested faults from the options.

    Returns:
        The scheduled faults; the comma-separated faults that are in force at every rank all the time; and the share of
        rooms to abort, from 0 to 1.
    """
    given = [fault for fault in options["given"] if isinstance(fault, Fault)]
    schedule: list[ScheduledFault] = []
    for fault in (fault for fault in given if fault.kind.unit == "rank"):
        if fault.rank not in fleet.ranks:
            raise click.BadParameter(
                f"{fault.text}: there is no rank {fault.rank}; the ranks are {', '.join(fleet.ranks)}"
            )
        able = [name for name, rank in fleet.ranks.items() if replaceable(rank.planned)]
        if fault.name == "replace" and fault.rank not in able:
            names = ", ".join(able) or "none"
            raise click.BadParameter(f"{fault.text}: only a prefill rank without the registry can be replaced: {names}")
        for_s = float("inf") if fault.for_ns is None else fault.for_ns / 1e9
        kind = cast(Kind, fault.name)
        again_s = _REPLACED_RESUMES_S if kind == "replace" else 0.0
        schedule.append(ScheduledFault(fault.at_ns / 1e9, kind, fault.rank, for_s, again_s=again_s))
    aborts = max((fault.share for fault in given if fault.name == "abort"), default=0.0)
    everywhere = ",".join(fault.text for fault in given if fault.kind.level == "agent")
    return schedule, everywhere, aborts
