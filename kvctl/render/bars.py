"""Draws bars with glyphs that differ in shape and not only in colour, so that they are readable without colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from kvctl.render.report import Line, Span
from kvctl_agent.contract.states import STAGES

# Glyph of each stage. `ready` has none: it is the point at which a part's bar begins.
STAGE_GLYPHS: dict[str, Span] = {
    "gate": ("·", "yellow"),
    "queue": ("░", "yellow"),
    "gather": ("▒", "cyan"),
    "post": ("╸", "magenta"),
    "wire": ("━", "blue"),
    "arrive": ("╌", "magenta"),
    "scatter": ("█", "green"),
}
HIDDEN, EXPOSED = "■", "□"


def stage_intervals(moments: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Returns (stage, start, end) of each stage of a part that has a positive length, in ns.

    A stage starts when the previous one ends, and ends no later than any later stage: a write may arrive, and be
    scattered, before the writer's call that posted it returns.

    Args:
        moments: time at which each stage ended, by stage; unmeasured stages are missing.
    """
    known = [stage for stage in STAGES if stage in moments]
    ends = list(accumulate((moments[stage] for stage in reversed(known)), min))[::-1]
    return [(stage, start, end) for stage, start, end in zip(known[1:], ends, ends[1:], strict=False) if start < end]


def drawn_stages(moments: Mapping[str, int], start: int) -> list[tuple[float, float, Span]]:
    """Returns the stages of a part as (start, stop, glyph) for `segments`, in ns after `start`."""
    return [
        (float(begin - start), float(end - start), STAGE_GLYPHS[stage])
        for stage, begin, end in stage_intervals(moments)
    ]


def split(share: float, width: int) -> list[Span]:
    """Draws a bar of the hidden share and the exposed rest, `■■■■■□□□`; each has a cell unless it is zero."""
    hidden = round(share * width)
    hidden = max(hidden, 1) if share > 0 else 0
    hidden = min(hidden, width - 1) if share < 1 else width
    return [(HIDDEN * hidden, "green"), (EXPOSED * (width - hidden), "yellow")]


def filled(ratio: float, width: int) -> str:
    """Draws a gauge such as `█████░░░░░`, for a ratio from 0 to 1."""
    full = round(max(0.0, min(1.0, ratio)) * width)
    return "█" * full + "░" * (width - full)


def segments(pieces: Sequence[tuple[float, float, Span]], end: float, width: int) -> list[Span]:
    """Draws intervals on a common axis from 0 to `end`.

    Args:
        pieces: (start, stop, glyph); later ones cover earlier ones; a non-empty one gets at least one cell.
    """
    cells: list[Span] = [(" ", "")] * width
    for start, stop, glyph in pieces:
        if stop <= start or end <= 0:
            continue
        first = min(width - 1, int(min(1.0, start / end) * width))
        last = max(first + 1, round(min(1.0, stop / end) * width))
        cells[first:last] = [glyph] * (last - first)
    return merged(cells)


def merged(cells: Sequence[Span]) -> list[Span]:
    """Merges neighbouring cells of the same style into one span."""
    spans: list[Span] = []
    for text, style in cells:
        if spans and spans[-1][1] == style:
            spans[-1] = (spans[-1][0] + text, style)
        else:
            spans.append((text, style))
    return spans


def legend(glyphs: Mapping[str, Span] = STAGE_GLYPHS) -> Line:
    """Returns a line that lists each glyph with its name."""
    return [span for name, glyph in glyphs.items() for span in (glyph, (f" {name}  ", "dim"))]
