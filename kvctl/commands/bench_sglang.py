"""`kvctl bench --engine sglang`: compares transfer backends of SGLang servers, which it starts on this host."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from kvctl.commands.bench_options import sweep_loads
from kvctl.commands.demo import sigterm_unwinds
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import print_error
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.health.host.view import sglang_problem
from kvctl.lab.bench.html_report import write_result
from kvctl.lab.bench.machine import fingerprint, nvidia_gpus
from kvctl.lab.bench.session import Steps
from kvctl.lab.bench.sglang_bench import CHECKED_TOKENS, ServerBench
from kvctl.lab.bench.sglang_models import MODEL_SIZES, Model, missing, model_of, unfit
from kvctl.lab.bench.sglang_pairs import SIDES, UNDIVIDED, Pair, ServerPlan, Side, parse_sides
from kvctl.lab.bench.sglang_servers import START_S, cpu_environment
from kvctl.lab.bench.sglang_views import SERVERS, SERVERS_PLAN, blocks, plan_blocks
from kvctl.lab.bench.statistics import MIN_ROUNDS
from kvctl.lab.bench.variants import size
from kvctl.lab.ranks.messages import Gpu
from kvctl.lab.ranks.request import Load, Sizes
from kvctl.render.report import Report

# Options that apply, beside those of `_OWN`.
_SHARED = frozenset(
    {
        *("prefill_tp", "prefill_dp", "prefill_pp", "decode_tp", "decode_dp", "decode_pp"),
        *("model", "layers", "kv_heads", "head_dim", "page_size"),
        *("tokens", "concurrency", "sweep", "rooms", "repeat", "seed", "output_tokens"),
        *("device", "prefill_gpus", "decode_gpus", "verify", "save", "html"),
    }
)
_OWN = frozenset({"engine", "sides", "together", "server_args"})
_OUTPUT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """The options of one bench, resolved.

    Attributes:
        sides: the undivided server first, unless nothing is compared.
        requests: of each load and round; None: the default.
    """

    plan: ServerPlan
    sides: tuple[Side, ...]
    loads: tuple[Load, ...]
    rounds: int
    output_tokens: int
    seed: int
    model: Model
    gpus: Mapping[int, Gpu]
    together: bool
    requests: int | None

    @property
    def compared(self) -> bool:
        return self.sides[0].text == UNDIVIDED


def resolve_servers(options: Mapping[str, Any], given: Collection[str], found: Mapping[int, Gpu]) -> ServerRequest:
    """Resolves the options; raises click.UsageError if an option does not apply, or options contradict each other."""
    if others := sorted(_flag(name) for name in set(given) - _SHARED - _OWN):
        raise click.UsageError(f"{', '.join(others)}: not with --engine sglang, only with synthetic ranks")
    if options["verify"] == "sample":
        raise click.BadParameter("the tokens of servers are compared (full) or not (off)", param_hint="--verify")
    sizes = {
        role: Sizes(**{axis: options[f"{role}_{axis}"] for axis in ("dp", "pp", "tp")})
        for role in ("prefill", "decode")
    }
    try:
        flags = shlex.split(options["server_args"])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--server-args") from error
    gpus = _place(options, given, {role: size(each) for role, each in sizes.items()}, len(found))
    try:
        loads = sweep_loads(options["concurrency"], options["tokens"], options["sweep"])
        output_tokens = options["output_tokens"] or _OUTPUT_TOKENS
        longest = max(load.tokens.longest for load in loads) + max(output_tokens, CHECKED_TOKENS)
        sizes_given = {name: options[name] for name in MODEL_SIZES if options[name] is not None}
        dp_attention = any(each.dp > 1 for each in sizes.values())
        model = model_of(options["model"], sizes_given, bool(gpus["prefill"]), longest, dp_attention)
        if problem := missing(model):
            raise ValueError(problem)
        for role, each in sizes.items():
            if problem := unfit(model, role, each):
                raise ValueError(problem)
    except ValueError as error:
        raise click.UsageError(f"--engine sglang: {error}") from error
    sides: tuple[Side, ...] = tuple(each for each in options["sides"] if each.text != UNDIVIDED)
    if not sides:
        raise click.BadParameter(
            f"name a side: {', '.join(name for name in SIDES if name != UNDIVIDED)}", param_hint="--sides"
        )
    if options["verify"] == "full":
        sides = (*parse_sides(UNDIVIDED), *sides)
    environment = {"KVCTL_BLACK_BOX_S": os.environ.get("KVCTL_BLACK_BOX_S", "0")}
    if model.path and not Path(model.path).is_dir():
        environment["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE", "0")
    plan = ServerPlan(
        model.path,
        **sizes,
        prefill_gpus=gpus["prefill"],
        decode_gpus=gpus["decode"],
        page_size=options["page_size"],
        longest=longest,
        concurrency=max(load.concurrency for load in loads),
        flags=flags,
        environment=environment,
        vocabulary=model.vocabulary,
    )
    return ServerRequest(
        plan,
        sides,
        loads,
        options["repeat"] if "repeat" in given else MIN_ROUNDS,
        output_tokens,
        secrets.randbits(48) if options["seed"] is None else options["seed"],
        model,
        {number: found[number] for number in sorted({*gpus["prefill"], *gpus["decode"]})},
        options["together"],
        options["rooms"],
    )


def _place(
    options: Mapping[str, Any], given: Collection[str], ranks: Mapping[str, int], count: int
) -> dict[str, tuple[int, ...]]:
    """Returns the GPUs of the ranks of both roles: prefill's from 0 on, decode's after them as far as there are any."""
    chosen = {role: options[f"{role}_gpus"] for role in ranks}
    cuda = options["device"] == "cuda" if "device" in given else count > 0
    if not cuda:
        if any(chosen.values()):
            raise click.UsageError("--prefill-gpus and --decode-gpus require GPUs: add --device cuda")
        return dict.fromkeys(ranks, ())
    if not count:
        raise click.BadParameter("nvidia-smi finds no GPU: use --device cpu", param_hint="--device")
    for role, number in ranks.items():
        first = 0 if role == "prefill" else min(ranks["prefill"], count - number)
        gpus = chosen[role] = chosen[role] or tuple(range(max(0, first), max(0, first) + number))
        even = len({after - before for before, after in itertools.pairwise(gpus)}) < 2
        if len(gpus) != number or not even or max(gpus) >= count:
            raise click.BadParameter(
                f"{number} rank{'s' * (number > 1)} need as many GPUs, evenly spaced, of the {count} here; these are "
                f"{','.join(map(str, gpus))}",
                param_hint=f"--{role}-gpus",
            )
    return chosen


def _flag(name: str) -> str:
    params = click.get_current_context().command.params
    return next((each.opts[0] for each in params if each.name == name), f"--{name.replace('_', '-')}")


# ---- the run --------------------------------------------------------------------------------------------------------


def bench_sglang(
    output: Output, settings: Settings, options: Mapping[str, Any], given: Collection[str], plan_only: bool
) -> ExitCode:
    """Runs the bench, prints and saves the results, and returns the exit code."""
    started_at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    output.selection(SERVERS_PLAN if plan_only else SERVERS)
    request = resolve_servers(options, given, nvidia_gpus())
    if plan_only:
        output.emit(_planned(request))
        return ExitCode.OK
    if importlib.util.find_spec("sglang") is None:
        raise CliError(
            "SGLang is not installed in the environment of this kvctl: install kvctl in that of the servers and run it "
            "there (docs/sglang.md)"
        )
    environment = {**os.environ, **({} if request.gpus else cpu_environment())}
    code = ExitCode.OK
    folder = Path(tempfile.mkdtemp(prefix="kvctl-bench-"))
    keep = False
    try:
        with Steps(settings.quiet, output.detail) as steps, sigterm_unwinds():
            steps.step("importing SGLang")
            if found := sglang_problem(sys.executable, environment, START_S):
                raise CliError(f"{found.cause}; {found.remedy}")
            bench = _bench(request, folder, steps)
            try:
                bench.run(request.together)
            except KeyboardInterrupt:
                code = ExitCode.INTERRUPTED
        problems = bench.problems()
        rows = bench.rows()
        if rows:
            _report(output, request, bench, rows, options, started_at)
        for line in problems:
            print_error(line)
        if problems:
            keep = True
            output.note(f"the servers' logs are kept in {folder}")
    finally:
        shutil.rmtree(folder / "model", ignore_errors=True)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return code or (ExitCode.FAILED if problems else ExitCode.OK)


def _planned(request: ServerRequest) -> Report:
    """Returns the command lines of all servers; a model with random weights would be in the folder MODEL."""
    plan = request.plan._replace(model=request.plan.model or "MODEL")
    with tempfile.TemporaryDirectory() as folder:
        pairs = _pairs(request, plan, Path(folder))
    rows = []
    for pair in pairs:
        for process in pair.fleet.processes:
            variables = [f"{name}={shlex.quote(value)}" for name, value in process.environment.items()]
            command = " ".join([*variables, shlex.join(process.command)])
            rows.append({"side": pair.side.text, "server": process.name, "command": command})
    return Report(SERVERS_PLAN, rows, answered=1, blocks=lambda kept, _width: plan_blocks(kept))


def _pairs(request: ServerRequest, plan: ServerPlan, folder: Path) -> list[Pair]:
    names = [re.sub(r"[^\w.=-]+", "-", side.text)[:80] for side in request.sides]
    return [
        Pair(side, plan, folder / f"{number}-{name}")
        for number, (side, name) in enumerate(zip(request.sides, names, strict=True))
    ]


def _bench(request: ServerRequest, folder: Path, steps: Steps) -> ServerBench:
    plan = request.plan
    if request.model.llama is not None:
        from kvctl.lab.bench.sglang_checkpoint import Llama, write_checkpoint  # imports torch

        steps.step("writing a model with random weights")
        write_checkpoint(folder / "model", shape=Llama(**request.model.llama))
        plan = plan._replace(model=str(folder / "model"))
    steps.expect(request.rounds * len(request.loads) * len(request.sides))
    return ServerBench(
        _pairs(request, plan, folder),
        request.loads,
        request.rounds,
        request.output_tokens,
        request.seed,
        steps.step,
        steps.finished_trial,
        request.requests,
        request.compared,
    )


def _report(
    output: Output,
    request: ServerRequest,
    bench: ServerBench,
    rows: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    started_at: str,
) -> None:
    verdicts = [row["verified"] for row in rows if row["side"] != UNDIVIDED]
    facts = fingerprint("cuda" if request.gpus else "cpu", [], request.gpus)
    document: dict[str, Any] = {
        "schema": SERVERS.schema,
        "sides": [side.text for side in request.sides],
        "turns": request.together,
        "verified": None if None in verdicts or not verdicts else all(verdicts),
        "problems": bench.problems(),
        "shape": request.model.shape,
        "floors": {"write_gb_per_s_by_transport": {}},
        "runs": rows,
        "env": {**facts, "sglang": importlib.metadata.version("sglang"), "server_args": request.plan.flags},
    }
    write_result(options["save"], options["html"], document, blocks(rows, document), started_at)
    if options["html"] is not None:
        output.note(f"the report is in {options['html']}")
    output.emit(Report(SERVERS, rows, answered=1, blocks=lambda kept, _width: blocks(kept, document)))
