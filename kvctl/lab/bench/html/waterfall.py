"""The waterfall of a room: every part's stages on one axis that has its 0 where the forward pass ends.

What lies left of 0 ran beside compute and is hidden, what lies right of it the request waited for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvctl.lab.bench.html import scale
from kvctl.lab.bench.html.chart import svg
from kvctl.lab.bench.html.data import PartTimeline, RoomTimeline
from kvctl.lab.bench.html.figure import figure, figures, section, style_legend
from kvctl.lab.bench.html.latencies import time_unit
from kvctl.lab.bench.html.markup import Markup, joined, tag
from kvctl.lab.bench.html.numbers import FONT_SIZE, fitted, significant, text_width
from kvctl.lab.bench.statistics import union
from kvctl.render import units
from kvctl_agent.contract.states import STAGES
from kvctl_agent.contract.values import layer_range

_WIDTH, _RIGHT = 1000.0, 16.0
_TOP = 46.0
_WIDEST_LABEL = 230.0
_MOST_LANES = 240
_MOST_ROOMS = 6
# The start of a forward pass that is this many times as long as all transfer is cut off: parts would be specks.
_LONGEST_LEAD = 5.0
# Rooms whose spans differ by no more than this are drawn on one axis, so that they compare at a glance.
_MOST_SPREAD = 4.0
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
    """The section on single rooms; None without any that moved a part."""
    moved = [room for room in rooms if any(part["moments"] for part in room["parts"])]
    if not moved:
        return None
    lead = (
        "One room of about median latency. Each lane is one part: a chunk of some layers from one writer to one "
        "reader. What lies left of the line ran beside the forward pass; what lies right of it the request waited for."
    )
    if len(moved) > _MOST_ROOMS:
        lead += f" {_MOST_ROOMS} of {len(moved)} rooms."
        moved = _telling(moved)
    spans = [_span(room) for room in moved]
    lengths = [end - start for start, end in spans]
    if len(moved) > 1 and max(lengths) <= _MOST_SPREAD * min(lengths):
        spans = [(min(start for start, _ in spans), max(end for _, end in spans))] * len(moved)
        lead += " All on one time axis."
    left = max(_margin(room) for room in moved)
    drawn = [_room(room, *span, left) for room, span in zip(moved, spans, strict=True)]
    return section("Waterfall of a room", lead, style_legend(list(_LEGEND.items())), figures(*drawn, kind="one"))


def _telling(rooms: Sequence[RoomTimeline]) -> list[RoomTimeline]:
    """`_MOST_ROOMS` of the rooms in their order: the last of each way of sending first, then whatever comes last."""
    ways = {(room["path"], room["transport"], room["pipeline"]): at for at, room in enumerate(rooms)}
    wanted = [*ways.values(), *(at for at in reversed(range(len(rooms))) if at not in ways.values())]
    return [rooms[at] for at in sorted(wanted[:_MOST_ROOMS])]


def intervals(moments: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """(stage, start, end) of each stage of a part that lasted: from the latest moment before it to its own."""
    before: int | None = None
    for stage in STAGES:
        at = moments.get(stage)
        if at is None:
            continue
        if before is not None and at > before:
            yield stage, before, at
        before = at if before is None else max(before, at)


@dataclass(frozen=True, slots=True)
class _Plane:
    """Where moments stand, in nanoseconds after the end of the forward pass."""

    start: int
    end: int
    left: float
    bottom: float

    def at(self, moment: int) -> float:
        ratio = (moment - self.start) / max(1, self.end - self.start)
        return self.left + min(1.0, max(0.0, ratio)) * (_WIDTH - _RIGHT - self.left)


def _span(room: RoomTimeline) -> tuple[int, int]:
    """What of a room is drawn, in nanoseconds after the end of its forward pass."""
    known = [at for part in room["parts"] for at in part["moments"].values()]
    zero = room["forward_done_ns"]
    first, end = min(*known, zero), max(*known, room["success_ns"], zero)
    lead = min(first - room["forward_start_ns"], round(_LONGEST_LEAD * (end - first)))
    return first - max(0, lead) - zero, max(end - zero, 1)


def _lanes(room: RoomTimeline) -> tuple[list[PartTimeline], float]:
    """The parts that are drawn, in order, and the height of a lane."""
    parts = sorted((part for part in room["parts"] if part["moments"]), key=_lane_order)[:_MOST_LANES]
    return parts, 16.0 if len(parts) <= 40 else 9.0 if len(parts) <= 90 else 5.0


def _margin(room: RoomTimeline) -> float:
    """Room that the lanes' names take."""
    return 14 + min(_WIDEST_LABEL, max(text_width(text) for _, text in _labels(*_lanes(room))))


