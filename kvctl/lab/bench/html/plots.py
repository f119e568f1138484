"""Sections of the report with charts: throughput, latency, exposed transfer, stages of a part, and staging rings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvctl.lab.bench.html import charts
from kvctl.lab.bench.html.charts import (
    Bar,
    Group,
    Level,
    Line,
    Piece,
    Scale,
    bar_chart,
    figure,
    figures,
    line_chart,
    line_legend,
    piece_legend,
    section,
)
from kvctl.lab.bench.html.markup import Markup, joined, lookup, milliseconds, number, significant, tag, time_unit
from kvctl.lab.bench.html.series import Entry, Facet, Run, arranged, common_load, facets, load_text, series_of
from kvctl.lab.bench.timelines import RingTimeline
from kvctl.render import units

_ROOFLINES = {
    "memcpy_gb_per_s": "one memcpy",
    "transport_write_gb_per_s": "one write",
    "device_copy_gb_per_s": "one device copy",
    "p2p_gb_per_s": "one peer-to-peer copy",
}
_RATES = {"gb_per_s": ("Throughput", "GB/s"), "rooms_per_s": ("Rooms", "rooms/s")}
_TIMES = {
    "latency_ms": ("Latency", "From the end of the forward pass to the moment decode may start."),
    "ttft_ms": ("Time to first token", "From the request's arrival to its first token in the simulated serving loop."),
    "tpot_ms": ("Time per output token", "Of the simulated serving loop, once a request decodes."),
}
_QUANTILES = ("p50", "p95", "p99")
_STAGES = {
    "gate": "gate: waits for grant, watermark, lease",
    "gather": "gather: copied into staging",
    "post": "post: handed to the engine",
    "wire": "wire: until the engine reports it complete",
    "scatter": "scatter: copied into its pages",
}
# A limit this much above all measured values would leave a linear axis almost empty.
_MAX_HEADROOM = 3.0
_MAX_RATE_SPREAD = 12.0
# If times differ by a larger factor, they are drawn on a logarithmic axis or as shares, because the shortest times
# would be invisible on a linear axis.
_MAX_TIME_SPREAD = 8.0
_BARS_PER_FIGURE = 30
_MAX_RINGS = 12
# If a smaller share of a ring is used, its chart ends at the ring's peak, which would otherwise be invisible.
_MIN_RING_USE = 0.25


# ---- throughput -----------------------------------------------------------------------------------------------------


def rooflines(document: Mapping[str, Any]) -> list[Level]:
    """Returns the machine's transfer limits from the saved result, lowest first."""
    found = document.get("floors")
    if not isinstance(found, Mapping):
        return []
    known = {text: number(found.get(name)) for name, text in _ROOFLINES.items()}
    writes = found.get("write_gb_per_s_by_transport")
    if isinstance(writes, Mapping) and len(writes) > 1:
        known.pop(_ROOFLINES["transport_write_gb_per_s"])
        known |= {f"one write over {transport}": number(value) for transport, value in writes.items()}
    if known[_ROOFLINES["p2p_gb_per_s"]]:
        # A copy within a GPU does not limit transfers between GPUs, and its rate would flatten the chart.
        known.pop(_ROOFLINES["device_copy_gb_per_s"])
    levels = [Level(f"{text} {significant(value)} GB/s", value) for text, value in known.items() if value]
    return sorted(levels, key=lambda level: level.value)


def throughput(runs: Sequence[Run], levels: Sequence[Level]) -> Markup | None:
    """Returns the section on throughput; None if no run transferred anything."""
    moving = [run for run in runs if all(lookup(run, name) for name in _RATES)]
    if not moving:
        return None
    lead = "Bytes that landed, over the wall clock in which at least one room was in flight."
    if levels:
        lead += " Dashed: the limits of this machine, measured in the same run."
    swept, left_out = facets(moving)
    if not swept:
        return section("Throughput", lead, figures(*(_rate_bars(moving, name, levels) for name in _RATES)))
    if left_out:
        lead += f" {left_out} more loads are in the table only."
    legend = line_legend([each.style for each in series_of(moving)])
    drawn = [_rate_lines(facet, name, levels) for facet in swept for name in _RATES]
    return section("Throughput", lead, legend, figures(*drawn))


