"""Draws charts as SVG: scales, axes, lines, stacked bars, areas, and figures with legends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvctl.lab.bench.html.markup import FONT_SIZE, Markup, fitted, joined, tag, text_width

_TICKS = 5
_WIDTH = 460.0
_BELOW_AXIS = 42.0  # room for tick labels and the axis title
_LINE_HEIGHT = 13.5
_BAR_HEIGHT, _BAR_PITCH = 15.0, 23.0
MAX_BAR_LABEL = 120.0
"""Maximum width of labels beside their bars; if a label is wider, all labels are drawn above their bars."""

# Longer or more labels at the ends of lines would leave too little room for the lines; the legend has all labels.
_MAX_END_LABEL, _MAX_END_LABELS = 18, 8
_MARKERS = ("circle", "square", "triangle", "diamond", "cross")


# ---- scales ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of one axis.

    Attributes:
        lo, hi: values at the ends; positive on a logarithmic axis.
        ticks: values with a gridline or a tick.
        labels: text of each tick.
        title: measured quantity and unit.
    """

    lo: float
    hi: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    title: str
    log: bool = False

    def position(self, value: float) -> float:
        """Returns the position of a value on the axis: 0 at `lo`, 1 at `hi`; values outside are clamped."""
        lo, hi = self.lo, self.hi
        if self.log:
            lo, hi, value = math.log(lo), math.log(hi), math.log(max(value, self.lo))
        return min(1.0, max(0.0, (value - lo) / (hi - lo)))


def from_zero(most: float, title: str, label: Callable[[float], str], binary: bool = False) -> Scale:
    """Returns a linear axis from 0 to the first tick not below `most`.

    Args:
        label: Formats the value of a tick.
        binary: Makes the distance of ticks a power of two instead of a 1, 2 or 5 of a decade.
    """
    step = (2.0 ** math.ceil(math.log2(most / _TICKS)) if most > 0 else 1.0) if binary else _step(most)
    count = max(1, math.ceil(most / step - 1e-9))
    ticks = tuple(step * number for number in range(count + 1))
    return Scale(0.0, ticks[-1], ticks, tuple(label(tick) for tick in ticks), title)


def spanning(lo: float, hi: float, title: str, label: Callable[[float], str], ticks: int = _TICKS) -> Scale:
    """Returns a linear axis from exactly `lo` to exactly `hi`, with at most about `ticks` ticks at round values."""
    hi = hi if hi > lo else lo + 1.0
    step = _step(hi - lo, ticks)
    first, last = math.ceil(lo / step - 1e-9), math.floor(hi / step + 1e-9)
    values = tuple(step * number for number in range(first, last + 1))
    return Scale(lo, hi, values, tuple(label(tick) for tick in values), title)


def shares(title: str) -> Scale:
    """Returns a linear axis from 0 % to 100 %."""
    ticks = (0.0, 0.25, 0.5, 0.75, 1.0)
    return Scale(0.0, 1.0, ticks, tuple(f"{tick * 100:.0f} %" for tick in ticks), title)


def logarithmic(values: Sequence[float], title: str, label: Callable[[float], str]) -> Scale:
    """Returns a logarithmic axis that contains all positive `values` and starts and ends at a 1, 2 or 5 of a decade."""
    rounds = [digit * 10.0**power for power in range(-12, 16) for digit in (1, 2, 5)]
    low, high = min(values), max(values)
    lo = max(each for each in rounds if each <= low * (1 + 1e-9))
    hi = min(each for each in rounds if each >= high * (1 - 1e-9) and each > lo)
    inside = [each for each in rounds if lo <= each <= hi]
    decades = [each for each in inside if abs(math.log10(each) - round(math.log10(each))) < 1e-9]
    # On an axis over several decades only the decades and both ends get a tick.
    ticks = sorted({lo, *decades, hi}) if len(inside) > 8 else inside
    return Scale(lo, hi, tuple(ticks), tuple(label(tick) for tick in ticks), title, log=True)


