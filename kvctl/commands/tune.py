"""`kvctl tune`: which path, page size, ring, chunk, CP mode and group size suit a machine and a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from kvctl.commands.bench import bench
from kvctl.commands.bench_options import GroupedCommand, GroupedOption, bench_options
from kvctl.commands.bench_request import understand
from kvctl.commands.bench_run import plan_all
from kvctl.commands.options import pass_settings
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import complain
from kvctl.exit_codes import ExitCode
from kvctl.lab.bench.options import CP_MODES
from kvctl.lab.bench.progress import Steps
from kvctl.lab.bench.variants import Variant
from kvctl.lab.ranks.group import FleetError
from kvctl.lab.ranks.plan import Plan
from kvctl.lab.ranks.planner import plan as make_plan
from kvctl.lab.ranks.request import DEVICES
from kvctl.lab.tune.advise import Option, Workload, advise
from kvctl.lab.tune.confirm import confirm, remarks
from kvctl.lab.tune.costs import Costs, Lane, given_lane
from kvctl.lab.tune.model import predict
from kvctl.lab.tune.probe import probe
from kvctl.lab.tune.room import Room, room_of
from kvctl.render.report import Report
from kvctl.render.tune import TUNE, blocks

_PAGE_SIZES = (16, 32, 64, 128)
_LARGEST_PAGE = 1 << 16
_REPEAT = 3
_GROUPS = ("Layout", "Model", "Load", "Real traffic", "Engine")
# They choose what tune is to choose, or are about measuring.
_NOT_TUNED = frozenset({"paths", "ring_mb", "chunk_tokens", "cp_modes", "sweep", "preset", "repeat", "point_seconds"})


def _host_only(ctx: click.Context, param: click.Parameter, value: str) -> None:
    """Refuse GPUs: the probe measures copies in host memory, and the model has no other."""
    if value != DEVICES[0]:
        text = "tune knows host memory only; on GPUs let paths run side by side: kvctl bench --device cuda"
        raise click.BadParameter(text, ctx, param)


def _own_options() -> list[click.Parameter]:
    return [
        GroupedOption(
            ["--layer-ms"],
            group="Advice",
            type=click.FloatRange(min=0),
            default=0.0,
            metavar="X",
            help="Compute of one layer for one chunk: says whether sending layer groups pays.",
        ),
        GroupedOption(
            ["--page-sizes"],
            group="Advice",
            metavar="A,B,…",
            help="Page sizes to consider. [default: --page-size, 16, 32, 64, 128]",
        ),
        GroupedOption(
            ["--lane"],
            group="Advice",
            metavar="SPEC",
            help="Costs of another machine's lane, such as gbps=40,us=1.2,device, in place of those measured here.",
        ),
        GroupedOption(
            ["--cores"],
            group="Advice",
            type=click.IntRange(min=1),
            metavar="N",
            help="Cores that all ranks share. [default: this machine's]",
        ),
        GroupedOption(
            ["--confirm"],
            group="Advice",
            is_flag=True,
            help="Run the bench with the advice, beside the other paths, and compare.",
        ),
        click.Option(
            ["--device"],
            type=click.Choice(DEVICES),
            default=DEVICES[0],
            hidden=True,
            expose_value=False,
            callback=_host_only,
        ),
    ]


def _options() -> list[click.Parameter]:
    taken = [each for each in bench_options() if getattr(each, "group", "") in _GROUPS and each.name not in _NOT_TUNED]
    return [*taken, *_own_options()]


@click.command(
    cls=GroupedCommand,
    params=_options(),
    examples=[
        ("Settings for this machine and layout", "kvctl tune --prefill-tp 4 --decode-dp 4"),
        ("The same, compared with a measurement", "kvctl tune --prefill-tp 4 --decode-dp 4 --confirm"),
    ],
)
@pass_settings
def tune(settings: Settings, **options: Any) -> None:
    """Recommend settings for a machine and a workload: path, page size, ring, chunk, CP mode, layers per group.

    Measures what writes and copies cost here with a fleet of two ranks (some seconds), counts what the layouts' plan
    makes of the workload, predicts latency and throughput of every choice, and prints the best with its alternatives
    and the lines to set. With --confirm the bench then says how right that was.

    It is for KV in host memory; on GPUs, kvctl bench --device cuda compares the paths.
    """
    own = {name: options.pop(name) for name in ("page_sizes", "lane", "cores", "confirm", "layer_ms")}
    output = Output(settings)
    output.selection(TUNE)
    if len(options["transports"]) != 1:
        raise click.BadParameter("one at a time", param_hint="--transport")
    lane = _lane(own["lane"])
    sizes = _page_sizes(own["page_sizes"], options["page_size"])
    ctx = click.get_current_context()
    given = {name for name in options if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT}
    planned = _plans({**_bench_defaults(), **options, "layer_ms": own["layer_ms"]}, given, sizes, settings)
    load = _workload(*planned[0], own["layer_ms"], bool(own["confirm"]))
    try:
        with Steps(settings.quiet, output.detail) as steps:
            costs = probe(options["transports"][0], steps)
            costs = costs if lane is None else replace(costs, lane=lane, origin="lane as given, the rest measured here")
            costs = replace(costs, cores=own["cores"] or costs.cores)
            found = advise([(_cp_mode(variant), room_of(plan)) for variant, plan in planned], costs, load)
            chosen = found[0]
            checked, trouble = _confirm(chosen, found, planned, costs, load, steps) if own["confirm"] else ([], [])
    except KeyboardInterrupt:
        raise click.exceptions.Exit(ExitCode.INTERRUPTED) from None
    except FleetError as error:
        complain(str(error))
        raise click.exceptions.Exit(ExitCode.FAILED) from None
    _print(output, found, _facts(costs, room_of(planned[0][1]), load, chosen), checked)
    for line in trouble:
        complain(line)
    raise click.exceptions.Exit(ExitCode.FAILED if trouble else ExitCode.OK)


# ---- what is asked ------------------------------------------------------------------------------------------------


def _lane(text: str | None) -> Lane | None:
    try:
        return None if text is None else given_lane(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--lane") from error


def _page_sizes(text: str | None, own: int) -> list[int]:
    if text is None:
        return list(dict.fromkeys((own, *_PAGE_SIZES)))
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = [0]
    if not all(1 <= size <= _LARGEST_PAGE for size in sizes):
        raise click.BadParameter(
            f"{text!r}: write sizes such as 16,64, up to {_LARGEST_PAGE}", param_hint="--page-sizes"
        )
    return list(dict.fromkeys(sizes))


def _bench_defaults() -> dict[str, Any]:
    """Values of the bench's options where nothing is given."""
    with bench.make_context("tune", []) as context:
        return dict(context.params)