def _rate_lines(facet: Facet, name: str, levels: Sequence[Level]) -> Markup:
    title, unit = _RATES[name]
    levels = levels if name == "gb_per_s" else ()
    lines = _lines(facet, lambda run: lookup(run, name) or None, unit)
    values = [y for line in lines for _, y, _ in line.points]
    heights = [*values, *(level.value for level in levels)]
    far = max(heights) > _MAX_HEADROOM * max(values) or max(values) > _MAX_RATE_SPREAD * min(values)
    remark = ", ".join(filter(None, [facet.fixed, "logarithmic" if far else ""]))
    chart = line_chart(title, lines, _swept_scale(facet), _value_scale(heights, unit, far), levels)
    return figure(f"{title} over {facet.axis.over}", remark, chart)


def _rate_bars(runs: Sequence[Run], name: str, levels: Sequence[Level]) -> Markup:
    title, unit = _RATES[name]
    levels = levels if name == "gb_per_s" else ()

    def bar(entry: Entry) -> Bar:
        value = lookup(entry.run, name) or 0.0
        tip = _tip(entry.series.label, entry.run, f"{significant(value)} {unit}")
        return Bar(entry.label, (Piece(value, f"fill c{entry.series.colour}", tip),), significant(value))

    most = max([*(lookup(run, name) or 0.0 for run in runs), *(level.value for level in levels)])
    axis = charts.from_zero(most, unit, significant)
    return figure(title, common_load(runs), bar_chart(title, _bars(arranged(runs), bar), axis, levels))


# ---- latency --------------------------------------------------------------------------------------------------------


def latencies(runs: Sequence[Run]) -> Markup:
    """Returns a section for each kind of time (latency, TTFT, TPOT), plotted over the swept axes.

    Kinds of time without a swept axis share one section with bars.
    """
    sections: list[Markup] = []
    bars: list[Markup] = []
    for kind, (title, lead) in _TIMES.items():
        timed = [run for run in runs if lookup(run, kind, "p50")]
        swept, _ = facets(timed)
        if swept:
            drawn = figures(*(chart for facet in swept for chart in _quantile_lines(facet, kind, title)), kind="three")
            legend = line_legend([each.style for each in series_of(timed)])
            sections.append(section(title, f"{lead} The charts of a row share their scale.", legend, drawn))
        elif timed:
            bars.append(figure(title, lead, _quantile_bars(timed, kind, title)))
    if bars:
        lead = "Bars reach to the median (p50), then to the 95th and the 99th percentile"
        lead = f"{', at '.join(filter(None, [lead, common_load(runs)]))}."
        legend = piece_legend([(f"fill c6 q{quantile}", quantile) for quantile in _QUANTILES])
        sections.append(section("Latency", lead, legend, figures(*bars)))
    return joined(*sections)


def _quantile_lines(facet: Facet, kind: str, title: str) -> list[Markup]:
    """Returns a chart of the facet for each quantile, all on one scale."""
    known = {
        quantile: [value for each in facet.series for run in each.runs if (value := lookup(run, kind, quantile))]
        for quantile in _QUANTILES
    }
    values = [value for each in known.values() for value in each]
    unit, factor = time_unit(max(values))
    far = max(values) > _MAX_TIME_SPREAD * min(values)
    y = _value_scale([value * factor for value in values], unit, far)
    drawn = []
    for quantile in (quantile for quantile, found in known.items() if found):

        def scaled(run: Run, quantile: str = quantile) -> float | None:
            found = lookup(run, kind, quantile)
            return found * factor if found else None

        name = f"{title} {quantile} over {facet.axis.over}"
        remark = ", ".join(filter(None, [f"over {facet.axis.over}", facet.fixed, "logarithmic" if far else ""]))
        lines = _lines(facet, scaled, f"{unit} {quantile}")
        drawn.append(figure(quantile, remark, line_chart(name, lines, _swept_scale(facet), y, width=340)))
    return drawn