def stops(values: Sequence[float], title: str, label: Callable[[float], str]) -> Scale:
    """Returns a logarithmic axis from the lowest to the highest of positive `values`, with a tick at each value."""
    ticks = tuple(sorted(set(values)))
    return Scale(ticks[0], ticks[-1], ticks, tuple(label(tick) for tick in ticks), title, log=True)


def _step(most: float, ticks: int = _TICKS) -> float:
    """Returns the smallest 1, 2 or 5 of a decade that divides a length of `most` into at most `ticks` steps."""
    if most <= 0:
        return 1.0
    raw = most / ticks
    decade = 10.0 ** math.floor(math.log10(raw))
    return float(next(digit * decade for digit in (1, 2, 5, 10) if digit * decade >= raw * (1 - 1e-9)))


# ---- axes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Frame:
    """The area of a chart between its axes, in the drawing's units.

    Attributes:
        y: None for a chart with an x axis only.
        inset: distance of the x axis' ends from the frame's left and right side, so that markers are not clipped.
    """

    x: Scale
    y: Scale | None
    left: float
    right: float
    top: float
    bottom: float
    inset: float = 0.0

    def at_x(self, value: float) -> float:
        return self.left + self.inset + self.x.position(value) * (self.right - self.left - 2 * self.inset)

    def at_y(self, value: float) -> float:
        position = self.y.position(value) if self.y is not None else 0.0
        return self.bottom - position * (self.bottom - self.top)

    def axes(self) -> Markup:
        """Draws gridlines, ticks with their labels, and titles; x labels that would overlap are left out."""
        middle = (self.left + self.right) / 2
        pieces = []
        places = [self.at_x(tick) for tick in self.x.ticks]
        if self.y is None:
            pieces += [tag("line", x1=at, x2=at, y1=self.top, y2=self.bottom, class_="grid") for at in places]
        else:
            for tick, label in zip(self.y.ticks, self.y.labels, strict=True):
                at = self.at_y(tick)
                pieces.append(tag("line", x1=self.left, x2=self.right, y1=at, y2=at, class_="grid"))
                pieces.append(tag("text", label, x=self.left - 7, y=at + 4, class_="tick y", text_anchor="end"))
            pieces += [tag("line", x1=at, x2=at, y1=self.bottom, y2=self.bottom + 4, class_="axis") for at in places]
            pieces.append(tag("line", x1=self.left, x2=self.right, y1=self.bottom, y2=self.bottom, class_="axis"))
            centre = (self.top + self.bottom) / 2
            turned = f"rotate(-90 12 {centre:g})"
            title = {"transform": turned, "class_": "name", "text_anchor": "middle"}
            pieces.append(tag("text", self.y.title, x=12, y=centre, **title))
        for at, label in _readable(list(zip(places, self.x.labels, strict=True))):
            # A label at the left end must not leave the drawing.
            anchor, place = ("start", at - 3) if at < text_width(label) / 2 else ("middle", at)
            pieces.append(tag("text", label, x=place, y=self.bottom + 16, class_="tick x", text_anchor=anchor))
        pieces.append(tag("text", self.x.title, x=middle, y=self.bottom + 35, class_="name", text_anchor="middle"))
        return joined(*pieces)


def plane(x: Scale, y: Scale, width: float, height: float, right: float = 16.0, inset: float = 0.0) -> Frame:
    """Returns a frame with both axes that fills a drawing of this size, except for `right` units at its right side."""
    left = 30 + max(text_width(label) for label in y.labels)
    return Frame(x, y, left, width - right, 14.0, height - _BELOW_AXIS - 4, inset)


def svg(name: str, width: float, height: float, *children: Markup | None) -> Markup:
    """Returns an SVG element that scales with its column; screen readers read out `name`."""
    return tag("svg", *children, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=name)


def drawing(name: str, frame: Frame, width: float, *children: Markup | None) -> Markup:
    """Returns an SVG element with a frame's axes and `children`, the contents of the frame."""
    return svg(name, width, frame.bottom + _BELOW_AXIS, frame.axes(), *children)


