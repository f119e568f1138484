"""Throughput: over what was swept, or as bars where one load was measured, with this machine's floors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvctl.lab.bench.html import loads, scale
from kvctl.lab.bench.html.bars import LONGEST_BESIDE, Bar, Piece, bar_chart
from kvctl.lab.bench.html.chart import Level, Line, line_chart
from kvctl.lab.bench.html.figure import figure, figures, section, series_legend
from kvctl.lab.bench.html.loads import Run
from kvctl.lab.bench.html.markup import Markup
from kvctl.lab.bench.html.numbers import gb_per_s, lookup, milliseconds, number, significant
from kvctl.lab.bench.html.series import Facet, arranged, every_facet, sort_out

_FLOORS = {
    "memcpy_gb_per_s": "one memcpy",
    "transport_write_gb_per_s": "one write",
    "device_copy_gb_per_s": "one device copy",
    "p2p_gb_per_s": "one peer-to-peer copy",
}
# A floor this much above everything measured would leave a linear axis empty.
_MOST_HEADROOM = 3.0
_MOST_SPREAD = 12.0
_RATES = {"gb_per_s": ("Throughput", "GB/s"), "rooms_per_s": ("Rooms", "rooms/s")}


def floors(document: Mapping[str, Any]) -> list[Level]:
    """What this machine can do at best, lowest first, as measured in the same run."""
    found = document.get("floors")
    if not isinstance(found, Mapping):
        return []
    known = {text: number(found.get(name)) for name, text in _FLOORS.items()}
    writes = found.get("write_gb_per_s_by_transport")
    if isinstance(writes, Mapping) and len(writes) > 1:
        known.pop(_FLOORS["transport_write_gb_per_s"])
        known |= {f"one write over {transport}": number(value) for transport, value in writes.items()}
    if known[_FLOORS["p2p_gb_per_s"]]:
        # What a GPU does within itself bounds nothing that leaves it, and would flatten everything else.
        known.pop(_FLOORS["device_copy_gb_per_s"])
    levels = [Level(f"{text} {significant(value)} GB/s", value) for text, value in known.items() if value]
    return sorted(levels, key=lambda level: level.value)


def throughput(runs: Sequence[Run], levels: Sequence[Level]) -> Markup | None:
    """The section on throughput; None where no run says how fast it was."""
    moving = [run for run in runs if all(lookup(run, name) for name in _RATES)]
    if not moving:
        return None
    lead = "Bytes that landed, over the wall clock in which at least one room was under way."
    if levels:
        lead += " Dashed: what this machine does at best, measured in the same run."
    swept, left_out = every_facet(moving)
    drawn = [_over_axis(facet, name, levels if name == "gb_per_s" else ()) for facet in swept for name in _RATES]
    if not drawn:
        drawn = [_as_bars(moving, name, levels if name == "gb_per_s" else ()) for name in _RATES]
        return section("Throughput", lead, figures(*drawn))
    if left_out:
        lead += f" {left_out} more loads are in the table only."
    return section("Throughput", lead, series_legend(sort_out(moving)), figures(*drawn))


def sweep_scale(facet: Facet) -> scale.Scale:
    """The swept axis: a tick at every value that was measured."""
    values = [facet.at(run) for each in facet.series for run in each.runs]
    return scale.stops(values, facet.axis.title, facet.axis.label)


def sweep_lines(facet: Facet, value: Callable[[Run], float | None], unit: str) -> list[Line]:
    """The facet's series as lines through what `value` finds; runs without it have no point."""
    lines = []
    for each in facet.series:
        known = [(facet.at(run), found, run) for run in each.runs if (found := value(run)) is not None]
        points = tuple((x, y, tip(each.label, run, f"{significant(y)} {unit}")) for x, y, run in known)
        if points:
            lines.append(Line(each.label, points, each.colour, each.variant))
    return lines


def tip(label: str, run: Run, told: str) -> str:
    """A tooltip: what this is, and what else one would ask next."""
    verified = {True: "verified", False: "NOT VERIFIED"}.get(run.get("verified"), "not looked at")  # type: ignore[arg-type]
    p50 = milliseconds(lookup(run, "latency_ms", "p50"))
    rates = f"{gb_per_s(lookup(run, 'gb_per_s'))}, {significant(lookup(run, 'rooms_per_s'))} rooms/s"
    return f"{label} · {loads.told(run)}\n{told}\n{rates}, latency p50 {p50}\n{run.get('rooms', '-')} rooms, {verified}"


def _over_axis(facet: Facet, name: str, levels: Sequence[Level]) -> Markup:
    title, unit = _RATES[name]
    lines = sweep_lines(facet, lambda run: lookup(run, name) or None, unit)
    values = [y for line in lines for _, y, _ in line.points]
    heights = [*values, *(level.value for level in levels)]
    far = max(heights) > _MOST_HEADROOM * max(values) or max(values) > _MOST_SPREAD * min(values)
    y = scale.logarithmic(heights, unit, significant) if far else scale.from_zero(max(heights), unit, significant)
    remark = ", ".join(filter(None, [facet.fixed, "logarithmic" if far else ""]))
    return figure(f"{title} over {facet.axis.over}", remark, line_chart(title, lines, sweep_scale(facet), y, levels))


def _as_bars(runs: Sequence[Run], name: str, levels: Sequence[Level]) -> Markup:
    title, unit = _RATES[name]
    groups = []
    for heading, entries in arranged(runs, LONGEST_BESIDE):
        bars = []
        for entry in entries:
            value = lookup(entry.run, name) or 0.0
            told = tip(entry.series.label, entry.run, f"{significant(value)} {unit}")
            bars.append(Bar(entry.label, (Piece(value, f"fill c{entry.series.colour}", told),), significant(value)))
        groups.append((heading, bars))
    most = max([*(lookup(run, name) or 0.0 for run in runs), *(level.value for level in levels)])
    axis = scale.from_zero(most, unit, significant)
    return figure(title, loads.common_load(runs), bar_chart(title, groups, axis, levels))