def _quantile_bars(runs: Sequence[Run], kind: str, title: str) -> Markup:
    """Returns a bar chart with a bar per run, stacked so that pieces end at p50, p95 and p99."""

    def known(run: Run) -> dict[str, float]:
        return {quantile: value for quantile in _QUANTILES if (value := lookup(run, kind, quantile)) is not None}

    most = max(value for run in runs for value in known(run).values())
    unit, factor = time_unit(most)

    def bar(entry: Entry) -> Bar:
        text = " · ".join(f"{quantile} {milliseconds(value)}" for quantile, value in known(entry.run).items())
        tip = _tip(entry.series.label, entry.run, text)
        pieces, reached = [], 0.0
        for quantile, value in known(entry.run).items():
            pieces.append(Piece(max(0.0, value - reached) * factor, f"fill c{entry.series.colour} q{quantile}", tip))
            reached = max(reached, value)
        return Bar(entry.label, tuple(pieces), text)

    axis = charts.from_zero(most * factor, unit, significant)
    return bar_chart(title, _bars(arranged(runs), bar), axis)


# ---- what times consist of ------------------------------------------------------------------------------------------

_Parts = list[tuple[str, float, str]]  # style, length, tooltip


def exposed(runs: Sequence[Run]) -> Markup | None:
    """Returns the section on exposed and hidden transfer.

    None if no transfer was hidden, because the section on latency then shows the same.
    """
    known = [
        run
        for run in runs
        if lookup(run, "hidden_ms", "mean") is not None and lookup(run, "exposed_ms", "mean") is not None
    ]
    if not any(lookup(run, "hidden_ms", "mean") for run in known):
        return None

    def parts(run: Run) -> tuple[_Parts, str]:
        exposed_ms, hidden_ms = lookup(run, "exposed_ms", "mean") or 0.0, lookup(run, "hidden_ms", "mean") or 0.0
        whole = exposed_ms + hidden_ms
        tip = f"{milliseconds(exposed_ms)} exposed, {milliseconds(hidden_ms)} hidden"
        share = f", {units.percent(round(hidden_ms / whole, 2))} hidden" if whole else ""
        return [("hidden", hidden_ms, tip), ("exposed", exposed_ms, tip)], f"{milliseconds(exposed_ms)} exposed{share}"

    lead = (
        "Transfer that runs beside compute delays nobody; a request waits for the rest, after the forward pass. Means "
        "per room."
    )
    legend = piece_legend([("hidden", "hidden behind compute"), ("exposed", "exposed")])
    return section("Exposed and hidden transfer", lead, legend, _stacked("Transfer per room", known, parts, 1.0))


def stages(runs: Sequence[Run]) -> Markup | None:
    """Returns the section on the time that parts spend in each stage; None if no run has stage times."""
    known = [run for run in runs if any(lookup(run, "stages_us", stage, "p50") for stage in _STAGES)]
    if not known:
        return None

    def parts(run: Run) -> tuple[_Parts, str]:
        times = {stage: lookup(run, "stages_us", stage, "p50") or 0.0 for stage in _STAGES}
        pieces = [(stage, us, f"{stage} p50 {units.duration(us * 1e3)}") for stage, us in times.items()]
        return pieces, units.duration(sum(times.values()) * 1e3)

    lead = (
        "Median time of a part in each stage, end to end, and their sum. Parts run beside one another, so the sum is "
        "not a room's latency."
    )
    legend = piece_legend(list(_STAGES.items()))
    return section("Where a part's time goes", lead, legend, _stacked("Stages of a part", known, parts, 1e-3))


def _stacked(title: str, runs: Sequence[Run], parts: Callable[[Run], tuple[_Parts, str]], unit_ms: float) -> Markup:
    """Returns figures with a stacked bar per run, of times, or of shares if the runs' times differ too much.

    Args:
        parts: Returns the pieces of a run's bar and the text after it.
        unit_ms: Unit of the pieces' lengths, in milliseconds.
    """
    wholes = [sum(length for _, length, _ in parts(run)[0]) for run in runs]
    positive = [whole for whole in wholes if whole > 0]
    as_shares = not positive or max(positive) > _MAX_TIME_SPREAD * min(positive)
    unit, factor = time_unit(max(positive, default=1.0) * unit_ms)
    axis = (
        charts.shares("share of the time")
        if as_shares
        else charts.from_zero(max(positive) * unit_ms * factor, unit, significant)
    )

    def bar(entry: Entry) -> Bar:
        found, note = parts(entry.run)
        whole = sum(length for _, length, _ in found) or 1.0
        per = 1 / whole if as_shares else unit_ms * factor
        name = f"{entry.series.label} · {load_text(entry.run)}"
        return Bar(
            entry.label, tuple(Piece(length * per, style, f"{name}\n{tip}") for style, length, tip in found), note
        )

    columns = _columns(arranged(runs))
    return figures(*(figure(title, common_load(runs), bar_chart(title, _bars(each, bar), axis)) for each in columns))


