"""Draws a staging ring: the allocations, the head, and the allocation that holds back the watermark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvctl.render import units
from kvctl.render.bars import merged
from kvctl.render.report import Line, Span
from kvctl.render.staging import oldest

# Glyphs get darker as data arrives; the two states that do not end without intervention are letters.
GLYPHS: dict[str, Span] = {
    "granted": ("░", ""),
    "landed": ("▒", "cyan"),
    "scattering": ("█", "green"),
    "revoking": ("r", "yellow"),
    "quarantined": ("Q", "bold red"),
}
_FREE: Span = ("·", "dim")
_STRANGE: Span = ("?", "bold red")
# Later states take precedence when several allocations share a cell.
_PRECEDENCE = ("granted", "scattering", "landed", "revoking", "quarantined")
_LABELS = 9
# An older allocation counts as stuck.
_PINNED_NS = 1_000_000_000


def draw(answer: Mapping[str, Any], width: int) -> list[Line]:
    """Draws the ring of one decode rank.

    Args:
        answer: the agent's answer to `staging`, whose `ring` is not None.
        width: of the terminal.
    """
    ring = answer["ring"]
    cells = max(10, width - _LABELS - 1)
    size = ring["size_bytes"]
    ratio = ring["used_bytes"] / size if size else None
    ahead = ", the rest granted ahead" if ring["used_bytes"] > size else ""
    head = ring["head_bytes"] % size if size else 0
    tail = ring["watermark"]["tail"] % size if size else 0
    lines: list[Line] = [
        [
            (answer["agent"], "bold"),
            (f"  {units.size(ring['used_bytes'])} of {units.size(size)} ({units.percent(ratio)}{ahead})", ""),
            (f", {len(ring['allocations'])} live, high water {units.size(ring['high_water_bytes'])}", ""),
        ],
        [(f"{'ring':<{_LABELS}}", "dim"), *merged(_bar(ring["allocations"], size, cells))],
        [(f"{'':<{_LABELS}}", ""), *_markers(head, tail, size, cells)],
        [
            ("head H", "bold"),
            (f" round {ring['round']} at {units.size(head)}   ", ""),
            ("watermark W", "bold"),
            (f" round {ring['watermark']['round']} at {units.size(tail)}", ""),
            (f", moved {units.duration(ring['watermark']['age_ns'])} ago" if ring["allocations"] else "", ""),
        ],
    ]
    aside = [each for each in ring["allocations"] if each["aside"]]
    if aside:
        nbytes = sum(each["end"] - each["offset"] for each in aside)
        writers = ", ".join(sorted({each["writer"] for each in aside}))
        lines.append(
            [
                ("aside", "bold"),
                (f" {len(aside)} of unresponsive writers ({writers}): {units.size(nbytes)}", "bold red"),
            ]
        )
    pin = oldest(answer)
    if pin is not None:
        stuck = pin["age_ns"] >= _PINNED_NS or pin["state"] == "quarantined"
        text = f"allocation {pin['serial']} of room {pin['room']} from {pin['writer']}, {pin['state']}"
        lines.append([("oldest", "bold"), (f" {text}, {units.duration(pin['age_ns'])}", "bold red" if stuck else "")])
    return lines


def legend() -> Line:
    """Returns the legend of the glyphs."""
    spans: list[Span] = [(_FREE[0], _FREE[1]), (" free  ", "dim")]
    for state, (glyph, style) in GLYPHS.items():
        spans += [(glyph, style), (f" {state}  ", "dim")]
    return spans


def _bar(allocations: Sequence[Mapping[str, Any]], size: int, cells: int) -> list[Span]:
    bar = [_FREE] * cells
    for state in (*_PRECEDENCE, None):
        for allocation in allocations:
            if (state is None and allocation["state"] in GLYPHS) or state not in {None, allocation["state"]}:
                continue
            for first, last in _cells(allocation["offset"], allocation["end"], size, cells):
                bar[first:last] = [GLYPHS.get(allocation["state"], _STRANGE)] * (last - first)
    return bar


def _cells(offset: int, end: int, size: int, cells: int) -> list[tuple[int, int]]:
    """Returns the cells that [offset, end) covers, at least one; two ranges if it crosses the end of the ring."""
    if size <= 0 or end <= offset:
        return []
    start = offset % size
    stop = start + end - offset
    runs = [(start, min(stop, size))] + ([(0, min(stop - size, size))] if stop > size else [])
    return [(low * cells // size, max(low * cells // size + 1, -(-high * cells // size))) for low, high in runs]


def _markers(head: int, tail: int, size: int, cells: int) -> list[Span]:
    row = [" "] * cells
    places = {"W": tail, "H": head}
    at = {letter: min(cells - 1, place * cells // size) if size else 0 for letter, place in places.items()}
    if at["W"] == at["H"]:
        row[at["W"]] = "*"
        return [("".join(row).rstrip(), "bold"), (" H and W" if at["W"] < cells - 10 else "", "dim")]
    for letter, place in at.items():
        row[place] = letter
    return [("".join(row).rstrip(), "bold")]
