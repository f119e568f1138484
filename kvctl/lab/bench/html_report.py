"""The result of a bench as one self-contained HTML page: charts, its tables as on a terminal, and how it was measured.

vl-convert-python draws the charts, without network or browser, as SVG with the colours of the style sheet, so that they
follow the reader's light or dark mode.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from kvctl.lab.bench.rows import STAGES
from kvctl.lab.bench.views import contestants, nanoseconds
from kvctl.render.report import Block, Grid
from kvctl.render.sanitize import printable_lines
from kvctl.render.terminal import render
from kvctl.render.view import Row
from kvctl_agent.contract.extras import install

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<title>{command}</title>
<style>
:root {{ color-scheme: light dark; --ink: #444; --grid: #ddd;
  --c0: #1f6fb4; --c1: #d1650b; --c2: #2b8a3e; --c3: #b02a75; --c4: #6b4fbb; --c5: #8a6d00; --c6: #0b7f86; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #ccc; --grid: #444;
  --c0: #6db3f2; --c1: #ff9f52; --c2: #69d27f; --c3: #f27dbd; --c4: #b59cff; --c5: #dfc04a; --c6: #5ccfd6; }} }}
body {{ font-family: sans-serif; margin: 2em }} pre, figure {{ overflow-x: auto; margin: 1em 0 }}
</style>
</head>
<body>
<h1><code>{command}</code></h1>
<p>{started_at}</p>
{charts}
<pre>{tables}</pre>
<dl>{facts}</dl>
</body>
</html>
"""
_TEXT = {"labelColor": "var(--ink)", "titleColor": "var(--ink)", "labelLimit": 400}
_CONFIG = {
    "background": None,
    "view": {"stroke": None},
    "axis": {**_TEXT, "gridColor": "var(--grid)", "domainColor": "var(--ink)", "tickColor": "var(--ink)"},
    "legend": {**_TEXT, "title": None, "orient": "bottom", "columns": 4},
    "header": {**_TEXT, "title": None},
    "text": {"color": "var(--ink)", "fontSize": 9},
}
_COLOURS = [f"var(--c{number})" for number in range(7)]
_SWEPT = {"concurrency": "requests in flight", "tokens": "tokens of a prompt", "layer_ms": "ms per layer"}
"""Options of a load, with the title of an axis; the x axis is the option of which most values were measured."""


class _Chart(NamedTuple):
    """A chart of one figure; `parts` of a row, such as quantiles, stand side by side."""

    title: str
    unit: str
    parts: Mapping[str, Callable[[Row], float | None]]


def _times(section: str, *names: str) -> Mapping[str, Callable[[Row], float | None]]:
    return {name: nanoseconds(section, name) for name in names}


_CHARTS = (
    _Chart("Throughput of KV", "GB/s", {"": lambda row: row.get("gb_per_s")}),
    _Chart("Generated tokens", "tokens/s", {"": lambda row: row.get("output_tokens_per_s")}),
    _Chart("Latency of a room after its forward", "ms", _times("latency_ms", "p50", "p99")),
    _Chart("Time to first token", "ms", _times("ttft_ms", "p50", "p99")),
    _Chart("Time per output token", "ms", _times("tpot_ms", "mean")),
    _Chart("Stages of a part, p50", "ms", {name: nanoseconds("stages_us", name, "p50", per=1e3) for name in STAGES}),
)


def write_result(
    save: Path | None, html: Path | None, document: Mapping[str, Any], shown: Sequence[Block], started_at: str
) -> None:
    """Writes the result of a bench to the files of --save and --html; `shown` is the terminal's output."""
    if save is not None:
        save.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
    if html is not None:
        command = shlex.join(["kvctl", *sys.argv[1:]])
        page = html_report(shown, document["runs"], document["env"], command, started_at)
        html.write_text(page, encoding="utf-8")