def _readable(labels: Sequence[tuple[float, str]]) -> Sequence[tuple[float, str]]:
    """Returns every n-th label (position, text) of an axis, with the smallest n at which labels do not overlap."""
    for stride in range(1, len(labels)):
        kept = labels[(len(labels) - 1) % stride :: stride]
        half = [text_width(text) / 2 + 3 for _, text in kept]
        if all(kept[n][0] + half[n] <= kept[n + 1][0] - half[n + 1] for n in range(len(kept) - 1)):
            return kept
    return labels[-1:]


# ---- lines and areas ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """One series: points (x, y, tooltip) in order of x; `colour` and `variant` are those of `series.Series`."""

    label: str
    points: tuple[tuple[float, float, str], ...]
    colour: int
    variant: int = 0


@dataclass(frozen=True, slots=True)
class Level:
    """A limit, drawn as a dashed line across the chart at `value`."""

    label: str
    value: float


def line_chart(
    name: str, lines: Sequence[Line], x: Scale, y: Scale, levels: Sequence[Level] = (), width: float = _WIDTH
) -> Markup:
    """Draws a line chart; wide charts with few lines also have labels at the lines' ends."""
    labelled = (
        width > 400
        and len(lines) <= _MAX_END_LABELS
        and max((len(each.label) for each in lines), default=0) <= _MAX_END_LABEL
    )
    right = max((text_width(line.label) for line in lines), default=0) + 16 if labelled else 16.0
    frame = plane(x, y, width, 300.0, right, inset=10.0)
    return drawing(
        name,
        frame,
        width,
        joined(*(_line(frame, line) for line in lines)),
        # Above the lines, so that a level that crosses them stays readable.
        joined(*(_level(frame, level, levels, lines) for level in levels)),
        _end_labels(frame, lines) if labelled else None,
    )


def area(frame: Frame, points: Sequence[tuple[float, float]], tip: str) -> Markup:
    """Draws the area under a step function: each point's value holds until the next point or the end of the axis."""
    steps = [f"M{frame.at_x(points[0][0]):.2f},{frame.bottom:.2f}"]
    steps += [f"H{frame.at_x(x):.2f}V{frame.at_y(y):.2f}" for x, y in points]
    outline = "".join([*steps, f"H{frame.at_x(frame.x.hi):.2f}V{frame.bottom:.2f}Z"])
    return tag("g", tag("path", tag("title", tip), d=outline), class_="used")


def marker(x: float, y: float, variant: int, size: float = 3.6) -> Markup:
    """Draws the marker of a data point; its shape depends on `variant`."""
    match _MARKERS[variant % len(_MARKERS)]:
        case "circle":
            return tag("circle", cx=x, cy=y, r=size, class_="point")
        case "square":
            return tag("rect", x=x - size, y=y - size, width=2 * size, height=2 * size, class_="point")
        case "triangle":
            corners = [(0, -1.3), (1.2, 0.9), (-1.2, 0.9)]
        case "diamond":
            corners = [(0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)]
        case _:
            corners = [(-1.2, -0.4), (-0.4, -0.4), (-0.4, -1.2), (0.4, -1.2), (0.4, -0.4), (1.2, -0.4)]
            corners += [(-dx, -dy) for dx, dy in corners]
    outline = " ".join(f"{x + dx * size:.2f},{y + dy * size:.2f}" for dx, dy in corners)
    return tag("polygon", points=outline, class_="point")


