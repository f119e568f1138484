"""Pure functions that cut, pad, wrap and join styled lines, and draw sparklines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from rich.cells import cell_len, set_cell_size

from kvctl.render.bars import merged
from kvctl.render.report import Line, Span

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_GAP = re.compile(r"(?<=  |, )(?=\S)")


def length(line: Line) -> int:
    """Returns the width of a line in terminal cells."""
    return sum(cell_len(text) for text, _ in line)


def cut(line: Line, width: int) -> list[Span]:
    """Shortens a line to at most `width` cells, with an ellipsis if something was removed."""
    if length(line) <= width:
        return list(line)
    kept: list[Span] = []
    left = max(0, width - 1)
    for text, style in line:
        size = cell_len(text)
        kept.append((text if size <= left else set_cell_size(text, left), style))
        left -= min(size, left)
        if left <= 0:
            break
    return [*kept, ("…", "dim")] if width > 0 else []


def padded(line: Line, width: int) -> list[Span]:
    """Cuts or pads a line to exactly `width` cells."""
    kept = cut(line, width)
    return [*kept, (" " * (width - length(kept)), "")]


def beside(left: Sequence[Line], right: Sequence[Line], left_width: int, gap: int = 3) -> list[Line]:
    """Places two groups of lines next to each other, the right one `left_width + gap` cells from the left."""
    rows = max(len(left), len(right))
    return [
        [*padded(left[row] if row < len(left) else [], left_width + gap), *(right[row] if row < len(right) else [])]
        for row in range(rows)
    ]


def spread(left: Line, right: Line, width: int, fill: Span = (" ", "")) -> list[Span]:
    """Returns a line with one text at each end and `fill` between them; omits the right text if both do not fit."""
    between = width - length(left) - length(right)
    if between < 1:
        return cut(left, width)
    return [*left, (fill[0] * between, fill[1]), *right]


def rule(title: Line, right: Line, width: int, style: str = "rule") -> list[Span]:
    """Draws a title line: `── title ───────────── right ──`."""
    left: list[Span] = [("── ", style), *title, (" ", "")]
    end: list[Span] = [(" ", ""), *right, (" ──", style)] if length(right) else []
    return spread(left, end, width, ("─", style))


def wrapped(line: Line, width: int, indent: int, inside: bool = False) -> list[Line]:
    """Wraps a line to `width` cells, only after spans that end with two spaces; continuation lines are indented.

    Args:
        inside: whether to wrap also inside spans, after two spaces or a comma.
    """
    lines: list[list[Span]] = [[]]
    piece: list[Span] = []
    texts = [(text, style) for span, style in line for text in (_GAP.split(span) if inside else [span])]
    for number, (text, style) in enumerate(texts):
        piece.append((text, style))
        if text.endswith("  ") or (inside and text.endswith(", ")) or number == len(texts) - 1:
            size = length(piece) - (len(text) - len(text.rstrip()))
            if length(lines[-1]) + size > width and length(lines[-1]) > indent:
                lines.append([(" " * indent, "")])
            lines[-1] += piece
            piece = []
    return [cut([*each[:-1], (each[-1][0].rstrip(), each[-1][1])] if each else [], width) for each in lines]


def sparkline(values: Iterable[float | None], width: int, height: int = 1, top: float | None = None) -> list[str]:
    """Draws values as columns of block glyphs, the newest at the right end; unknown values leave a gap.

    Args:
        values: values, the oldest first; None for unknown values.
        width: width in cells, one cell for each value; older values that do not fit are left out.
        top: value of a full column; by default the largest of the values drawn.

    Returns:
        The lines from top to bottom.
    """
    shown = list(values)[-width:] if width > 0 else []
    highest = top if top is not None else max((value for value in shown if value is not None), default=0.0)
    levels = [_eighths(value, highest, height) for value in shown]
    pad = " " * (width - len(shown))
    return [
        pad + "".join(_EIGHTHS[min(8, max(0, level - 8 * below))] for level in levels)
        for below in reversed(range(height))
    ]


def _eighths(value: float | None, highest: float, height: int) -> int:
    """Returns the height of a column in eighths of a cell, at least 1 for a value above zero; unknown values have 0."""
    if value is None or highest <= 0 or value <= 0:
        return 0
    return max(1, min(8 * height, round(value / highest * 8 * height)))


def chart(
    label: str,
    values: Sequence[float | None],
    human: Callable[[float | None], str],
    width: int,
    height: int,
    style: str,
) -> list[Line]:
    """Draws a sparkline of `height` lines below a line with label, last value and peak.

    The area below the curve is drawn fainter.
    """
    known = [value for value in values if value is not None]
    head: list[Span] = [(f"{label} ", "dim"), (human(values[-1] if values else None), "bold")]
    if known:
        head.append((f"   peak {human(max(known))}", "dim"))
    rows = sparkline(values, width, height)
    lines: list[Line] = [head]
    for number, row in enumerate(rows):
        above = rows[number - 1] if number else " " * width
        cells = [(glyph, f"{style} faint" if over != " " else style) for glyph, over in zip(row, above, strict=True)]
        lines.append(merged(cells))
    return lines


def inline_chart(
    label: str, values: Sequence[float | None], human: Callable[[float | None], str], width: int, style: str
) -> Line:
    """Draws label, last value and sparkline on one line; arguments as for `chart`."""
    head = f"{label:<9}"
    value = f"{human(values[-1] if values else None):<11}"
    cells = max(0, width - len(head) - len(value))
    return [(head, "dim"), (value, "bold"), (sparkline(values, cells)[0], style)]
