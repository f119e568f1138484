"""Lines side by side, cut and padded: the little typesetting that pictures need."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from kvctl.render.report import Line, Span


def length(line: Line) -> int:
    """Cells of a line."""
    return sum(cell_len(text) for text, _ in line)


def cut(line: Line, width: int) -> list[Span]:
    """The line in at most `width` cells, with an ellipsis where something was left out."""
    if length(line) <= width:
        return list(line)
    kept: list[Span] = []
    room = max(0, width - 1)
    for text, style in line:
        size = cell_len(text)
        kept.append((text if size <= room else set_cell_size(text, room), style))
        room -= min(size, room)
        if room <= 0:
            break
    return [*kept, ("…", "dim")] if width > 0 else []


def padded(line: Line, width: int) -> list[Span]:
    """The line in exactly `width` cells."""
    kept = cut(line, width)
    return [*kept, (" " * (width - length(kept)), "")]


def beside(left: Sequence[Line], right: Sequence[Line], left_width: int, gap: int = 3) -> list[Line]:
    """Two pictures next to each other."""
    rows = max(len(left), len(right))
    return [
        [*padded(left[row] if row < len(left) else [], left_width + gap), *(right[row] if row < len(right) else [])]
        for row in range(rows)
    ]


def spread(left: Line, right: Line, width: int, fill: Span = (" ", "")) -> list[Span]:
    """One text at each end; the right one is left out where both do not fit."""
    between = width - length(left) - length(right)
    if between < 1:
        return cut(left, width)
    return [*left, (fill[0] * between, fill[1]), *right]


def rule(title: Line, right: Line, width: int, style: str = "rule") -> list[Span]:
    """`── title ───────────── right ──`."""
    left: list[Span] = [("── ", style), *title, (" ", "")]
    end: list[Span] = [(" ", ""), *right, (" ──", style)] if length(right) else []
    return spread(left, end, width, ("─", style))


def wrapped(line: Line, width: int, indent: int) -> list[Line]:
    """The line in as many as it needs, broken where spans end in a wide gap, the rest under its indented begin."""
    lines: list[list[Span]] = [[]]
    piece: list[Span] = []
    for number, span in enumerate(line):
        piece.append(span)
        if span[0].endswith("  ") or number == len(line) - 1:
            if length(lines[-1]) + length(piece) - _trailing(span[0]) > width and length(lines[-1]) > indent:
                lines.append([(" " * indent, "")])
            lines[-1] += piece
            piece = []
    return [cut(each, width) for each in lines]


def _trailing(text: str) -> int:
    return len(text) - len(text.rstrip())
