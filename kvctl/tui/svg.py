"""A screen as an SVG picture: every run of text at its exact place, blocks and lines as shapes.

Pictures look the same wherever they are seen: no font is fetched, no glyph has to exist in the font that is found
for a bar to be a bar, and the same screen gives the same file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape

from rich.cells import cell_len
from rich.color import Color
from rich.style import Style

Run = tuple[str, Style]

_CELL, _LINE = 8.4, 18.0  # of a monospaced font of 14 px
_SIZE, _BASELINE = 14, 13.2
_MARGIN = 10.0
_ROUND = 8
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,Liberation Mono,monospace"

_EIGHTHS = {glyph: eighths for eighths, glyph in enumerate("▁▂▃▄▅▆▇█", 1)}
_SHADES = {"░": 0.25, "▒": 0.5, "▓": 0.75}
_LINES = {"─": 1.0, "━": 4.0}
_SHAPES = frozenset([*_EIGHTHS, *_SHADES, *_LINES])
_PIECE = re.compile(r"\S+(?: \S+)*")


def picture(lines: Sequence[Sequence[Run]], foreground: str, background: str) -> str:
    """Draws lines of styled runs.

    Args:
        foreground, background: where a style does not say.
    """
    columns = max((sum(cell_len(text) for text, _ in line) for line in lines), default=0)
    width, height = columns * _CELL + 2 * _MARGIN, len(lines) * _LINE + 2 * _MARGIN
    shapes: list[str] = []
    for number, line in enumerate(lines):
        at = 0
        for text, style in line:
            shapes += _run(text, at, number, *_colours(style, foreground, background), background, bool(style.bold))
            at += cell_len(text)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" '
            f'font-family="{FONTS}" font-size="{_SIZE}">',
            f'<rect width="100%" height="100%" rx="{_ROUND}" fill="{background}"/>',
            f'<g transform="translate({_n(_MARGIN)} {_n(_MARGIN)})">',
            *shapes,
            "</g>",
            "</svg>",
            "",
        ]
    )


def _run(text: str, at: int, line: int, ink: str, paper: str, ground: str, bold: bool) -> Iterator[str]:
    if paper != ground:
        yield _rect(at, cell_len(text), line * _LINE, _LINE, paper)
    for kind, piece, place in _pieces(text):
        x = at + cell_len(text[:place])
        if not kind:
            weight = ' font-weight="bold"' if bold else ""
            yield (
                f'<text x="{_n(x * _CELL)}" y="{_n(line * _LINE + _BASELINE)}" fill="{ink}"{weight} '
                f'textLength="{_n(cell_len(piece) * _CELL)}" lengthAdjust="spacingAndGlyphs">{escape(piece)}</text>'
            )
        elif piece[0] in _EIGHTHS:
            high = _LINE * _EIGHTHS[piece[0]] / 8
            yield _rect(x, len(piece), (line + 1) * _LINE - high, high, ink)
        elif piece[0] in _SHADES:
            yield _rect(x, len(piece), line * _LINE, _LINE, ink, _SHADES[piece[0]])
        else:
            thick = _LINES[piece[0]]
            yield _rect(x, len(piece), (line + 0.5) * _LINE - thick / 2, thick, ink)


def _pieces(text: str) -> Iterator[tuple[bool, str, int]]:
    """(is a shape, the piece, where it begins): runs of one shape, and words that stand together."""
    begin = 0
    while begin < len(text):
        glyph = text[begin]
        end = begin + 1
        if glyph in _SHAPES:
            while end < len(text) and text[end] == glyph:
                end += 1
            yield True, text[begin:end], begin
        else:
            while end < len(text) and text[end] not in _SHAPES:
                end += 1
            for found in _PIECE.finditer(text[begin:end]):
                yield False, found.group(), begin + found.start()
        begin = end


def _rect(x: int, cells: int, y: float, height: float, fill: str, opacity: float = 1.0) -> str:
    faint = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    box = f'x="{_n(x * _CELL)}" y="{_n(y)}" width="{_n(cells * _CELL)}" height="{_n(height)}"'
    return f'<rect {box} fill="{fill}"{faint} shape-rendering="crispEdges"/>'


def _colours(style: Style, foreground: str, background: str) -> tuple[str, str]:
    ink, paper = _hex(style.color, foreground), _hex(style.bgcolor, background)
    return (paper, ink) if style.reverse else (ink, paper)


def _hex(colour: Color | None, fallback: str) -> str:
    return fallback if colour is None or colour.is_default else colour.get_truecolor().hex


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
