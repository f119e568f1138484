"""A number's recent past in a few cells; what was not known leaves a gap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvctl.render.bars import merged
from kvctl.render.report import Line, Span

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Iterable[float | None], width: int, height: int = 1, top: float | None = None) -> list[str]:
    """Rows of block glyphs from the top down, the newest value at the right end.

    Args:
        top: the value of a full column; the largest one shown unless given.
    """
    shown = list(values)[-width:] if width > 0 else []
    highest = top if top is not None else max((value for value in shown if value is not None), default=0.0)
    levels = [_level(value, highest, height) for value in shown]
    pad = " " * (width - len(shown))
    return [
        pad + "".join(_EIGHTHS[min(8, max(0, level - 8 * below))] for level in levels)
        for below in reversed(range(height))
    ]


def _level(value: float | None, highest: float, height: int) -> int:
    """Eighths of a cell; what is there at all gets one."""
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
    """A titled curve: what is measured, its last value and its peak above; below the curve its area, fainter."""
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


def inline(
    label: str, values: Sequence[float | None], human: Callable[[float | None], str], width: int, style: str
) -> Line:
    """The same on one line."""
    last = values[-1] if values else None
    head = f"{label:<9}"
    value = f"{human(last):<11}"
    cells = max(0, width - len(head) - len(value))
    return [(head, "dim"), (value, "bold"), (sparkline(values, cells)[0], style)]
