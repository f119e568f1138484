"""Latencies and times to first token: small plots of one quantile each on a common scale, or nested bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvctl.lab.bench.html import scale
from kvctl.lab.bench.html.bars import LONGEST_BESIDE, Bar, Piece, bar_chart
from kvctl.lab.bench.html.chart import line_chart
from kvctl.lab.bench.html.figure import figure, figures, section, series_legend, style_legend
from kvctl.lab.bench.html.loads import Run, common_load
from kvctl.lab.bench.html.markup import Markup, joined
from kvctl.lab.bench.html.numbers import lookup, milliseconds, significant
from kvctl.lab.bench.html.rates import sweep_lines, sweep_scale, tip
from kvctl.lab.bench.html.series import Facet, arranged, every_facet, sort_out

_QUANTILES = ("p50", "p95", "p99")
_MOST_SPREAD = 8.0
_KINDS = {
    "latency_ms": ("Latency", "From the end of the forward pass to the moment decode may start."),
    "ttft_ms": ("Time to first token", "From the request's arrival to its first token in the simulated serving loop."),
    "tpot_ms": ("Time per output token", "Of the simulated serving loop, once a request decodes."),
}


def latencies(runs: Sequence[Run]) -> Markup:
    """A section on each kind of time over what was swept; one section with bars where nothing was."""
    sections: list[Markup] = []
    bars: list[Markup] = []
    for kind, (title, lead) in _KINDS.items():
        timed = [run for run in runs if lookup(run, kind, "p50")]
        swept, _ = every_facet(timed)
        if swept:
            charts = [chart for facet in swept for chart in _row(facet, kind, title)]
            drawn = figures(*charts, kind="three")
            sections.append(
                section(title, f"{lead} The plots of a row share their scale.", series_legend(sort_out(timed)), drawn)
            )
        elif timed:
            bars.append(figure(title, lead, _nested(timed, kind, title)))
    if bars:
        lead = "Bars reach to the median (p50), then to the 95th and the 99th percentile"
        lead = f"{', at '.join(filter(None, [lead, common_load(runs)]))}."
        legend = style_legend([(f"fill c6 q{quantile}", quantile) for quantile in _QUANTILES])
        sections.append(section("Latency", lead, legend, figures(*bars)))
    return joined(*sections)


def time_unit(most_ms: float) -> tuple[str, float]:
    """The unit for an axis up to `most_ms`, and how many of it a millisecond is."""
    if most_ms < 1:
        return "µs", 1e3
    return ("s", 1e-3) if most_ms >= 10_000 else ("ms", 1.0)


def _row(facet: Facet, kind: str, title: str) -> list[Markup]:
    known = {quantile: _values(facet, kind, quantile) for quantile in _QUANTILES}
    values = [value for each in known.values() for value in each]
    unit, factor = time_unit(max(values))
    far = max(values) > _MOST_SPREAD * min(values)
    heights = [value * factor for value in values]
    y = scale.logarithmic(heights, unit, significant) if far else scale.from_zero(max(heights), unit, significant)
    charts = []
    for quantile in (quantile for quantile, found in known.items() if found):
        lines = sweep_lines(facet, _scaled(kind, quantile, factor), f"{unit} {quantile}")
        name = f"{title} {quantile} over {facet.axis.over}"
        remark = ", ".join(filter(None, [f"over {facet.axis.over}", facet.fixed, "logarithmic" if far else ""]))
        charts.append(figure(quantile, remark, line_chart(name, lines, sweep_scale(facet), y, width=340)))
    return charts


def _scaled(kind: str, quantile: str, factor: float) -> Callable[[Run], float | None]:
    def value(run: Run) -> float | None:
        found = lookup(run, kind, quantile)
        return found * factor if found else None

    return value


def _values(facet: Facet, kind: str, quantile: str) -> list[float]:
    found = (lookup(run, kind, quantile) for each in facet.series for run in each.runs)
    return [value for value in found if value]


def _nested(runs: Sequence[Run], kind: str, title: str) -> Markup:
    groups = []
    most = max(value for run in runs for value in _known(run, kind).values())
    unit, factor = time_unit(most)
    for heading, entries in arranged(runs, LONGEST_BESIDE):
        bars = []
        for entry in entries:
            known = _known(entry.run, kind)
            told = " · ".join(f"{quantile} {milliseconds(value)}" for quantile, value in known.items())
            hint = tip(entry.series.label, entry.run, told)
            pieces, reached = [], 0.0
            for quantile, value in known.items():
                style = f"fill c{entry.series.colour} q{quantile}"
                pieces.append(Piece(max(0.0, value - reached) * factor, style, hint))
                reached = max(reached, value)
            bars.append(Bar(entry.label, tuple(pieces), told))
        groups.append((heading, bars))
    axis = scale.from_zero(most * factor, unit, significant)
    return bar_chart(title, groups, axis)


def _known(run: Mapping[str, object], kind: str) -> dict[str, float]:
    return {quantile: value for quantile in _QUANTILES if (value := lookup(run, kind, quantile)) is not None}