def _plans(
    options: dict[str, Any], given: set[str], sizes: Sequence[int], settings: Settings
) -> list[tuple[Variant, Plan]]:
    """A plan for each page size and, with context parallelism, for each way to share the sending."""
    found: list[tuple[Variant, Plan]] = []
    for size in sizes:
        asked = understand({**options, "page_size": size}, {*given, "page_size"})
        variant = asked.waves[0].variants[0]
        modes = CP_MODES if _has_cp(variant) else CP_MODES[:1]
        for mode in modes:
            one = understand({**options, "page_size": size, "cp_modes": (mode,)}, {*given, "page_size"})
            output = Output(replace(settings, quiet=settings.quiet or bool(found)))
            found += [pair for _, pairs in plan_all(one, output) for pair in pairs]
    return found


def _has_cp(variant: Variant) -> bool:
    return any(each.cp > 1 for each in variant.request.prefill)


def _cp_mode(variant: Variant) -> str:
    return variant.request.cp_mode if _has_cp(variant) else ""


def _workload(variant: Variant, plan: Plan, layer_ms: float, here: bool) -> Workload:
    """What the plan says of the load; `here`: as much of it as this machine's memory holds."""
    load = plan["loads"][0]
    lengths = [room["tokens"] - room["prefix_tokens"] for room in load["rooms"]]
    arrivals = [room["arrival_ms"] for room in load["rooms"] if room["arrival_ms"] is not None]
    span_s = (max(arrivals) - min(arrivals)) / 1e3 if len(arrivals) > 1 else 0.0
    return Workload(
        concurrency=load["in_flight"] if here else load["concurrency"],
        rate=variant.request.rate or (len(arrivals) / span_s if span_s else None),
        mean_tokens=sum(lengths) / len(lengths),
        layer_us=layer_ms * 1e3,
        decode_groups=variant.request.decode.dp,
        layers=plan["shape"]["layers"],
    )


