"""`kvctl tune`: measures which path, page size, chunk, CP mode and layer groups suit a machine and a workload."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from kvctl.commands.bench import bench
from kvctl.commands.bench_options import GroupedCommand, bench_options, grouped_option
from kvctl.commands.bench_request import BenchRequest, plan_fleets, resolve
from kvctl.commands.options import given, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import print_error
from kvctl.exit_codes import ExitCode
from kvctl.lab.bench.session import Steps
from kvctl.lab.bench.statistics import MIN_ROUNDS, spread
from kvctl.lab.bench.variants import MAX_RANKS, Variant, sizes_text
from kvctl.lab.ranks.group import FleetError
from kvctl.lab.ranks.plan import Plan, PlannedLoad
from kvctl.lab.ranks.request import CP_MODES
from kvctl.lab.tune import Candidate, TuneFailed, run_fleets
from kvctl.lab.tune import tune as measure_candidates
from kvctl.render import units
from kvctl.render.report import Block, Grid, Line, Report, Text
from kvctl.render.view import Column, Kind, View, Width

_PAGE_SIZES = (16, 32, 64, 128)
_MAX_PAGE = 1 << 16
_POINT_SECONDS = 3.0
_GROUPS = ("Layout", "Model", "Load", "Engine", "GPUs")
# Options that tune itself varies, or that only a table has.
_NOT_TAKEN = frozenset(
    {
        *("ring_mb", "chunk_tokens", "cp_modes", "sweep", "repeat", "point_seconds"),
        *("prefill_page_size", "decode_page_size", "groups"),
    }
)

TUNE = View(
    "tune",
    (
        Column("choice", path=lambda row: "▶" if row["recommended"] else "·", styles={"▶": "bold green"}),
        Column("path"),
        Column("page_size", Kind.COUNT, header="PAGE"),
        Column("chunk_tokens", Kind.COUNT, Width.NORMAL, header="CHUNK"),
        Column("ring", Kind.BYTES, path="ring_bytes"),
        Column("cp_mode", width=Width.NORMAL),
        Column("pipeline", width=Width.NORMAL),
        Column("rooms_per_s", Kind.NUMBER, header="ROOMS/S"),
        Column("low", Kind.NUMBER, Width.NORMAL, path="rooms_per_s_low", header="FROM"),
        Column("high", Kind.NUMBER, Width.NORMAL, path="rooms_per_s_high", header="TO"),
        Column("gb_per_s", Kind.NUMBER, Width.NORMAL, header="GB/S"),
        Column("p50", Kind.DURATION),
        Column("p99", Kind.DURATION, Width.NORMAL),
        Column("hidden", Kind.RATIO, Width.NORMAL),
        Column("cpu", Kind.DURATION, Width.WIDE, path="cpu_ns"),
        Column("padded", Kind.RATIO, Width.WIDE),
        Column("why", Kind.SENTENCE),
    ),
)


def _page_sizes(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and 1 <= int(word) <= _MAX_PAGE for word in words):
        raise ValueError(f"{text!r}: write sizes such as 16,64, up to {_MAX_PAGE}")
    return tuple(map(int, words))


def _options() -> list[click.Parameter]:
    taken = [each for each in bench_options() if getattr(each, "group", "") in _GROUPS and each.name not in _NOT_TAKEN]
    layer_ms = "Compute time of one layer for one chunk; layer groups are tried only if it is given."
    sizes = "Page sizes to try. [default: --page-size, 16, 32, 64, 128]"
    seconds = "Measure each path with each setting for about X seconds; more if WHY says too few rounds."
    positive = click.FloatRange(min=0, min_open=True)
    return [
        *taken,
        grouped_option("Search", "--layer-ms", "X", layer_ms, type=click.FloatRange(min=0), default=0.0),
        grouped_option("Search", "--page-sizes", "A,B,…", sizes, _page_sizes),
        grouped_option("Search", "--point-seconds", "X", seconds, type=positive, default=_POINT_SECONDS),
    ]


@click.command(
    cls=GroupedCommand,
    params=_options(),
    examples=[
        ("Settings for this machine and layout", "kvctl tune --prefill-tp 4 --decode-dp 4"),
        ("Keep the engine's page size", "kvctl tune --prefill-tp 4 --decode-dp 4 --page-sizes 16"),
    ],
)
@pass_settings
def tune(settings: Settings, page_sizes: tuple[int, ...] | None, **options: Any) -> None:
    """Measure which settings suit a machine and a workload: path, page size, ring, chunk, CP mode, layers per group.

    Runs a short bench with each value of one setting after another, in turns with the best so far, which stays unless
    the rounds tell them apart. Prints all measured combinations with the chosen one first, and the lines to set. The
    ring is sized for the workload. Takes from half a minute to several minutes; kvctl bench measures a single
    combination for longer.
    """
    output = Output(settings)
    output.selection(TUNE)
    if len(options["transports"]) != 1:
        raise click.BadParameter("only one transport is tuned at a time", param_hint="--transport")
    sizes = list(dict.fromkeys(page_sizes or (options["page_size"], *_PAGE_SIZES)))
    on_line = given(options)
    with bench.make_context("tune", []) as defaults:
        options = {**defaults.params, **options}
    if options["seed"] is None:
        options["seed"] = secrets.randbits(48)  # all candidates transfer the same rooms
    search = _Search(options, on_line, settings, output)
    first = search.resolve({})
    variant = first.waves[0][0]
    request = variant.request
    has_cp = any(each.cp > 1 for each in request.prefill)
    ((_, plan),), *_ = plan_fleets(first, output)
    tokens = max(room["tokens"] - room["prefix_tokens"] for room in plan["loads"][0]["rooms"])
    search.repeat(-(-MIN_ROUNDS // len(plan["loads"][0]["batches"])))
    try:
        with Steps(settings.quiet, output.detail) as search.steps:
            layers, layer_ms = plan["shape"]["layers"], options["layer_ms"]
            found = measure_candidates(
                search.measure,
                sizes,
                CP_MODES if has_cp else CP_MODES[:1],
                tokens,
                layers,
                layer_ms,
                together=search.take_turns(variant, plan),
            )
    except KeyboardInterrupt:
        raise click.exceptions.Exit(ExitCode.INTERRUPTED) from None
    except (FleetError, TuneFailed) as error:
        print_error(str(error))
        raise click.exceptions.Exit(ExitCode.FAILED) from None
    prefill = " + ".join(map(sizes_text, request.prefill))
    facts = {
        "layout": f"prefill {prefill} → decode {sizes_text(request.decode)} over {request.transport}",
        "room": {"tokens": tokens, "bytes": max(room["bytes"] for room in plan["loads"][0]["rooms"])},
        "load": _load_text(plan["loads"][0]),
        "settings": found[0].settings(),
        "engine_settings": {"page_size": found[0].page_size},
    }
    output.emit(
        Report(
            TUNE,
            [_row(each) for each in found],
            answered=1,
            objects=lambda kept: [{**facts, "options": list(kept)}],
            blocks=lambda kept, _width: _blocks(kept, facts),
        )
    )


class _Search:
    """Runs the benches of one search; each bench changes some of the options."""

    def __init__(self, options: Mapping[str, Any], given: set[str], settings: Settings, output: Output) -> None:
        self._options = options
        self._given = given
        self._quiet = Output(replace(settings, quiet=True))  # the notes on the first plan are enough
        self._in_turns = False
        self.steps = Steps(True, output.detail)

    def repeat(self, times: int) -> None:
        """Has every bench repeat its rooms within the same time, so that there are enough rounds."""
        seconds = self._options["point_seconds"] / times
        self._options = {**self._options, "repeat": times, "point_seconds": seconds}

    def take_turns(self, variant: Variant, plan: Plan) -> int:
        """Determines whether fleets of this size fit beside each other, and returns how many beside the best one."""
        used = sum(rank["pool_bytes"] + plan["ring_bytes"] * (rank["role"] == "decode") for rank in plan["ranks"])
        fleets = min(MAX_RANKS // variant.ranks, variant.request.memory_bytes // used)
        self._in_turns = fleets > 1
        return max(1, fleets - 1)

    def resolve(self, changes: Mapping[str, Any]) -> BenchRequest:
        return resolve({**self._options, **changes}, {*self._given, *changes})

    def measure(self, name: str, changes: Sequence[Mapping[str, Any]]) -> Iterator[Candidate]:
        """Runs the fleets of all changed options in turns, and yields a candidate for each combination."""
        request, *others = map(self.resolve, changes)
        if others:
            variants = [each.waves[0][0] for each in (request, *others)]  # each has one fleet
            named = [replace(variant, label=f"{name} {number}") for number, variant in enumerate(variants)]
            waves = [named] if self._in_turns else [[each] for each in named]
            request = replace(request, waves=waves)
        for fleets in plan_fleets(request, self._quiet):
            yield from run_fleets(request.program, fleets, self.steps, self._options["point_seconds"], name)


def _row(candidate: Candidate) -> dict[str, Any]:
    row = candidate.row
    rounds = [each["rooms_per_s"] for each in row["rounds"]]
    low, high = spread(rounds) if rounds else (None, None)
    return {
        "recommended": candidate.recommended,
        "path": candidate.path,
        "page_size": candidate.page_size,
        "chunk_tokens": candidate.chunk_tokens,
        "cp_mode": candidate.cp_mode or None,
        "ring_bytes": candidate.ring_bytes or None,
        "pipeline": candidate.pipeline,
        "rooms": row["rooms"],
        "rooms_per_s": row["rooms_per_s"],
        "rooms_per_s_low": low,
        "rooms_per_s_high": high,
        "gb_per_s": row["gb_per_s"],
        "p50_ns": round(row["latency_ms"]["p50"] * 1e6),
        "p99_ns": round(row["latency_ms"]["p99"] * 1e6),
        "cpu_ns": round(row["cpu_seconds"] * 1e9 / max(1, row["ok"])),
        "hidden_ratio": candidate.hidden_ratio,
        "padded_ratio": candidate.padded_ratio,
        "why": candidate.why,
    }


def _load_text(load: PlannedLoad) -> str:
    arriving = any(room["arrival_ms"] is not None for room in load["rooms"])
    return f"at most {load['in_flight']} in flight, {'arriving in an open loop' if arriving else 'in a closed loop'}"


def _blocks(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> list[Block]:
    """Returns the terminal output: the workload, the candidates, and the settings to paste into agent.toml."""
    room = facts["room"]
    head: list[Line] = [
        [(f"{'measured':<10}", "dim"), (facts["layout"], "")],
        [
            (f"{'room':<10}", "dim"),
            (f"up to {room['tokens']} tokens, {units.size(room['bytes'])}; {facts['load']}", ""),
        ],
    ]
    turns = "WHY compares a row with the best one that it took turns with; other rows ran at other times"
    foot: list[Line] = [[(turns, "dim")], [("set on every agent", "bold"), (" (KVCTL_… or agent.toml)", "dim")]]
    for key, value in facts["settings"].items():
        foot.append([(f'  {key} = "{value}"' if isinstance(value, str) else f"  {key} = {value}", "green")])
    page = facts["engine_settings"]["page_size"]
    foot.append([("set on both engines", "bold"), (" (an agent takes the page size of its engine)", "dim")])
    foot.append([(f"  SGLang --page-size {page}, vLLM --block-size {page}", "green")])
    return [Text(head), Grid(TUNE, rows), Text(foot)]