def html_report(
    blocks: Sequence[Block], rows: Sequence[Row], env: Mapping[str, Any], command: str, started_at: str
) -> str:
    """Returns the page, to be written as UTF-8; all texts, some of which are of other machines, are escaped.

    Args:
        blocks: the terminal's output, whose tables have all their columns here.
        rows: `runs` of the saved result, from which the charts are drawn.
        env: `env` of the saved result.
        started_at: start time as text, such as `2026-11-20 12:49:42 UTC`.
    """
    columns = [each.view.columns if isinstance(each, Grid) else () for each in blocks]
    facts = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>\n" for name, value in env.items() if value)
    return _PAGE.format(
        command=_text(command),
        started_at=_text(started_at),
        charts=_charts(rows),
        tables=_text(render(blocks, columns, None, colour=False)),
        facts=facts,
    )


def _charts(rows: Sequence[Row]) -> str:
    try:
        import vl_convert  # the engine takes half a second to start
    except ImportError:
        return f"<p>Charts need vl-convert-python, the extra <code>report</code>: {_text(install('report'))}</p>"
    drawn = []
    for chart in _CHARTS:
        if (spec := _spec(chart, rows)) is not None:
            svg = vl_convert.vegalite_to_svg(spec, "6.1", _CONFIG, allowed_base_urls=[])
            drawn.append(f"<figure><figcaption>{chart.title}</figcaption>{svg}</figure>")
    return "\n".join(drawn)


def _spec(chart: _Chart, rows: Sequence[Row]) -> dict[str, Any] | None:
    """Returns the Vega-Lite specification: lines over the swept option, or bars; None if no row has the figure."""
    values: dict[str, set[Any]] = {axis: {row.get(axis) for row in rows} for axis in _SWEPT}
    x, *others = sorted(values, key=lambda axis: -len(values[axis]))
    series = [printable_lines(name) for name in contestants(rows)]
    points = [
        {
            "series": name,
            "part": part,
            "load": ", ".join(f"{row.get(axis)} {_SWEPT[axis]}" for axis in others if len(values[axis]) > 1),
            "x": row.get(x),
            "y": value / 1e6 if chart.unit == "ms" else value,
        }
        for row, name in zip(rows, series, strict=True)
        for part, figure in chart.parts.items()
        if (value := figure(row)) is not None
    ]
    if not points:
        return None
    swept = len(values[x]) > 1
    part: dict[str, Any] = {"field": "part", "sort": list(chart.parts)}
    scale = {"domain": list(dict.fromkeys(series)), "range": _COLOURS}
    encoding: dict[str, Any] = {
        "y": {"field": "y", "type": "quantitative", "title": chart.unit, "axis": {"tickCount": 5}},
        "color": {"field": "series", "type": "nominal", "scale": scale},
    }
    if swept:
        ticks = {"values": sorted(values[x]), "grid": False}
        stretch = {"type": "log" if min(values[x]) > 0 else "linear", "nice": False, "padding": 12}
        encoding["x"] = {"field": "x", "type": "quantitative", "title": _SWEPT[x], "axis": ticks, "scale": stretch}
        layers: list[Any] = [{"mark": {"type": "line", "point": {"filled": True, "size": 50}}}]
        size: dict[str, Any] = {"width": max(120, 720 // len(chart.parts) - 40)}
    else:
        encoding["x"] = {**part, "type": "nominal", "title": None, "axis": {"labelAngle": 0}}
        encoding["xOffset"] = {"field": "series", "type": "nominal", "sort": None}
        label = {"text": {"field": "y", "type": "quantitative", "format": ",.3~r"}, "color": {"value": "var(--ink)"}}
        layers = [{"mark": "bar"}, {"mark": {"type": "text", "baseline": "bottom", "dy": -2}, "encoding": label}]
        size = {"width": {"step": 36, "for": "offset"}}
    loads = {"field": "load", "sort": list(dict.fromkeys(point["load"] for point in points))}
    facet = {"row": loads, **({"column": part} if swept else {})}
    spec = {**size, "height": 180, "encoding": encoding, "layer": layers}
    return {"data": {"values": points}, "facet": facet, "spec": spec}


def _text(value: object) -> str:
    return escape(printable_lines(", ".join(map(str, value)) if isinstance(value, list) else str(value)))