# ---- what comes of it ---------------------------------------------------------------------------------------------


def _confirm(
    chosen: Option,
    found: Sequence[Option],
    planned: Sequence[tuple[Variant, Plan]],
    costs: Costs,
    load: Workload,
    steps: Steps,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure the chosen settings, and the other paths with the same page size and chunk."""
    variant = next(
        each for each, plan in planned if (_cp_mode(each), plan["page_size"]) == (chosen.cp_mode, chosen.page_size)
    )
    others = [each for each in found if (each.page_size, each.cp_mode) == (chosen.page_size, chosen.cp_mode)]
    request = replace(
        variant.request,
        paths=tuple(each.path for each in others),
        chunk_tokens=chosen.chunk_tokens,
        ring_mb=max(each.ring_mb for each in others) or None,
        pipelines=(str(chosen.group_size),) if chosen.group_size else ("off",),
    )
    plan = make_plan(request)
    room = room_of(plan)
    share = min(1.0, load.mean_tokens / room.tokens)
    said = {
        path: predict(room, path, chosen.chunk_tokens, costs, load.concurrency, load.rate, share)
        for path in request.paths
    }
    return confirm(plan, request, said, _REPEAT, steps)


def _facts(costs: Costs, room: Room, load: Workload, chosen: Option) -> dict[str, Any]:
    arrivals = "as fast as they fit" if load.rate is None else f"{load.rate:.3g} a second"
    return {
        "origin": costs.origin,
        "lane": {**costs.lane.cost._asdict(), "on_cpu": costs.lane.on_cpu},
        "memcpy_gb_per_s": costs.memcpy_gb_per_s,
        "cores": costs.cores,
        "room": {
            "tokens": room.tokens,
            "bytes": room.nbytes,
            "writers": len(room.writers),
            "readers": len(room.readers),
        },
        "load": f"at most {load.concurrency} in flight, {arrivals}",
        "settings": chosen.settings(),
    }


def _row(option: Option) -> dict[str, Any]:
    said = option.prediction
    return {
        "recommended": option.recommended,
        "path": option.path,
        "page_size": option.page_size,
        "chunk_tokens": option.chunk_tokens,
        "cp_mode": option.cp_mode or None,
        "ring_bytes": option.ring_mb << 20 if option.ring_bytes else None,
        "group_size": option.group_size or None,
        "rooms_per_s": said.rooms_per_s,
        "gb_per_s": said.gb_per_s,
        "p50_ns": round(said.p50_us * 1e3),
        "p99_ns": round(said.p99_us * 1e3),
        "alone_ns": round(said.alone_us * 1e3),
        "cpu_ns": round(said.cpu_us * 1e3),
        "hidden_ratio": option.hidden_ratio,
        "padded_ratio": option.padded_ratio,
        "bound": said.bound,
        "why": option.why,
    }


def _print(output: Output, found: Sequence[Option], facts: dict[str, Any], checked: Sequence[dict[str, Any]]) -> None:
    rows = [_row(option) for option in found]
    report = Report(
        TUNE,
        rows,
        answered=1,
        objects=lambda kept: [{**facts, "options": list(kept), "confirmed": list(checked)}],
        blocks=lambda kept, _width: blocks(kept, facts, checked),
    )
    report.notes += remarks(checked) if checked else ["kvctl tune --confirm runs the bench with it and compares"]
    output.emit(report)
    for note in report.notes:
        output.note(note)