# ---- busy engines ---------------------------------------------------------------------------------------------------


def busy_engines(runs: Sequence[Run]) -> Markup | None:
    """Returns the section on engines whose thread runs Python; None if no engine was busy."""
    busy = [run for run in runs if lookup(run, "engine_stall_ms") is not None]
    if not busy:
        return None
    slower = _busy_bars("Slowdown", "%", busy, lambda run: 100 * (lookup(run, "engine_slowdown_ratio") or 0.0))
    drawn = [figure("Slowdown of the engine's loop", common_load(busy), slower)]
    stalls = _busy_bars("Longest stall", "ms", busy, lambda run: lookup(run, "engine_stall_ms") or 0.0)
    idle = max(lookup(run, "engine_idle_stall_ms") or 0.0 for run in busy)
    drawn.append(figure("Longest stall of the engine's loop", f"with an idle agent {milliseconds(idle)}", stalls))
    timed = [run for run in runs if lookup(run, "asked_rooms_per_s") and lookup(run, "served_rooms_per_s")]
    if timed:
        asked = max(lookup(run, "asked_rooms_per_s") or 0.0 for run in timed)
        level = Level(f"asked {significant(asked)} rooms/s", asked)
        rooms = _busy_bars("Rooms", "rooms/s", timed, lambda run: lookup(run, "served_rooms_per_s") or 0.0, level)
        drawn.insert(0, figure("Rooms served", common_load(timed), rooms))
    lead = (
        "The thread that calls the agent runs a loop of plain Python between its calls, as a scheduler does, so the "
        "agent's threads wait for the interpreter. The slowdown is the time lost to interruptions, compared with the "
        "same loop while the agent is idle, measured before and after each batch."
    )
    return section("Beside a busy engine", lead, figures(*drawn))


def _busy_bars(title: str, unit: str, runs: Sequence[Run], value: Callable[[Run], float], *levels: Level) -> Markup:
    """Returns a bar chart with a bar per run; a loop that ran faster than before has no bar."""

    def bar(entry: Entry) -> Bar:
        figure_text = significant(value(entry.run))
        tip = _tip(entry.series.label, entry.run, f"{figure_text} {unit}")
        return Bar(entry.label, (Piece(max(0.0, value(entry.run)), f"fill c{entry.series.colour}", tip),), figure_text)

    most = max([*(value(run) for run in runs), *(level.value for level in levels), 1.0])
    return bar_chart(title, _bars(arranged(runs), bar), charts.from_zero(most, unit, significant), levels)


_Groups = Sequence[tuple[str, Sequence[Entry]]]


def _columns(groups: _Groups) -> list[_Groups]:
    """Divides groups of bars among an even number of figures, with about `_BARS_PER_FIGURE` bars in each.

    A group is never split, so there are at most as many figures as groups.
    """
    total = sum(len(members) for _, members in groups)
    wanted = min(len(groups), 2 * math.ceil(total / (2 * _BARS_PER_FIGURE)))
    columns: list[list[tuple[str, Sequence[Entry]]]] = [[]]
    drawn = 0
    for each in groups:
        if columns[-1] and drawn >= len(columns) * total / wanted:
            columns.append([])
        columns[-1].append(each)
        drawn += len(each[1])
    return list(columns)


# ---- rings ----------------------------------------------------------------------------------------------------------


def rings(timelines: Sequence[RingTimeline]) -> Markup | None:
    """Returns the section on the occupancy of staging rings; None if no ring has at least two samples."""
    sampled = [ring for ring in timelines if len(ring["points"]) > 1]
    if not sampled:
        return None
    fullest = sorted(sampled, key=_peak_ratio, reverse=True)[:_MAX_RINGS]
    shown = [ring for ring in sampled if any(ring is other for other in fullest)]
    lead = "Bytes of each staging ring in use; rings that were sampled together share their time axis."
    if len(shown) < len(sampled):
        lead += f" The {len(shown)} fullest of {len(sampled)} rings."
    return section("Ring occupancy", lead, figures(*(_ring(ring, *_span(ring, sampled)) for ring in shown)))


