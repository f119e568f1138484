"""Section with the waterfall of single rooms: the stages of every part on a time axis; 0 is the end of the forward.

Transfer left of 0 is hidden by compute; transfer right of 0 delays the request.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.lab.bench.html import charts
from kvctl.lab.bench.html.charts import Frame, figure, figures, piece_legend, section
from kvctl.lab.bench.html.markup import FONT_SIZE, Markup, fitted, joined, significant, tag, text_width, time_unit
from kvctl.lab.bench.statistics import union
from kvctl.lab.bench.timelines import PartTimeline, RoomTimeline
from kvctl.render import units
from kvctl.render.bars import stage_intervals
from kvctl_agent.contract.values import layer_range

_WIDTH, _TOP = 1000.0, 42.0
_MAX_LABEL = 230.0
_MAX_LANES = 240
_MAX_ROOMS = 6
# Of the forward before the first part, at most this many times the length of the transfer is drawn; otherwise the parts
# would be too narrow to see.
_MAX_LEAD = 5.0
# Rooms whose spans differ by at most this factor share an axis, so that they can be compared.
_MAX_SPREAD = 4.0
_LEGEND = {
    "forward": "forward pass",
    "gate": "gate (waits)",
    "queue": "queue (waits)",
    "gather": "gather",
    "post": "post",
    "wire": "wire",
    "arrive": "arrive (waits)",
    "scatter": "scatter",
}


def waterfalls(rooms: Sequence[RoomTimeline]) -> Markup | None:
    """Returns the section with waterfalls of up to `_MAX_ROOMS` rooms; None if no room has a part with known times."""
    moved = [room for room in rooms if any(part["moments"] for part in room["parts"])]
    if not moved:
        return None
    lead = (
        "One room of about median latency. Each lane is one part: a chunk of some layers from one writer to one "
        "reader. Left of the line parts ran beside the forward pass; right of it the request waited for them."
    )
    if len(moved) > _MAX_ROOMS:
        lead += f" {_MAX_ROOMS} of {len(moved)} rooms."
        moved = _selected(moved)
    spans = [_span(room) for room in moved]
    lengths = [end - start for start, end in spans]
    if len(moved) > 1 and max(lengths) <= _MAX_SPREAD * min(lengths):
        spans = [(min(start for start, _ in spans), max(end for _, end in spans))] * len(moved)
        lead += " All on one time axis."
    left = max(_margin(room) for room in moved)
    drawn = [_room(room, *span, left) for room, span in zip(moved, spans, strict=True)]
    return section("Waterfall of a room", lead, piece_legend(list(_LEGEND.items())), figures(*drawn, kind="one"))


def _selected(rooms: Sequence[RoomTimeline]) -> list[RoomTimeline]:
    """Selects `_MAX_ROOMS` rooms: the last room of each path, transport and pipeline, then the last of the others."""
    kinds = {(room["path"], room["transport"], room["pipeline"]): at for at, room in enumerate(rooms)}
    wanted = [*kinds.values(), *(at for at in reversed(range(len(rooms))) if at not in kinds.values())]
    return [rooms[at] for at in sorted(wanted[:_MAX_ROOMS])]


@dataclass(frozen=True, slots=True)
class _Plane:
    """The frame of a waterfall; converts nanoseconds after the end of the forward pass to positions."""

    frame: Frame
    ns_per_unit: float

    def at(self, moment: float) -> float:
        return self.frame.at_x(moment / self.ns_per_unit)


def _plane(start: int, end: int, left: float, bottom: float) -> _Plane:
    unit, factor = time_unit(max(end, -start) / 1e6)
    per = 1e6 / factor
    title = f"time since the end of the forward pass ({unit})"
    axis = charts.spanning(start / per, end / per, title, significant, ticks=12)
    return _Plane(Frame(axis, None, left, _WIDTH - 16, _TOP, bottom), per)


def _span(room: RoomTimeline) -> tuple[int, int]:
    """Returns start and end of the time axis of a room, in nanoseconds after the end of its forward pass."""
    known = [at for part in room["parts"] for at in part["moments"].values()]
    zero = room["forward_done_ns"]
    ends = [end for part in room["parts"] for _, _, end in stage_intervals(part["moments"])]
    first, end = min(*known, zero), max(*ends, room["success_ns"], zero)
    lead = min(first - room["forward_start_ns"], round(_MAX_LEAD * (end - first)))
    return first - max(0, lead) - zero, max(end - zero, 1)


def _lanes(room: RoomTimeline) -> tuple[list[PartTimeline], float]:
    """Returns the parts that are drawn, a lane (row) for each in this order, and the height of a lane."""

    def order(part: PartTimeline) -> tuple[object, ...]:
        return part["agent"], part["peer"], part["writer"], part["chunk"], *part["layers"]

    parts = sorted((part for part in room["parts"] if part["moments"]), key=order)[:_MAX_LANES]
    return parts, 16.0 if len(parts) <= 40 else 9.0 if len(parts) <= 90 else 5.0


def _margin(room: RoomTimeline) -> float:
    """Returns the width of the left margin, which has the lanes' labels."""
    return 14 + min(_MAX_LABEL, max(text_width(text) for _, text in _labels(*_lanes(room))))


