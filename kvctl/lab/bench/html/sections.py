"""Sections of the report with charts, each made from the runs of a saved result; None without data for it.

A series is the runs that differ only in their load: concurrency and prompt length. Lines are drawn over each
of them that was swept, bars by load if none was.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from kvctl.lab.bench.html.charts import Bar, Level, Piece, Point, bar_chart, figure, line_chart, section
from kvctl.lab.bench.html.markup import Markup, lookup, milliseconds, number, significant, time_unit
from kvctl.lab.bench.views import contestants

Run = Mapping[str, Any]
"""A row of the saved result."""

_AXES = {
    "concurrency": ("concurrency", "concurrency {}"),
    "tokens": ("prompt tokens", "{} tokens"),
}
"""Fields of a load that a bench can sweep: name of the axis, and form of a value."""

_ROOFLINES = {
    "memcpy_gb_per_s": "one memcpy",
    "transport_write_gb_per_s": "one write",
    "device_copy_gb_per_s": "one device copy",
    "p2p_gb_per_s": "one peer-to-peer copy",
}
_TIMES = {
    "latency_ms": ("Latency", "From the end of the forward pass to the moment decode may start."),
    "ttft_ms": ("Time to first token", "From the request's arrival to its first token."),
    "tpot_ms": ("Time per output token", "Once a request decodes."),
}
_QUANTILES = {"p50": "c0", "p95": "c5", "p99": "hidden"}
_STAGES = ("gate", "queue", "gather", "post", "wire", "arrive", "scatter")
_MAX_ROWS = 4


def load_text(run: Run, without: str = "") -> str:
    """Formats the known values of a run's load, except one: `concurrency 4 · 1,024 tokens`."""
    known = ((form, value) for name, (_, form) in _AXES.items() if name != without and (value := lookup(run, name)))
    return " · ".join(form.format(significant(value) if value % 1 else f"{value:,.0f}") for form, value in known)


def rooflines(document: Mapping[str, Any]) -> list[Level]:
    """Returns the machine's transfer limits from the saved result, lowest first."""
    found = document["floors"]
    known = {text: number(found.get(name)) for name, text in _ROOFLINES.items()}
    writes = found["write_gb_per_s_by_transport"]
    if len(writes) > 1:
        known.pop(_ROOFLINES["transport_write_gb_per_s"])
        known |= {f"one write over {transport}": number(value) for transport, value in writes.items()}
    if known[_ROOFLINES["p2p_gb_per_s"]]:
        # A copy within a GPU does not limit transfers between GPUs, and its rate would flatten the chart.
        known.pop(_ROOFLINES["device_copy_gb_per_s"])
    levels = [Level(f"{text} {significant(value)} GB/s", value) for text, value in known.items() if value]
    return sorted(levels, key=lambda level: level.value)


def throughput(runs: Sequence[Run], levels: Sequence[Level]) -> Markup | None:
    """Returns the section on throughput, with the machine's limits."""
    moved = any(lookup(run, "gb_per_s") for run in runs)
    lead = f"{'Bytes' if moved else 'Rooms'} that landed, over the wall clock in which at least one room was in flight."
    if levels:
        lead += " Dashed: the limits of this machine, measured in the same run."
    drawn = _values("Throughput", "GB/s", runs, ("gb_per_s",), levels=levels)
    drawn += _values("Rooms", "rooms/s", runs, ("rooms_per_s",))
    return section("Throughput", lead, *drawn) if drawn else None


def latencies(runs: Sequence[Run]) -> list[Markup]:
    """Returns a section for each kind of time (latency, TTFT, TPOT) that is known."""
    sections = []
    for kind, (title, lead) in _TIMES.items():
        longest = max((lookup(run, kind, each) or 0.0 for run in runs for each in _QUANTILES), default=0.0)
        unit, factor = time_unit(longest)
        drawn = _values(title, unit, runs, *((kind, each) for each in _QUANTILES), factor=factor)
        if drawn:
            sections.append(section(title, lead, *drawn))
    return sections


def exposed(runs: Sequence[Run]) -> Markup | None:
    """Returns the section on exposed and hidden transfer; None if none was hidden, as in the section on latency."""
    known = [run for run in runs if lookup(run, "exposed_ms", "mean") is not None]
    if not any(lookup(run, "hidden_ms", "mean") for run in known):
        return None
    lead = (
        "Transfer that runs beside compute delays nobody; a request waits for the rest, after the forward pass. Means "
        "per room."
    )
    figures = {"hidden": ("hidden_ms", "mean"), "exposed": ("exposed_ms", "mean")}
    colours = {"hidden": "hidden", "exposed": "wait"}
    drawn = _stacked("Transfer per room", known, figures, colours, 1.0)
    return section("Exposed and hidden transfer", lead, drawn)


def stages(runs: Sequence[Run]) -> Markup | None:
    """Returns the section on the time that parts spend in each stage."""
    figures = {stage: ("stages_us", stage, "p50") for stage in _STAGES}
    known = [run for run in runs if any(lookup(run, *keys) for keys in figures.values())]
    if not known:
        return None
    lead = (
        "Median time of a part in each stage, end to end. Parts run beside one another, so the sum is not a room's "
        "latency."
    )
    drawn = _stacked("Stages of a part", known, figures, dict(zip(_STAGES, _STAGES, strict=True)), 1e-3)
    return section("Where a part's time goes", lead, drawn)


