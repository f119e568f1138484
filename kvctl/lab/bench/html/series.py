"""Sorts runs into what a plot needs: one series per thing that was compared, along one axis that was swept.

Runs are compared by path, transport, pipelining and so on; only what differs between them appears in a label. Colour
stands for the first thing that differs, dashes and marker shapes for the rest, so that `staged` keeps its colour
whether pipelined or not, and nothing depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvctl.lab.bench.html.loads import AXES, Axis, Run, load_of, same_load, told, varied_axes
from kvctl.lab.bench.html.numbers import text_width

COLOURS = 7
"""Colours that the style sheet has; the series after them begin again, with other dashes."""

_PATH_COLOURS = {"staged": 0, "slice": 1, "auto": 2, "bulk": 3, "direct": 4}
DIMENSIONS: dict[str, Callable[[Any], str]] = {
    "path": str,
    "pipeline": lambda value: {"off": "not pipelined", "on": "pipelined"}.get(str(value), f"pipeline {value}"),
    "cp_mode": lambda value: f"CP {value}",
    "transport": str,
    "fleet": str,
    "prefill": lambda value: f"from {value}",
    "decode": lambda value: f"to {value}",
    "device": str,
    "page_size": lambda value: f"pages of {value}",
    "page_order": str,
}
"""What runs may differ in besides their load, most telling first, and how a value reads in a label."""

_MOST_FACETS = 4


@dataclass(frozen=True, slots=True)
class Series:
    """Runs that differ in nothing but their load.

    Attributes:
        colour: number of its colour.
        variant: number of its dashes and marker.
    """

    label: str
    runs: tuple[Run, ...]
    colour: int
    variant: int


@dataclass(frozen=True, slots=True)
class Facet:
    """What one plot shows: series along `axis` while the rest of the load stands still.

    Attributes:
        fixed: the rest of the load, in words.
    """

    axis: Axis
    fixed: str
    series: tuple[Series, ...]

    def at(self, run: Run) -> float:
        """Where a run stands on the axis."""
        return self.axis.value(run) or 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A run that gets a bar of its own, and the bar's name within its group."""

    label: str
    series: Series
    run: Run


def varied_dimensions(runs: Sequence[Run]) -> list[str]:
    """Names of what the runs differ in besides their load; nothing that follows from what was named before."""
    varied: list[str] = []
    told_apart = 1
    for name in DIMENSIONS:
        kinds = len({tuple(str(run.get(each)) for each in (*varied, name)) for run in runs})
        if kinds > told_apart:
            varied.append(name)
            told_apart = kinds
    return varied


def sort_out(runs: Sequence[Run]) -> list[Series]:
    """All series, in the order in which they appear."""
    varied = varied_dimensions(runs)
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        key = tuple(str(run.get(name)) for name in varied)
        # The same load again, and nothing known to tell the two apart: a series of its own rather than a zigzag.
        keys = (key if twin == 1 else (*key, str(twin)) for twin in count(1))
        own = next(each for each in keys if not any(same_load(run, other) for other in groups.get(each, ())))
        groups.setdefault(own, []).append(run)
    leading = varied[0] if varied else "path"
    hues: dict[str, int] = {}
    variants: dict[tuple[str, ...], int] = {}
    sorted_out = []
    for key, members in groups.items():
        hue = hues.setdefault(str(members[0].get(leading)), len(hues))
        if leading == "path":
            hue = _PATH_COLOURS.get(str(members[0].get("path")), len(_PATH_COLOURS) + hue)
        variant = variants.setdefault(key[1:], len(variants)) + hue // COLOURS
        sorted_out.append(Series(_label(members[0], varied, key), tuple(members), hue % COLOURS, variant))
    return sorted_out


def facets(runs: Sequence[Run], axis: Axis) -> tuple[list[Facet], int]:
    """The plots over one axis, each with at least two points on it.

    Returns:
        the facets, and how many more there are than are drawn.
    """
    others = [each for each in AXES if each is not axis]
    groups: dict[tuple[float, ...], list[Run]] = {}
    for run in runs:
        if (axis.value(run) or 0) > 0:
            # Numbers that can be sorted; a part of the load that is not known comes first.
            groups.setdefault(tuple(-1.0 if at is None else at for at in load_of(run, others)), []).append(run)
    whole = sort_out(runs)
    found = [
        Facet(axis, told(chosen[0], others), _within(whole, chosen, axis))
        for _, chosen in sorted(groups.items(), key=lambda group: group[0])
        if len({axis.value(run) for run in chosen}) > 1
    ]
    if len(found) <= _MOST_FACETS:
        return found, 0
    picked = [found[round(number * (len(found) - 1) / (_MOST_FACETS - 1))] for number in range(_MOST_FACETS)]
    return picked, len(found) - len(picked)


def every_facet(runs: Sequence[Run]) -> tuple[list[Facet], int]:
    """The plots over all axes, and how many more there are than are drawn."""
    each = [facets(runs, axis) for axis in AXES]
    return [facet for found, _ in each for facet in found], sum(left_out for _, left_out in each)


def arranged(runs: Sequence[Run], most_label: float) -> list[tuple[str, list[Entry]]]:
    """Runs in groups under a heading, for bars: the series of each load side by side.

    Where the series' names are wider than `most_label`, they become the headings and loads the bars' names. A single
    group has no heading.
    """
    series = sort_out(runs)
    owners = [(each, run) for each in series for run in each.runs]
    varied = varied_axes(runs)
    turned = bool(varied) and max(text_width(each.label) for each in series) > most_label
    groups: dict[str, list[Entry]] = {}
    for run in runs:
        owner = next(each for each, member in owners if member is run)
        at = told(run, varied)
        heading, label = (owner.label, at) if turned else (at, owner.label)
        groups.setdefault(heading, []).append(Entry(label, owner, run))
    return list(groups.items())


def _within(series: Sequence[Series], chosen: Sequence[Run], axis: Axis) -> tuple[Series, ...]:
    """The series with only the chosen runs, in the axis' order; those that have none of them are absent."""
    wanted = {id(run) for run in chosen}
    narrowed = []
    for each in series:
        members = sorted((run for run in each.runs if id(run) in wanted), key=lambda run: axis.value(run) or 0.0)
        if members:
            narrowed.append(Series(each.label, tuple(members), each.colour, each.variant))
    return tuple(narrowed)


def _label(run: Run, varied: Sequence[str], key: Sequence[str]) -> str:
    words = [DIMENSIONS[name](run[name]) for name in varied if run.get(name) not in (None, "")]
    if not words:
        words = [str(run.get("path", ""))]
    if len(key) > len(varied):
        words.append(f"({key[-1]})")
    return " ".join(words)