def _span(ring: RingTimeline, rings: Sequence[RingTimeline]) -> tuple[int, int]:
    """Returns the times of the first and the last sample of all rings that were sampled together with this ring."""
    first, last = ring["points"][0][0], ring["points"][-1][0]
    together = [
        (points[0][0], points[-1][0])
        for points in (other["points"] for other in rings if other["path"] == ring["path"])
        if points[0][0] <= last and points[-1][0] >= first
    ]
    return min(begin for begin, _ in together), max(end for _, end in together)


def _peak(ring: RingTimeline) -> int:
    return max(point[1] for point in ring["points"])


def _peak_ratio(ring: RingTimeline) -> float:
    return _peak(ring) / max(1, ring["size_bytes"])


def _ring(ring: RingTimeline, begin: int, end: int) -> Markup:
    peak, size = _peak(ring), ring["size_bytes"]
    whole = peak >= _MIN_RING_USE * size
    most = max(size if whole else peak, 1)
    known_units = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
    per, unit = next((each for each in known_units if most >= each[0]), (1, "bytes"))
    time, factor = time_unit((end - begin) / 1e6)
    x = charts.spanning(0.0, (end - begin) / 1e6 * factor, f"time ({time})", significant)
    frame = charts.plane(x, charts.from_zero(most / per, unit, significant, binary=True), 460, 210)
    capacity = None
    if whole:
        at = frame.at_y(size / per)
        text = tag("text", f"capacity {units.size(size)}", x=frame.right, y=at - 4, text_anchor="end")
        capacity = tag("g", tag("line", x1=frame.left, x2=frame.right, y1=at, y2=at), text, class_="level")
    remark = f"peak {units.size(peak)} of {units.size(size)}, {units.percent(_peak_ratio(ring))}"
    points = [((at - begin) / 1e6 * factor, used / per) for at, used in ring["points"]]
    drawing = charts.drawing(
        f"Use of the ring of {ring['agent']}", frame, 460, charts.area(frame, points, remark), capacity
    )
    return figure(f"{ring['agent']} · {ring['path']}", remark, drawing)


# ---- shared by several sections -------------------------------------------------------------------------------------


def _swept_scale(facet: Facet) -> Scale:
    """Returns the scale of the facet's swept axis, with a tick at every measured value."""
    values = [facet.at(run) for each in facet.series for run in each.runs]
    return charts.stops(values, facet.axis.title, facet.axis.label)


def _value_scale(values: Sequence[float], unit: str, logarithmic: bool) -> Scale:
    if logarithmic:
        return charts.logarithmic(values, unit, significant)
    return charts.from_zero(max(values), unit, significant)


def _lines(facet: Facet, value: Callable[[Run], float | None], unit: str) -> list[Line]:
    """Returns a line for each series of the facet.

    Args:
        value: Returns the y value of a run; None leaves the run out.
        unit: Unit of the values, for tooltips.
    """
    lines = []
    for each in facet.series:
        known = [(facet.at(run), found, run) for run in each.runs if (found := value(run)) is not None]
        points = tuple((x, y, _tip(each.label, run, f"{significant(y)} {unit}")) for x, y, run in known)
        if points:
            lines.append(Line(each.label, points, each.colour, each.variant))
    return lines


def _bars(groups: _Groups, bar: Callable[[Entry], Bar]) -> list[Group]:
    return [(heading, [bar(entry) for entry in entries]) for heading, entries in groups]


def _tip(label: str, run: Run, value: str) -> str:
    """Returns the tooltip of a data point: series, load, value, and the run's rates, latency and verdict."""
    verdict = run.get("verified")
    verified = "verified" if verdict is True else "NOT VERIFIED" if verdict is False else "not compared"
    p50 = milliseconds(lookup(run, "latency_ms", "p50"))
    rate = lookup(run, "gb_per_s")
    rates = f"{significant(rate)}{'' if rate is None else ' GB/s'}, {significant(lookup(run, 'rooms_per_s'))} rooms/s"
    return f"{label} · {load_text(run)}\n{value}\n{rates}, latency p50 {p50}\n{run.get('rooms', '-')} rooms, {verified}"
