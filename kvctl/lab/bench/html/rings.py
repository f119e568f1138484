"""Staging rings over time: how much of each was in use while a path ran, against what it holds."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.lab.bench.html import scale
from kvctl.lab.bench.html.chart import Frame, grid, svg
from kvctl.lab.bench.html.data import RingTimeline
from kvctl.lab.bench.html.figure import figure, figures, section
from kvctl.lab.bench.html.latencies import time_unit
from kvctl.lab.bench.html.markup import Markup, tag
from kvctl.lab.bench.html.numbers import significant
from kvctl.render import units

_WIDTH, _HEIGHT, _RIGHT = 460.0, 210.0, 16.0
# A ring of which less than this was ever used is drawn to its own peak: on its full scale one would see nothing.
_LEAST_USED = 0.25
_MOST_RINGS = 12


def rings(lives: Sequence[RingTimeline]) -> Markup | None:
    """The section on rings; None where none was sampled twice."""
    sampled = [life for life in lives if len(life["points"]) > 1]
    if not sampled:
        return None
    # Where there are too many, those that were fullest are the ones to look at.
    kept = sorted(sampled, key=_peak_ratio, reverse=True)[:_MOST_RINGS]
    shown = [life for life in sampled if any(life is other for other in kept)]
    lead = "Bytes of each staging ring in use; rings that were sampled together share their time axis."
    if len(shown) < len(sampled):
        lead += f" The {len(shown)} fullest of {len(sampled)} rings."
    return section("Ring occupancy", lead, figures(*(_ring(life, *_span(life, sampled)) for life in shown)))


def _span(life: RingTimeline, lives: Sequence[RingTimeline]) -> tuple[int, int]:
    """From the first to the last sample of all rings that were sampled at the same time, on the same path."""
    first, last = life["points"][0][0], life["points"][-1][0]
    beside = [
        (points[0][0], points[-1][0])
        for points in (other["points"] for other in lives if other["path"] == life["path"])
        if points[0][0] <= last and points[-1][0] >= first
    ]
    return min(begin for begin, _ in beside), max(end for _, end in beside)


def _peak(life: RingTimeline) -> int:
    return max(point[1] for point in life["points"])


def _peak_ratio(life: RingTimeline) -> float:
    return _peak(life) / max(1, life["size_bytes"])


def _ring(life: RingTimeline, begin: int, end: int) -> Markup:
    peak, size = _peak(life), life["size_bytes"]
    whole = peak >= _LEAST_USED * size
    most = max(size if whole else peak, 1)
    unit, per = _unit(most)
    time, factor = time_unit((end - begin) / 1e6)
    frame = Frame(
        scale.spanning(0.0, (end - begin) / 1e6 * factor, f"time ({time})", significant),
        scale.from_zero(most / per, unit, significant, binary=True),
        right=_WIDTH - _RIGHT,
        width=_WIDTH,
        height=_HEIGHT,
        inset=0.0,
    )
    remark = f"peak {units.size(peak)} of {units.size(size)}, {units.percent(_peak_ratio(life))}"
    outline = _outline(frame, [((at - begin) / 1e6 * factor, used / per) for at, used in life["points"]])
    drawing = svg(
        f"Use of the ring of {life['agent']}",
        _WIDTH,
        _HEIGHT,
        grid(frame),
        tag("g", tag("path", tag("title", remark), d=outline), class_="used"),
        _capacity(frame, size, size / per) if whole else None,
    )
    title = " · ".join(filter(None, [life["agent"], life.get("title") or life["path"]]))
    return figure(title, remark, drawing)


def _unit(most_bytes: int) -> tuple[str, int]:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if most_bytes >= 1 << power:
            return unit, 1 << power
    return "bytes", 1


def _outline(frame: Frame, points: Sequence[tuple[float, float]]) -> str:
    """The area under steps: a sample holds until the next one, the last to the end of the axis."""
    steps = [f"M{frame.at_x(points[0][0]):.2f},{frame.bottom:.2f}"]
    for at, used in points:
        steps.append(f"H{frame.at_x(at):.2f}V{frame.at_y(used):.2f}")
    return "".join([*steps, f"H{frame.at_x(frame.x.hi):.2f}V{frame.bottom:.2f}Z"])


def _capacity(frame: Frame, size: int, value: float) -> Markup:
    at = frame.at_y(value)
    text = tag("text", f"capacity {units.size(size)}", x=frame.right, y=at - 4, text_anchor="end")
    return tag("g", tag("line", x1=frame.left, x2=frame.right, y1=at, y2=at), text, class_="level")