def _level(frame: Frame, level: Level, levels: Sequence[Level], lines: Sequence[Line]) -> Markup:
    at = frame.at_y(level.value)
    # If two levels are close to each other, the name of the lower one is below its line.
    crowded = any(0 < at - frame.at_y(other.value) < 2 * _LINE_HEIGHT for other in levels)
    text_at = at + FONT_SIZE + 1 if crowded else at - 5
    width = text_width(level.label) + 8
    places = {"start": (frame.left + 8, frame.left + width), "end": (frame.right - width, frame.right - 8)}

    def clearance(anchor: str) -> float:
        start, end = places[anchor]
        points = [(frame.at_x(x), frame.at_y(y)) for line in lines for x, y, _ in line.points]
        return min((abs(y - text_at) for x, y in points if start - 30 < x < end + 30), default=frame.bottom)

    anchor = "start" if clearance("start") >= min(clearance("end"), 2 * _LINE_HEIGHT) else "end"
    x = places[anchor][0] if anchor == "start" else places[anchor][1]
    line = tag("line", x1=frame.left, x2=frame.right, y1=at, y2=at)
    return tag("g", line, tag("text", level.label, x=x, y=text_at, text_anchor=anchor), class_="level")


def _line(frame: Frame, line: Line) -> Markup:
    places = [(frame.at_x(x), frame.at_y(y), tip) for x, y, tip in line.points]
    route = " ".join(f"{x:.2f},{y:.2f}" for x, y, _ in places)
    dots = [
        tag(
            "g",
            tag("title", tip),
            tag("circle", cx=x, cy=y, r=10, class_="hit"),  # invisible; makes the tooltip easy to hit
            marker(x, y, line.colour + line.variant),
        )
        for x, y, tip in places
    ]
    drawn = tag("polyline", points=route) if len(places) > 1 else None
    return tag("g", drawn, *dots, class_=f"series c{line.colour} d{line.variant % 4}")


def _end_labels(frame: Frame, lines: Sequence[Line]) -> Markup:
    """Draws each line's label at its last point; labels of lines that end close together are moved apart."""
    ends = sorted((frame.at_y(line.points[-1][1]), number) for number, line in enumerate(lines))
    placed: list[float] = []
    for wanted, _ in ends:
        placed.append(max(wanted, placed[-1] + _LINE_HEIGHT) if placed else wanted)
    # Labels that were moved below the frame are moved up again.
    limit = frame.bottom
    for number in reversed(range(len(placed))):
        placed[number] = min(placed[number], limit)
        limit = placed[number] - _LINE_HEIGHT
    labels = []
    for (wanted, number), at in zip(ends, placed, strict=True):
        line = lines[number]
        start = frame.at_x(line.points[-1][0]) + 6
        leader = tag("line", x1=start, y1=wanted, x2=frame.right + 4, y2=at, class_="leader")
        far = abs(at - wanted) > 3 or frame.right - start > 8
        text = tag("text", line.label, x=frame.right + 7, y=at + 4, class_="end")
        labels.append(tag("g", leader if far else None, text, class_=f"ink{line.colour}"))
    return joined(*labels)


