"""Line charts: series over a swept axis, with floors as levels, labels at the lines' ends, and tooltips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.lab.bench.html.markup import Markup, joined, tag
from kvctl.lab.bench.html.numbers import FONT_SIZE, text_width
from kvctl.lab.bench.html.scale import Scale

_HEIGHT = 300.0
_TOP, _BOTTOM = 14.0, 46.0
_RIGHT = 16.0
_LINE_HEIGHT = 13.5
# Longer or more labels than this would leave the lines no room: the legend has them all anyway.
_LONGEST_LABEL, _MOST_LABELS = 18, 8
_MARKERS = ("circle", "square", "triangle", "diamond", "cross")


@dataclass(frozen=True, slots=True)
class Line:
    """One series: (x, y, tooltip) by x."""

    label: str
    points: tuple[tuple[float, float, str], ...]
    colour: int
    variant: int = 0


@dataclass(frozen=True, slots=True)
class Level:
    """A floor: one value that holds everywhere."""

    label: str
    value: float


@dataclass(frozen=True, slots=True)
class Frame:
    """The plane of a chart: its axes, and the drawing's size.

    Attributes:
        inset: how far the ends of the x axis stay clear of the frame, so that no marker is cut.
    """

    x: Scale
    y: Scale
    right: float
    width: float
    height: float
    inset: float = 10.0

    @property
    def left(self) -> float:
        """Leaves room for the y axis' labels and its name."""
        return 30 + max(text_width(label) for label in self.y.labels)

    @property
    def bottom(self) -> float:
        return self.height - _BOTTOM

    def at_x(self, value: float) -> float:
        return self.left + self.inset + self.x.position(value) * (self.right - self.left - 2 * self.inset)

    def at_y(self, value: float) -> float:
        return self.bottom - self.y.position(value) * (self.bottom - _TOP)


def line_chart(
    name: str, lines: Sequence[Line], x: Scale, y: Scale, levels: Sequence[Level] = (), width: int = 460
) -> Markup:
    """An SVG of `lines`.

    Args:
        name: what the chart shows, for those who cannot see it.
        width: of the drawing; text keeps its size, so that a narrow drawing suits a narrow column.
    """
    labelled = len(lines) <= _MOST_LABELS and all(len(line.label) <= _LONGEST_LABEL for line in lines)
    room = max((text_width(line.label) for line in lines), default=0) + 16 if labelled and width > 400 else _RIGHT
    frame = Frame(x, y, right=width - room, width=width, height=_HEIGHT)
    return svg(
        name,
        width,
        _HEIGHT,
        grid(frame),
        joined(*(_line(frame, line) for line in lines)),
        # Above the lines: a floor that runs through them must still be read.
        joined(*(_level(frame, level, levels, lines) for level in levels)),
        _end_labels(frame, lines) if room != _RIGHT else None,
    )


def svg(name: str, width: float, height: float, *children: Markup | None) -> Markup:
    """A drawing that grows and shrinks with its column."""
    return tag("svg", *children, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=name)


def readable(labels: Sequence[tuple[float, str]]) -> Sequence[tuple[float, str]]:
    """Those of an axis' labels (position, text) that do not meet: every one, or every second, … up to the last."""
    for stride in range(1, len(labels)):
        kept = labels[(len(labels) - 1) % stride :: stride]
        half = [text_width(text) / 2 + 3 for _, text in kept]
        if all(kept[n][0] + half[n] <= kept[n + 1][0] - half[n + 1] for n in range(len(kept) - 1)):
            return kept
    return labels[-1:]


def marker(x: float, y: float, variant: int, size: float = 3.6) -> Markup:
    """A point; its shape goes with `variant`, its colour with the group it is in."""
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


def grid(frame: Frame) -> Markup:
    """Gridlines, ticks and names of both axes; labels of x that would meet are left out."""
    bottom = frame.bottom
    pieces = []
    for tick, label in zip(frame.y.ticks, frame.y.labels, strict=True):
        at = frame.at_y(tick)
        pieces.append(tag("line", x1=frame.left, x2=frame.right, y1=at, y2=at, class_="grid"))
        pieces.append(tag("text", label, x=frame.left - 7, y=at + 4, class_="tick y", text_anchor="end"))
    places = [frame.at_x(tick) for tick in frame.x.ticks]
    pieces += [tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="axis") for at in places]
    for at, label in readable(list(zip(places, frame.x.labels, strict=True))):
        pieces.append(tag("text", label, x=at, y=bottom + 17, class_="tick x", text_anchor="middle"))
    pieces.append(tag("line", x1=frame.left, x2=frame.right, y1=bottom, y2=bottom, class_="axis"))
    middle_x, middle_y = (frame.left + frame.right) / 2, (_TOP + bottom) / 2
    pieces.append(tag("text", frame.x.title, x=middle_x, y=frame.height - 8, class_="name", text_anchor="middle"))
    turned = f"rotate(-90 12 {middle_y:g})"
    pieces.append(tag("text", frame.y.title, x=12, y=middle_y, transform=turned, class_="name", text_anchor="middle"))
    return joined(*pieces)


def _level(frame: Frame, level: Level, levels: Sequence[Level], lines: Sequence[Line]) -> Markup:
    at = frame.at_y(level.value)
    # Of two levels that nearly touch, the lower one is named below its line.
    crowded = any(0 < at - frame.at_y(other.value) < 2 * _LINE_HEIGHT for other in levels)
    text_at = at + FONT_SIZE + 1 if crowded else at - 5
    width = text_width(level.label) + 8
    places = {"start": (frame.left + 8, frame.left + width), "end": (frame.right - width, frame.right - 8)}

    def clearance(anchor: str) -> float:
        start, end = places[anchor]
        points = [(frame.at_x(x), frame.at_y(y)) for line in lines for x, y, _ in line.points]
        return min((abs(y - text_at) for x, y in points if start - 30 < x < end + 30), default=frame.height)

    anchor = "start" if clearance("start") >= min(clearance("end"), 2 * _LINE_HEIGHT) else "end"
    x = places[anchor][0] if anchor == "start" else places[anchor][1]
    line = tag("line", x1=frame.left, x2=frame.right, y1=at, y2=at)
    return tag("g", line, tag("text", level.label, x=x, y=text_at, text_anchor=anchor), class_="level")


def _line(frame: Frame, line: Line) -> Markup:
    places = [(frame.at_x(x), frame.at_y(y), tip) for x, y, tip in line.points]
    route = " ".join(f"{x:.2f},{y:.2f}" for x, y, _ in places)
    dots = [
        # The invisible circle makes the tooltip easy to hit.
        tag(
            "g",
            tag("title", tip),
            tag("circle", cx=x, cy=y, r=10, class_="hit"),
            marker(x, y, line.colour + line.variant),
        )
        for x, y, tip in places
    ]
    drawn = tag("polyline", points=route) if len(places) > 1 else None
    return tag("g", drawn, *dots, class_=f"series c{line.colour} d{line.variant % 4}")


def _end_labels(frame: Frame, lines: Sequence[Line]) -> Markup:
    """Each line's name at its last point, moved apart where lines end close together."""
    ends = sorted((frame.at_y(line.points[-1][1]), number) for number, line in enumerate(lines))
    placed: list[float] = []
    for wanted, _ in ends:
        placed.append(max(wanted, placed[-1] + _LINE_HEIGHT) if placed else wanted)
    # Pushed out at the bottom: move up from there.
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
