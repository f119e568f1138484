"""Horizontal bars made of pieces: for one load instead of one-point lines, and for what adds up to a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.lab.bench.html.chart import Level, readable, svg
from kvctl.lab.bench.html.markup import Markup, joined, tag
from kvctl.lab.bench.html.numbers import FONT_SIZE, fitted, text_width
from kvctl.lab.bench.html.scale import Scale

WIDTH = 460
_THICK = 15.0
_PITCH = 23.0
LONGEST_BESIDE = 120.0
"""Labels wider than this stand above their bars, not beside them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A length of a bar; `style` is its class in the style sheet."""

    value: float
    style: str
    tip: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its name, its pieces end to end, and what is written after them."""

    label: str
    pieces: tuple[Piece, ...]
    note: str


Group = tuple[str, Sequence[Bar]]


def bar_chart(name: str, groups: Sequence[Group], x: Scale, levels: Sequence[Level] = ()) -> Markup:
    """An SVG of groups of bars on one scale.

    Args:
        name: what the chart shows, for those who cannot see it.
        groups: (heading, bars); an empty heading takes no room.
    """
    bars = [bar for _, members in groups for bar in members]
    widest = max((text_width(bar.label) for bar in bars), default=0)
    above = widest > LONGEST_BESIDE
    left = 4.0 if above else widest + 10
    right = WIDTH - max((text_width(bar.note) for bar in bars), default=0) - 10
    pitch = _PITCH + (FONT_SIZE + 4 if above else 0)
    top = 6.0 + (_level_room(levels) if levels else 0)
    pieces: list[Markup] = []
    at = top
    for heading, members in groups:
        if heading:
            pieces.append(
                tag("text", fitted(heading, WIDTH - 10, FONT_SIZE * 1.1), x=4, y=at + FONT_SIZE, class_="heading")
            )
            at += FONT_SIZE + 9
        for bar in members:
            bar_top = at + (FONT_SIZE + 4 if above else 0)
            pieces.append(_bar(bar, x, left, right, bar_top, above))
            at += pitch
        at += 6
    return svg(
        name,
        WIDTH,
        at + 40,
        _grid(x, left, right, top, at),
        joined(*pieces),
        joined(*(_level(level, row, x, left, right, at) for row, level in enumerate(_descending(levels)))),
    )


def _bar(bar: Bar, x: Scale, left: float, right: float, top: float, above: bool) -> Markup:
    middle = top + _THICK / 2 + 4
    label = (
        tag("text", fitted(bar.label, WIDTH - 10), x=left, y=top - 4, class_="label")
        if above
        else tag("text", bar.label, x=left - 7, y=middle, class_="label", text_anchor="end")
    )
    drawn = []
    start = left
    reached = 0.0
    for piece in bar.pieces:
        reached += piece.value
        end = left + x.position(reached) * (right - left)
        if end > start:
            rect = tag("rect", tag("title", piece.tip), x=start, y=top, width=end - start, height=_THICK)
            drawn.append(tag("g", rect, class_=piece.style))
        start = end
    note = tag("text", bar.note, x=start + 6, y=middle, class_="note")
    return tag("g", label, *drawn, note, class_="bar")


def _grid(x: Scale, left: float, right: float, top: float, bottom: float) -> Markup:
    places = [left + x.position(tick) * (right - left) for tick in x.ticks]
    pieces = [tag("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid") for at in places]
    for at, label in readable(list(zip(places, x.labels, strict=True))):
        # The first label must not leave the drawing on the left.
        anchor, place = ("start", at - 3) if at < text_width(label) / 2 else ("middle", at)
        pieces.append(tag("text", label, x=place, y=bottom + 14, class_="tick x", text_anchor=anchor))
    name = tag("text", x.title, x=(left + right) / 2, y=bottom + 32, class_="name", text_anchor="middle")
    return joined(*pieces, name)


def _level_room(levels: Sequence[Level]) -> float:
    return len(levels) * (FONT_SIZE + 3) + 2


def _descending(levels: Sequence[Level]) -> list[Level]:
    """Highest first: each line then begins left of the names above it."""
    return sorted(levels, key=lambda level: -level.value)


def _level(level: Level, row: int, x: Scale, left: float, right: float, bottom: float) -> Markup:
    """A floor: named above the bars, each in a row of its own, so that no two names meet."""
    at = left + x.position(level.value) * (right - left)
    text_at = FONT_SIZE + row * (FONT_SIZE + 3)
    line = tag("line", x1=at, x2=at, y1=text_at - FONT_SIZE + 2, y2=bottom)
    anchor, place = ("end", at - 5) if at > text_width(level.label) + 5 else ("start", at + 5)
    return tag("g", line, tag("text", level.label, x=place, y=text_at, text_anchor=anchor), class_="level")