def _room(room: RoomTimeline, start: int, end: int, left: float) -> Markup:
    lanes, pitch = _lanes(room)
    top = _TOP + 4
    plane = _plane(start, end, left, top + len(lanes) * pitch + 4)
    zero = room["forward_done_ns"]
    chart = charts.drawing(
        f"Waterfall of room {room['room']}",
        plane.frame,
        _WIDTH,
        _exposed(plane, room),
        joined(*(_lane(part, plane, zero, top + row * pitch, pitch) for row, part in enumerate(lanes))),
        *(
            tag("text", fitted(text, left - 12), x=left - 8, y=top + row * pitch + 12, class_="lane")
            for row, text in _labels(lanes, pitch)
        ),
        _forward(plane, room),
    )
    left_out = sum(bool(part["moments"]) for part in room["parts"]) - len(lanes)
    return figure(room["title"], _remark(room, left_out), tag("div", chart, class_="wide"))


def _remark(room: RoomTimeline, left_out: int) -> str:
    done = room["forward_done_ns"]
    spans = [(min(moments), min(done, max(moments))) for part in room["parts"] if (moments := part["moments"].values())]
    hidden = union((start, end) for start, end in spans if start < end)
    exposed = units.duration(max(0, room["success_ns"] - done))
    words = [f"room {room['room']}", room["path"], room["transport"], f"pipeline {room['pipeline']}"]
    words.append(f"{exposed} exposed, {units.duration(hidden) if hidden else 'nothing'} hidden")
    if left_out:
        words.append(f"{left_out} more parts not drawn")
    return " · ".join(filter(None, words))


def _labels(parts: Sequence[PartTimeline], pitch: float) -> list[tuple[int, str]]:
    """Returns the labels of lanes as (lane, text): of all lanes if they are high enough, otherwise one per rank pair.

    The common prefix of all agents' names (such as `b4601-`) is left out.
    """
    names = [name for part in parts for name in (part["agent"], part["peer"])]
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    skip = "".join(letters[0] for letters in alike).rfind("-") + 1
    if pitch > FONT_SIZE:
        return [(row, _name(part, skip)) for row, part in enumerate(parts)]
    found: list[tuple[int, str]] = []
    for (agent, peer), members in itertools.groupby(
        enumerate(parts), key=lambda each: (each[1]["agent"], each[1]["peer"])
    ):
        row = next(members)[0]
        if not found or (row - found[-1][0]) * pitch > FONT_SIZE + 2:
            found.append((row, f"{agent[skip:]} → {peer[skip:]}"))
    return found


def _name(part: PartTimeline, skip: int = 0) -> str:
    lo, hi = part["layers"]
    layers = f" L{layer_range(lo, hi)}" if hi > lo else ""
    return f"{part['agent'][skip:]} → {part['peer'][skip:]} · c{part['chunk']}{layers}"


def _lane(part: PartTimeline, plane: _Plane, zero: int, top: float, pitch: float) -> Markup:
    gap = 3.0 if pitch > FONT_SIZE else 1.0
    pieces = []
    for stage, start, end in stage_intervals(part["moments"]):
        tip = f"{_name(part)} · writer {part['writer']} · {part['path']}\n{stage} {units.duration(end - start)}"
        x = plane.at(start - zero)
        width = max(0.7, plane.at(end - zero) - x)  # the shortest stages stay visible
        rect = tag("rect", tag("title", tip), x=x, y=top + gap / 2, width=width, height=pitch - gap)
        pieces.append(tag("g", rect, class_=stage))
    return tag("g", *pieces, class_="life")


def _exposed(plane: _Plane, room: RoomTimeline) -> Markup:
    """Draws the exposed transfer time as a shaded area behind the lanes and as a bar above them."""
    exposed = max(0, room["success_ns"] - room["forward_done_ns"])
    start = plane.at(0)
    width = plane.at(exposed) - start
    shade = tag("rect", x=start, y=_TOP, width=width, height=plane.frame.bottom - _TOP, class_="wait")
    text = f"exposed {units.duration(exposed)}"
    bar = tag("g", tag("rect", tag("title", text), x=start, y=24, width=width, height=14), class_="exposed")
    # The text is right of the line if it fits there, otherwise left of it.
    fits = start + text_width(text) + 10 < _WIDTH
    place, anchor = (start + 6, None) if fits else (start - 6, "end")
    return joined(shade, bar, tag("text", text, x=place, y=16, class_="wait", text_anchor=anchor))


def _forward(plane: _Plane, room: RoomTimeline) -> Markup:
    took = room["forward_done_ns"] - room["forward_start_ns"]
    text = f"forward {units.duration(took)}"
    if -took / plane.ns_per_unit < plane.frame.x.lo:
        text += ", starts earlier"
    start, done = plane.at(-took), plane.at(0)
    bar = tag("rect", tag("title", text), x=start, y=24, width=max(1.0, done - start), height=14)
    inside = tag("text", text, x=start + 6, y=35, class_="inside") if done - start > text_width(text) + 12 else None
    line = tag("line", x1=done, x2=done, y1=6, y2=plane.frame.bottom, class_="done")
    return joined(tag("g", bar, class_="forward"), inside, line)
