"""Charts as Vega-Lite specifications, drawn as SVG by vl-convert-python; figures and sections of the report.

Drawing needs no network and no browser. Texts of a specification are data, which Vega escapes. Colours are those of the
style sheet (`var(--…)`), so that charts follow the reader's light or dark mode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvctl.errors import CliError
from kvctl.lab.bench.html.markup import Markup, escape, tag
from kvctl.render.sanitize import printable_lines
from kvctl_agent.contract.extras import install

Spec = Mapping[str, Any]
"""A Vega-Lite specification, or a part of it."""

_VEGA_LITE = "6.1"
_WIDTH = 760
_COLOURS = [f"var(--c{number})" for number in range(7)]
_DASHES = ([1, 0], [6, 4], [1.5, 4], [9, 3, 2, 3])
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")
_ROUND = [digit * 10.0**power for power in range(-9, 13) for digit in (1, 2, 5)]
# Values that differ by a larger factor are drawn on a logarithmic axis, or on an axis for each load: the smallest would
# be invisible on one linear axis.
_MAX_SPREAD = 8.0
_SOFT = "var(--soft)"
_LABELS = {
    "labelColor": _SOFT,
    "titleColor": _SOFT,
    "titleFontWeight": "normal",
    "labelLimit": 300,
    "labelFontSize": 11,
}
_CONFIG = {
    "background": None,
    "padding": {"left": 4, "right": 24, "top": 4, "bottom": 4},  # for readers whose font is wider
    "numberFormat": ",~r",
    "view": {"stroke": None},
    "axisQuantitative": {"grid": True, "tickCount": 5},
    "axis": {**_LABELS, "labelSeparation": 8, "gridColor": "var(--grid)", "domainColor": _SOFT, "tickColor": _SOFT},
    "header": {**_LABELS, "title": None, "labelAnchor": "start"},
    "legend": {**_LABELS, "orient": "bottom", "title": None, "columns": 4, "columnPadding": 24},
    "text": {"color": _SOFT, "limit": 300},
    "rule": {"color": _SOFT},
    "point": {"filled": True, "size": 55, "opacity": 1},
}
# A mark with a description.
_MARK = re.compile(r'<(path|text)( aria-label="([^"]*)"[^>]*)/>')


def require() -> None:
    """Raises CliError if the library that draws the charts is not installed."""
    try:
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise CliError(f"--html needs vl-convert-python, which draws the charts: {install('report')}") from error


def draw(name: str, spec: Spec) -> Markup:
    """Draws a chart as an SVG element that scales with its column, with a tooltip on each mark that has a description.

    Args:
        name: Name of the chart, which screen readers read out.
        spec: Specification; unprintable characters of its texts are replaced. Its colours are those of the style sheet.
    """
    import vl_convert  # the engine takes half a second to start

    drawn = vl_convert.vegalite_to_svg(_printable(spec), _VEGA_LITE, _CONFIG, allowed_base_urls=[])
    start, body = drawn.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', start)
    assert box is not None
    marks = _MARK.sub(r"<\1\2><title>\3</title></\1>", body)
    return Markup(f'<svg {box[0]} role="img" aria-label="{escape(name)}">{marks}')


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable_lines(value)
    if isinstance(value, Mapping):
        return {key: _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class Level:
    """A limit, drawn as a dashed line across the chart at `value`."""

    label: str
    value: float


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a line chart; `row` and `column` are the titles of its chart in a grid of charts."""

    series: str
    x: float
    y: float
    tip: str
    row: str = ""
    column: str = ""