def busy_engines(runs: Sequence[Run]) -> Markup | None:
    """Returns the section on engines whose thread runs Python; None if no engine was busy."""
    busy = [
        {**run, "slowdown_percent": 100 * (lookup(run, "engine_slowdown_ratio") or 0.0)}
        for run in runs
        if lookup(run, "engine_stall_ms") is not None
    ]
    if not busy:
        return None
    asked = lookup(busy[0], "asked_rooms_per_s")
    levels = [Level(f"asked {significant(asked)} rooms/s", asked)] if asked else []
    lead = (
        "The thread that calls the agent runs a loop between its calls, as a scheduler does, so the agent's threads "
        "wait for the interpreter. The slowdown is the time lost to interruptions, compared with the "
        "same loop while the agent is idle, measured before and after each batch."
    )
    drawn = _values("Rooms served", "rooms/s", runs, ("served_rooms_per_s",), levels=levels) if asked else []
    drawn += _values("Slowdown of the engine's loop", "%", busy, ("slowdown_percent",))
    drawn += _values("Longest stall of the engine's loop", "ms", busy, ("engine_stall_ms",))
    drawn += _values("Success on decode to done on prefill, median", "ms", busy, ("done_ms", "p50"))
    return section("Beside a busy engine", lead, *drawn)


# ---- runs in charts -------------------------------------------------------------------------------------------------


def _values(
    title: str,
    unit: str,
    runs: Sequence[Run],
    *figures: Sequence[str],
    factor: float = 1.0,
    levels: Sequence[Level] = (),
) -> list[Markup]:
    """Returns figures of values of all runs: a line over each swept axis, or bars; none without values.

    Args:
        figures: Keys of each value in a run; several are quantiles, the first of which every known run has.
        factor: Factor of the values.
    """
    known = [run for run in runs if lookup(run, *figures[0])]
    labels = contestants(known)
    drawn = []
    for axis, (over, _) in _AXES.items():
        groups: dict[str, list[tuple[str, Run]]] = {}
        for label, run in zip(labels, known, strict=True):
            if lookup(run, axis):
                groups.setdefault(load_text(run, axis), []).append((label, run))
        swept = [name for name, group in groups.items() if len({lookup(run, axis) for _, run in group}) > 1]
        rows = swept[:: -(-len(swept) // _MAX_ROWS) or 1]
        points = [
            Point(
                label,
                at,
                value * factor,
                _tip(label, run, f"{significant(value * factor)} {unit} {column}"),
                row,
                column,
            )
            for row in rows
            for label, run in sorted(groups[row], key=lambda each: lookup(each[1], axis) or 0.0)
            for keys in figures
            if (at := lookup(run, axis)) and (value := lookup(run, *keys))
            for column in [keys[-1] if len(figures) > 1 else ""]
        ]
        if points:
            remark = f"{len(swept) - len(rows)} more loads are in the table only" if len(rows) < len(swept) else ""
            name = f"{title} over {over}"
            drawn.append(figure(name, remark, line_chart(name, points, over, unit, levels)))
    if drawn or not known:
        return drawn
    bars = []
    for label, run in zip(labels, known, strict=True):
        values = {keys[-1] if len(figures) > 1 else "": (lookup(run, *keys) or 0.0) * factor for keys in figures}
        text = " · ".join(f"{name} {significant(value)}".strip() for name, value in values.items())
        ends = list(itertools.accumulate(values.values(), max, initial=0.0))
        tip = _tip(label, run, f"{text} {unit}")
        pieces = [Piece(name, ends[at], ends[at + 1], tip) for at, name in enumerate(values)]
        bars.append(Bar(label, pieces, text, load_text(run)))
    colours = _QUANTILES if len(figures) > 1 else {"": "c0"}
    return [figure(title, "", bar_chart(title, bars, unit, colours, levels))]


def _stacked(
    title: str, runs: Sequence[Run], figures: Mapping[str, Sequence[str]], colours: Mapping[str, str], unit_ms: float
) -> Markup:
    """Returns a figure with a bar per run, whose pieces follow one another.

    Args:
        figures: Keys of the length of each kind of piece in a run.
        unit_ms: Unit of the lengths, in milliseconds.
    """
    wholes = [sum(lookup(run, *keys) or 0.0 for keys in figures.values()) * unit_ms for run in runs]
    unit, factor = time_unit(max(wholes))
    bars = []
    for label, run, whole in zip(contestants(runs), runs, wholes, strict=True):
        lengths = {kind: (lookup(run, *keys) or 0.0) * unit_ms for kind, keys in figures.items()}
        ends = [0.0, *itertools.accumulate(lengths.values())]
        about = f"{label} · {load_text(run)}"
        pieces = [
            Piece(kind, ends[at] * factor, ends[at + 1] * factor, f"{about}\n{kind} {milliseconds(length)}")
            for at, (kind, length) in enumerate(lengths.items())
            if length
        ]
        bars.append(Bar(label, pieces, milliseconds(whole), load_text(run)))
    return figure(title, "", bar_chart(title, bars, unit, colours))


def _tip(label: str, run: Run, value: str) -> str:
    """Returns the tooltip of a data point: series, load, value, and the run's rates, latency and verdict."""
    verified = {True: "verified", False: "NOT VERIFIED", None: "not compared"}[run["verified"]]
    figures = [f"{significant(lookup(run, 'rooms_per_s'))} rooms/s"]
    if (rate := lookup(run, "gb_per_s")) is not None:
        figures.insert(0, f"{significant(rate)} GB/s")
    if (p50 := lookup(run, "latency_ms", "p50")) is not None:
        figures.append(f"latency p50 {milliseconds(p50)}")
    return f"{label} · {load_text(run)}\n{value}\n{', '.join(figures)}\n{run['rooms']} rooms, {verified}"