# ---- bars -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a stacked bar; `value` is its length, `style` its class in the style sheet, `tip` its tooltip."""

    value: float
    style: str
    tip: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar: its label, its pieces from left to right, and the text after them."""

    label: str
    pieces: tuple[Piece, ...]
    note: str


Group = tuple[str, Sequence[Bar]]
"""A heading, which may be "", and its bars."""


def bar_chart(name: str, groups: Sequence[Group], x: Scale, levels: Sequence[Level] = ()) -> Markup:
    """Draws groups of horizontal bars on one scale, with the `levels` as vertical lines."""
    bars = [bar for _, members in groups for bar in members]
    widest = max((text_width(bar.label) for bar in bars), default=0)
    label_room = FONT_SIZE + 4 if widest > MAX_BAR_LABEL else 0.0  # above each bar
    left = 4.0 if label_room else widest + 10
    right = _WIDTH - max((text_width(bar.note) for bar in bars), default=0) - 10
    top = 6.0 + (len(levels) * (FONT_SIZE + 3) + 2 if levels else 0)
    headings: list[Markup] = []
    placed: list[tuple[Bar, float]] = []
    at = top
    for heading, members in groups:
        if heading:
            text = fitted(heading, _WIDTH - 10, FONT_SIZE * 1.1)
            headings.append(tag("text", text, x=4, y=at + FONT_SIZE, class_="heading"))
            at += FONT_SIZE + 9
        for bar in members:
            placed.append((bar, at + label_room))
            at += _BAR_PITCH + label_room
        at += 6
    frame = Frame(x, None, left, right, top, at)
    # The highest level first: each line then starts left of the names above it.
    descending = sorted(levels, key=lambda level: -level.value)
    return drawing(
        name,
        frame,
        _WIDTH,
        *headings,
        *(_bar(bar, frame, bar_top, bool(label_room)) for bar, bar_top in placed),
        *(_bar_level(level, row, frame) for row, level in enumerate(descending)),
    )


def _bar(bar: Bar, frame: Frame, top: float, label_above: bool) -> Markup:
    middle = top + _BAR_HEIGHT / 2 + 4
    label = (
        tag("text", fitted(bar.label, _WIDTH - 10), x=frame.left, y=top - 4, class_="label")
        if label_above
        else tag("text", bar.label, x=frame.left - 7, y=middle, class_="label", text_anchor="end")
    )
    drawn = []
    start, reached = frame.left, 0.0
    for piece in bar.pieces:
        reached += piece.value
        end = frame.at_x(reached)
        if end > start:
            rect = tag("rect", tag("title", piece.tip), x=start, y=top, width=end - start, height=_BAR_HEIGHT)
            drawn.append(tag("g", rect, class_=piece.style))
        start = end
    note = tag("text", bar.note, x=start + 6, y=middle, class_="note")
    return tag("g", label, *drawn, note, class_="bar")


def _bar_level(level: Level, row: int, frame: Frame) -> Markup:
    """Draws a level as a vertical line, with its label in text row `row` above the bars."""
    at = frame.at_x(level.value)
    text_at = FONT_SIZE + row * (FONT_SIZE + 3)
    line = tag("line", x1=at, x2=at, y1=text_at - FONT_SIZE + 2, y2=frame.bottom)
    anchor, place = ("end", at - 5) if at > text_width(level.label) + 5 else ("start", at + 5)
    return tag("g", line, tag("text", level.label, x=place, y=text_at, text_anchor=anchor), class_="level")


# ---- sections, figures and legends ----------------------------------------------------------------------------------


def section(title: str, lead: str, *children: Markup | None) -> Markup:
    """Returns a section of the page: a heading, `lead` (how to read the figures) and the figures."""
    return tag("section", tag("h2", title), tag("p", lead, class_="lead") if lead else None, *children)


def figures(*children: Markup, kind: str = "two") -> Markup:
    """Returns figures side by side; `kind` is the most figures in a row: "one", "two" or "three"."""
    return tag("div", *children, class_=f"figures {kind}")


def figure(title: str, remark: str, chart: Markup) -> Markup:
    """Returns a chart under its title and an optional remark."""
    caption = tag("figcaption", tag("strong", title), " " if remark else None, tag("span", remark) if remark else None)
    return tag("figure", caption, chart)


def line_legend(series: Sequence[tuple[str, int, int]]) -> Markup | None:
    """Returns a legend of series (label, colour, variant); None for fewer than two series."""
    if len(series) < 2:
        return None

    def sample(colour: int, variant: int) -> Markup:
        line = tag("polyline", points="0,6 26,6")
        drawn = tag("g", line, marker(13, 6, colour + variant), class_=f"series c{colour} d{variant % 4}")
        return tag("svg", drawn, viewBox="0 0 26 12", class_="line")

    return _legend([(sample(colour, variant), label) for label, colour, variant in series])


def piece_legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Returns a legend of bar pieces; an entry is (class in the style sheet, text)."""

    def sample(style: str) -> Markup:
        return tag("svg", tag("g", tag("rect", x=0, y=0, width=14, height=12), class_=style), viewBox="0 0 14 12")

    return _legend([(sample(style), text) for style, text in entries])


def _legend(entries: Sequence[tuple[Markup, str]]) -> Markup:
    return tag("ul", *(tag("li", joined(sample, text)) for sample, text in entries), class_="legend")