def _room(room: RoomTimeline, start: int, end: int, left: float) -> Markup:
    shown, pitch = _lanes(room)
    plane = _Plane(start, end, left, _TOP + len(shown) * pitch + 4)
    zero = room["forward_done_ns"]
    drawing = svg(
        f"Waterfall of room {room['room']}",
        _WIDTH,
        plane.bottom + 42,
        _grid(plane),
        _waited(plane, room),
        joined(*(_lane(part, plane, zero, _TOP + row * pitch, pitch) for row, part in enumerate(shown))),
        joined(*(_lane_name(text, left, _TOP + row * pitch + 12) for row, text in _labels(shown, pitch))),
        _forward(plane, room),
    )
    return figure(
        room["title"],
        _told(room, sum(bool(part["moments"]) for part in room["parts"]) - len(shown)),
        tag("div", drawing, class_="wide"),
    )


def _told(room: RoomTimeline, left_out: int) -> str:
    """What the drawing cannot say."""
    done = room["forward_done_ns"]
    lives = [(min(moments), min(done, max(moments))) for part in room["parts"] if (moments := part["moments"].values())]
    hidden = union((start, end) for start, end in lives if start < end)
    exposed = units.duration(max(0, room["success_ns"] - done))
    words = [f"room {room['room']}", room["path"], room["transport"], f"pipeline {room['pipeline']}"]
    words.append(f"{exposed} exposed, {units.duration(hidden) if hidden else 'nothing'} hidden")
    if left_out:
        words.append(f"{left_out} more parts not drawn")
    return " · ".join(filter(None, words))


def _lane_order(part: PartTimeline) -> tuple[object, ...]:
    return part["agent"], part["peer"], part["writer"], part["chunk"], *part["layers"]


def _labels(parts: Sequence[PartTimeline], pitch: float) -> list[tuple[int, str]]:
    """(lane, text): of every lane where there is room, otherwise one for each writer and reader.

    What all agents' names begin with (`b4601-`) is left out: it tells nothing apart.
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


def _lane_name(text: str, left: float, at: float) -> Markup:
    return tag("text", fitted(text, left - 12), x=left - 8, y=at, class_="lane")


def _lane(part: PartTimeline, plane: _Plane, zero: int, top: float, pitch: float) -> Markup:
    gap = 3.0 if pitch > FONT_SIZE else 1.0
    pieces = []
    for stage, start, end in intervals(part["moments"]):
        hint = f"{_name(part)} · writer {part['writer']} · {part['path']}\n{stage} {units.duration(end - start)}"
        x = plane.at(start - zero)
        # A stage that was too short to see still gets a hairline.
        width = max(0.7, plane.at(end - zero) - x)
        rect = tag("rect", tag("title", hint), x=x, y=top + gap / 2, width=width, height=pitch - gap)
        pieces.append(tag("g", rect, class_=stage))
    return tag("g", *pieces, class_="life")


def _grid(plane: _Plane) -> Markup:
    unit, factor = time_unit(max(plane.end, -plane.start) / 1e6)
    per = 1e6 / factor
    title = f"time since the end of the forward pass ({unit})"
    axis = scale.spanning(plane.start / per, plane.end / per, title, significant, ticks=12)
    pieces = []
    for tick, label in zip(axis.ticks, axis.labels, strict=True):
        at = plane.at(round(tick * per))
        pieces.append(tag("line", x1=at, x2=at, y1=_TOP - 4, y2=plane.bottom, class_="grid"))
        pieces.append(tag("text", label, x=at, y=plane.bottom + 15, class_="tick x", text_anchor="middle"))
    middle = (plane.left + _WIDTH - _RIGHT) / 2
    return joined(*pieces, tag("text", title, x=middle, y=plane.bottom + 35, class_="name", text_anchor="middle"))


def _waited(plane: _Plane, room: RoomTimeline) -> Markup:
    """The time that the request waited, behind everything else and as a bar above the lanes."""
    waited = max(0, room["success_ns"] - room["forward_done_ns"])
    start = plane.at(0)
    width = plane.at(waited) - start
    shade = tag("rect", x=start, y=_TOP - 4, width=width, height=plane.bottom - _TOP + 4, class_="wait")
    told = f"exposed {units.duration(waited)}"
    bar = tag("g", tag("rect", tag("title", told), x=start, y=24, width=width, height=14), class_="exposed")
    # Named to the right of the line where that fits, otherwise to the left of it, above the forward pass.
    fits = start + text_width(told) + 10 < _WIDTH
    place, anchor = (start + 6, None) if fits else (start - 6, "end")
    return joined(shade, bar, tag("text", told, x=place, y=16, class_="wait", text_anchor=anchor))


def _forward(plane: _Plane, room: RoomTimeline) -> Markup:
    took = room["forward_done_ns"] - room["forward_start_ns"]
    told = f"forward {units.duration(took)}"
    if -took < plane.start:
        told += ", began before this"
    start, done = plane.at(-took), plane.at(0)
    bar = tag("rect", tag("title", told), x=start, y=24, width=max(1.0, done - start), height=14)
    inside = tag("text", told, x=start + 6, y=35, class_="inside") if done - start > text_width(told) + 12 else None
    line = tag("line", x1=done, x2=done, y1=6, y2=plane.bottom, class_="done")
    return joined(tag("g", bar, class_="forward"), inside, line)
