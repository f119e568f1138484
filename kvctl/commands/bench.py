"""`kvctl bench`: a fleet on this machine, real KV through it, every byte verified, and a table."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import orjson

from kvctl.bench.baseline import compare, failures, load_baseline
from kvctl.bench.failures import FleetError
from kvctl.bench.fleet import Fleet
from kvctl.bench.machine import fingerprint, memory_budget_bytes
from kvctl.bench.options import parse_names, parse_percent, parse_sweep, parse_tokens, sweep_loads
from kvctl.bench.planner import plan as make_plan
from kvctl.bench.progress import Steps
from kvctl.bench.session import FLOORS, Session
from kvctl.bench.views import BENCH, PLAN, blocks, plan_rows, with_delta
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import complain
from kvctl.exit_codes import ExitCode
from kvctl.views.report import Report
from kvctl_agent.contract.rig import DTYPE_BYTES, PAGE_ORDERS, VERIFY_MODES, Plan, PlanRequest, Sizes


def _reader(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A click callback that turns a ValueError into a usage error naming the option."""

    def read(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            return [parse(each) for each in value] if isinstance(value, tuple) else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return read


def _sizes(role: str) -> Callable[[Any], Any]:
    """`--<role>-tp` and its siblings."""
    texts = {
        "tp": "attention tensor-parallel ranks",
        "dp": "data-parallel groups",
        "cp": "context-parallel ranks",
        "pp": "pipeline stages",
    }

    def decorate(function: Any) -> Any:
        for axis, text in reversed(texts.items()):
            option = click.option(
                f"--{role}-{axis}", default=1, show_default=True, help=f"{role.capitalize()}: {text}."
            )
            function = option(function)
        return function

    return decorate


@click.command(cls=KvctlCommand)
@_sizes("prefill")
@_sizes("decode")
@click.option("--model", metavar="NAME", help="A known model's KV shape. [default: llama-3.1-8b]")
@click.option("--layers", type=int, help="Layers, in place of the model's.")
@click.option("--kv-heads", type=int, help="KV heads of the whole model.")
@click.option("--head-dim", type=int, help="Elements of one head's row of K, and of V.")
@click.option("--dtype", metavar="|".join(DTYPE_BYTES), help="Element type. [default: the model's]")
@click.option("--page-size", default=16, show_default=True, help="Tokens per page.")
@click.option("--page-order", default=PAGE_ORDERS[0], show_default=True, metavar="|".join(PAGE_ORDERS))
@click.option(
    "--tokens",
    default="1024",
    show_default=True,
    metavar="N|A,B,…|LO..HI",
    callback=_reader(parse_tokens),
    help="Prompt lengths: fixed, in turn, or uniform.",
)
@click.option("--prefix-hit", default=0.0, show_default=True, help="Part of each prompt that decode has cached.")
@click.option("--rooms", type=int, help="Requests per path. [default: as many as make a good measurement]")
@click.option("--concurrency", default=4, show_default=True, help="Requests in flight.")
@click.option(
    "--sweep",
    multiple=True,
    metavar="AXIS=A,B,…",
    callback=_reader(parse_sweep),
    help="concurrency=1,4,16 or tokens=256..16384 (powers of two). Repeatable.",
)
@click.option("--repeat", default=1, show_default=True, help="Run everything this often: median, and best.")
@click.option("--transport", default="nixl", show_default=True, help="nixl, or loopback where no engine is installed.")
@click.option(
    "--path",
    "paths",
    default="",
    metavar="A,B,…",
    callback=_reader(parse_names),
    help="Paths to compare side by side: bulk, slice, staged, auto. [default: those that suit the layouts]",
)
@click.option("--ring-mb", type=int, help="Staging ring of each decode rank. [default: what the load needs]")
@click.option("--chunk-tokens", type=int, help="Tokens per chunk of the grid. [default: 8192]")
@click.option("--workers", type=int, help="Transfer workers per prefill rank.")
@click.option(
    "--verify", type=click.Choice(VERIFY_MODES), default="full", show_default=True, help="How much is compared."
)
@click.option("--plan", "plan_only", is_flag=True, help="Print who would send what to whom, and move nothing.")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON.")
@click.option(
    "--baseline", type=click.Path(path_type=Path, dir_okay=False), help="Compare with a saved result: PASS or FAIL."
)
@click.option(
    "--max-regress",
    default="5%",
    show_default=True,
    metavar="PERCENT",
    callback=_reader(parse_percent),
    help="GB/s that may be missing against the baseline.",
)
@click.option("--hold", is_flag=True, help="Keep the fleet up under light traffic afterwards, until Ctrl-C.")
@pass_settings
def bench(settings: Settings, plan_only: bool, hold: bool, **options: Any) -> None:
    """Move real KV between prefill and decode ranks on this machine, and verify every byte.

    Starts one process per rank, drives requests through them on every path side by side, and prints throughput,
    latency and costs next to what this machine's memory and transport can do at best. Exits 0 only when everything
    verified. In a second terminal, kvctl status shows the fleet while it runs.
    """
    output = Output(settings)
    output.selection(PLAN if plan_only else BENCH)
    baseline = None
    if options["baseline"] is not None:
        try:
            baseline = load_baseline(options["baseline"])
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--baseline") from error
    request = _request(options)
    plan = make_plan(request)
    for note in plan["notes"]:
        output.note(note)
    if plan_only:
        output.emit(Report(PLAN, plan_rows(plan), answered=1))
        return
    raise click.exceptions.Exit(_Bench(output, settings, request, plan, options, baseline).run(hold))


class _Bench:
    """One call of the command, from the plan on."""

    def __init__(
        self,
        output: Output,
        settings: Settings,
        request: PlanRequest,
        plan: Plan,
        options: dict[str, Any],
        baseline: dict[str, Any] | None,
    ) -> None:
        self._output = output
        self._settings = settings
        self._request = request
        self._plan = plan
        self._options = options
        self._baseline = baseline

    def run(self, hold: bool) -> ExitCode:
        """Measure, print, and hold if wanted; whatever was measured before a failure or Ctrl-C is printed too."""
        with Fleet(self._plan, self._request) as fleet:
            code, session = self._measure(fleet)
            if hold and code is ExitCode.OK:
                code = self._report(session)
                self._output.note("holding the fleet: kvctl status shows it, Ctrl-C ends it")
                return self._hold(session, code)
            if code is ExitCode.OK:
                code = self._stop(fleet)
        return self._report(session) or code

    def _measure(self, fleet: Fleet) -> tuple[ExitCode, Session]:
        with Steps(self._settings.quiet, self._output.detail) as steps:
            session = Session(fleet, self._plan, self._options["verify"], self._options["repeat"], steps)
            try:
                session.measure()
            except KeyboardInterrupt:
                return ExitCode.INTERRUPTED, session
            except FleetError as error:
                trouble = str(error)
            else:
                return ExitCode.OK, session
        complain(trouble)
        return ExitCode.FAILED, session

    def _hold(self, session: Session, code: ExitCode) -> ExitCode:
        try:
            session.hold()
        except KeyboardInterrupt:
            return code
        except FleetError as error:
            complain(str(error))
        return ExitCode.FAILED

    def _stop(self, fleet: Fleet) -> ExitCode:
        """Everything was measured; a rank that cannot even leave in order is a failure all the same."""
        try:
            fleet.stop()
        except KeyboardInterrupt:
            return ExitCode.INTERRUPTED
        except FleetError as error:
            complain(str(error))
            return ExitCode.FAILED
        crashed = {name: status for name, status in fleet.close().items() if status}
        for name, status in crashed.items():
            complain(f'rank "{name}" ended with status {status} after it had finished')
        return ExitCode.FAILED if crashed else ExitCode.OK

    def _report(self, session: Session) -> ExitCode:
        """Print and save what there is; FAILED where it is not what it should be."""
        results = session.results
        rows = with_delta(results.rows())
        trouble = results.trouble
        environment = fingerprint("cpu", session.lanes())
        if rows and self._options["save"] is not None:
            document = results.document(environment)
            self._options["save"].write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
        if rows and self._baseline is not None:
            try:
                rows = compare(rows, self._plan["shape"], self._baseline, self._options["max_regress"])
            except ValueError as error:
                trouble.append(f"{self._options['baseline']}: {error}")
            else:
                regressed = failures(rows)
                trouble += [f"FAIL: {line}" for line in regressed]
                if not regressed:
                    self._output.note(f"PASS: within {self._options['max_regress']:.0%} of {self._options['baseline']}")
        if rows:
            floors = {kind: results.floor(kind) for kind in FLOORS}
            picture = partial(blocks, plan=self._plan, request=self._request, floors=floors)
            self._output.emit(Report(BENCH, rows, answered=1, blocks=lambda kept, _width: picture(kept)))
        for line in trouble:
            complain(line)
        return ExitCode.FAILED if trouble or results.verified is False else ExitCode.OK


def _request(options: dict[str, Any]) -> PlanRequest:
    """What is asked of the planner.

    Raises:
        click.UsageError: sweeps that contradict each other.
    """
    try:
        loads = sweep_loads(options["concurrency"], options["tokens"], options["sweep"])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--sweep") from error
    sides = {
        role: Sizes(**{axis: options[f"{role}_{axis}"] for axis in ("dp", "pp", "cp", "tp")})
        for role in ("prefill", "decode")
    }
    same = ("model", "layers", "kv_heads", "head_dim", "dtype", "page_size", "page_order", "prefix_hit", "rooms")
    return PlanRequest(
        prefill=sides["prefill"],
        decode=sides["decode"],
        loads=loads,
        memory_bytes=memory_budget_bytes(),
        seed=secrets.randbits(48),
        **{name: options[name] for name in (*same, "paths", "transport", "ring_mb", "chunk_tokens", "workers")},
    )