def line_chart(name: str, points: Sequence[Point], x: str, y: str, levels: Sequence[Level] = ()) -> Markup:
    """Draws a line per series; points with unlike rows or columns become charts in a grid on one scale.

    Args:
        x, y: Titles of the axes. The x axis is logarithmic, with a tick at each point; the y axis begins at 0, or is
            logarithmic if the values and levels differ too much.
    """
    series = list(dict.fromkeys(point.series for point in points))
    columns = list(dict.fromkeys(point.column for point in points))
    heights = [*(point.y for point in points), *(level.value for level in levels)]
    far = max(heights) > _MAX_SPREAD * min(heights)

    def styled(values: Sequence[Any]) -> Spec:
        scale = {"domain": series, "range": [values[at % len(values)] for at in range(len(series))]}
        return {"field": "series", "scale": scale, **({} if len(series) > 1 else {"legend": None})}

    stops = {"values": sorted({point.x for point in points}), "grid": False}
    y_axis = {"scale": {"type": "log", "nice": False, "padding": 16}, "axis": {"values": _ROUND}} if far else {}
    lines = {
        "encoding": {
            "x": _quantity("x", x) | {"scale": {"type": "log", "nice": False, "padding": 12}, "axis": stops},
            "y": _quantity("y", y) | y_axis,
            "color": styled(_COLOURS),
        },
        "layer": [
            {"mark": {"type": "line", "aria": False}, "encoding": {"strokeDash": styled(_DASHES)}},
            {"mark": "point", "encoding": {"shape": styled(_SHAPES), "description": {"field": "tip"}}},
        ],
    }
    drawn = [lines]
    for number, level in enumerate(levels):
        right = bool(number % 2)  # the names alternate between the two ends, so that neighbours are readable
        text = {"text": level.label, "align": "right" if right else "left", "dy": -7}
        at = {"datum": level.value}
        drawn.append(_once("rule", {"strokeDash": [4, 4]}, y=at))
        drawn.append(_once("text", text, x={"value": "width" if right else 4}, y=at))
    return draw(
        name,
        {
            "data": {"values": list(map(asdict, points))},
            "facet": {"row": {"field": "row", "sort": None}, "column": {"field": "column", "sort": columns}},
            "spec": {"width": _WIDTH // len(columns) - 60, "height": 220, "layer": drawn},
        },
    )


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a bar from `start` to `end`: its kind, which determines its colour, and its tooltip."""

    kind: str
    start: float
    end: float
    tip: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of a bar chart: its label, its pieces, the text after them, and the heading of its group."""

    label: str
    pieces: Sequence[Piece]
    note: str = ""
    group: str = ""


def bar_chart(
    name: str,
    bars: Sequence[Bar],
    x: str,
    colours: Mapping[str, str],
    levels: Sequence[Level] = (),
) -> Markup:
    """Draws horizontal bars by group, on one scale unless the groups' lengths differ too much.

    Args:
        x: Title of the x axis.
        colours: Name in the style sheet of the colour of each kind of piece; with several, a legend names them.
        levels: Limits, drawn as vertical lines.
    """
    pieces = [{"row": row, "group": bar.group, **asdict(piece)} for row, bar in enumerate(bars) for piece in bar.pieces]
    notes = [
        {"row": row, "group": bar.group, "note": bar.note, "end": max(piece.end for piece in bar.pieces)}
        for row, bar in enumerate(bars)
        if bar.note and bar.pieces
    ]
    groups: dict[str, float] = {}
    for note in pieces:
        groups[note["group"]] = max(groups.get(note["group"], 0.0), note["end"])
    positive = [end for end in groups.values() if end > 0]
    axis = {
        "labelExpr": "labels[datum.value]",
        "labelOverlap": "greedy",
        "labelSeparation": 0,
        "ticks": False,
        "domain": False,
    }
    y = {"field": "row", "type": "ordinal", "title": None, "scale": {"paddingInner": 0.25}, "axis": axis}
    colour = {
        "field": "kind",
        "scale": {"domain": list(colours), "range": [f"var(--{each})" for each in colours.values()]},
        **({} if len(colours) > 1 else {"legend": None}),
    }
    drawn = {"y": y, "x2": {"field": "end"}, "color": colour, "description": {"field": "tip"}}
    text = {"type": "text", "align": "left", "dx": 6, "aria": False}
    noted = {"x": _quantity("end", x), "y": y, "text": {"field": "note"}}
    layers = [
        {
            "transform": [{"filter": "isValid(datum.kind)"}],
            "mark": "bar",
            "encoding": {"x": _quantity("start", x), **drawn},
        },
        {"transform": [{"filter": "isValid(datum.note)"}], "mark": text, "encoding": noted},
    ]
    for number, level in enumerate(levels):
        at = {"datum": level.value}
        layers.append(_once("rule", {"strokeDash": [4, 4]}, x=at))
        named = {"text": level.label, "align": "right"}
        layers.append(_once("text", named, x=at, y={"value": -8 - 14 * number}))
    apart = len(positive) > 1 and max(positive) > _MAX_SPREAD * min(positive)
    return draw(
        name,
        {
            "params": [{"name": "labels", "value": [bar.label for bar in bars]}],
            "data": {"values": [*pieces, *notes]},
            "facet": {"row": {"field": "group", "sort": list(groups), "header": {"labelOrient": "top"}}},
            "spec": {"width": _WIDTH - 260, "height": {"step": 22}, "layer": layers},
            "resolve": {"scale": {"y": "independent", "x": "independent" if apart else "shared"}},
        },
    )


def _quantity(field: str, title: str) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "title": title}


def _once(mark: str, style: Spec, **encoding: Spec) -> dict[str, Any]:
    """Returns a layer with a single mark that does not depend on the data."""
    return {"data": {"values": [{}]}, "mark": {"type": mark, "aria": False, **style}, "encoding": encoding}


def section(title: str, lead: str, *children: Markup) -> Markup:
    """Returns a section of the page: a heading, `lead` (how to read the figures) and the figures."""
    return tag("section", tag("h2", title), tag("p", lead, class_="lead"), *children)


def figure(title: str, remark: str, chart: Markup) -> Markup:
    """Returns a chart under its title and an optional remark; it scrolls on a narrow screen."""
    caption = tag("figcaption", tag("strong", title), " " if remark else None, tag("span", remark) if remark else None)
    return tag("figure", caption, tag("div", chart, class_="wide"))
