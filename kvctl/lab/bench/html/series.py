"""Groups runs for charts into series that differ in path, transport, pipeline setting and so on.

A series' label contains only the fields in which the series differ. The first such field determines the colour, the
others the dashes and the marker, so `staged` keeps its colour whether pipelined or not, and no information depends on
colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvctl.lab.bench.html.charts import MAX_BAR_LABEL
from kvctl.lab.bench.html.markup import grouped, lookup, significant, text_width

Run = Mapping[str, Any]
"""A row of the saved result; fields that an older result lacks are absent."""

COLOURS = 7
"""Number of colours in the style sheet; further series reuse the colours with other dashes."""

_PATH_COLOURS = {"staged": 0, "slice": 1, "auto": 2, "bulk": 3, "direct": 4}
DIMENSIONS: dict[str, Callable[[Any], str]] = {
    "path": str,
    "pipeline": lambda value: {"off": "not pipelined", "on": "pipelined"}.get(str(value), f"pipeline {value}"),
    "busy_engine": lambda value: "engine idle" if value == "off" else f"busy {value}",
    "cp_mode": lambda value: f"CP {value}",
    "transport": str,
    "fleet": str,
    "prefill": lambda value: f"from {value}",
    "decode": lambda value: f"to {value}",
    "device": str,
    "page_size": lambda value: f"pages of {value}",
    "page_order": str,
}
"""Fields besides the load in which runs may differ, most important first, each with the format of its values."""

_MAX_FACETS = 4


@dataclass(frozen=True, slots=True)
class Axis:
    """A field of a load that a bench can sweep, used as the x axis of charts.

    Attributes:
        key: name of the field in a run.
        over: name of the axis in a chart's title.
        title: title of the axis, with the unit.
        label: formats a value as the label of a tick.
        words: format string that turns a tick's label into words, such as `{} tokens`.
    """

    key: str
    over: str
    title: str
    label: Callable[[float], str]
    words: str

    def value(self, run: Run) -> float | None:
        """Returns the run's value on this axis, or None.

        Ratios of transfer to compute are rounded to two digits, because runs do not reach them more exactly.
        """
        found = lookup(run, self.key)
        return float(f"{found:.2g}") if found is not None and self.key == "ratio" else found

    def text(self, value: float) -> str:
        """Formats a value with the axis' name or unit: `concurrency 4`, `1,024 tokens`, `transfer : compute 0.5`."""
        return self.words.format(self.label(value))


AXES = (
    Axis("concurrency", "concurrency", "concurrency (requests in flight)", grouped, "concurrency {}"),
    Axis("tokens", "prompt tokens", "prompt length (tokens)", grouped, "{} tokens"),
    Axis("ratio", "transfer : compute", "transfer : compute", significant, "transfer : compute {}"),
)


def load_of(run: Run, axes: Iterable[Axis] = AXES) -> tuple[float | None, ...]:
    """Returns the run's value on each axis, None where it is unknown."""
    return tuple(axis.value(run) for axis in axes)


def load_text(run: Run, axes: Iterable[Axis] = AXES) -> str:
    """Formats the known values of a run's load: `concurrency 4 · 1,024 tokens`."""
    return " · ".join(axis.text(value) for axis in axes if (value := axis.value(run)) is not None)


def common_load(runs: Sequence[Run]) -> str:
    """Formats the values of the load that are the same in all runs; "" if there are none."""
    varied = _varied_axes(runs)
    return load_text(runs[0], [axis for axis in AXES if axis not in varied])


@dataclass(frozen=True, slots=True)
class Series:
    """Runs that differ only in their load.

    Attributes:
        colour: number of the colour in the style sheet.
        variant: number that selects the dashes and the marker.
    """

    label: str
    runs: tuple[Run, ...]
    colour: int
    variant: int

    @property
    def style(self) -> tuple[str, int, int]:
        """Label, colour and variant, for a legend."""
        return self.label, self.colour, self.variant


@dataclass(frozen=True, slots=True)
class Facet:
    """Content of one chart: series over one swept axis, with the load's other values fixed.

    Attributes:
        axis: the swept axis.
        fixed: the load's other values as text.
    """

    axis: Axis
    fixed: str
    series: tuple[Series, ...]

    def at(self, run: Run) -> float:
        """Returns the run's value on the swept axis; 0 if it is unknown."""
        return self.axis.value(run) or 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """The bar of one run in a bar chart: its label within its group, the run, and the run's series."""

    label: str
    series: Series
    run: Run


def varied_dimensions(runs: Sequence[Run]) -> list[str]:
    """Returns the fields of `DIMENSIONS` in which runs differ, without fields that add no further distinction."""
    varied: list[str] = []
    distinct = 1
    for name in DIMENSIONS:
        kinds = len({tuple(str(run.get(each)) for each in (*varied, name)) for run in runs})
        if kinds > distinct:
            varied.append(name)
            distinct = kinds
    return varied


def series_of(runs: Sequence[Run]) -> list[Series]:
    """Groups runs into series, in the order of the series' first runs."""
    varied = varied_dimensions(runs)
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        key = tuple(str(run.get(name)) for name in varied)
        # A second run of the same load starts another series, because a line can have only one value per load.
        keys = (key if repeat == 1 else (*key, str(repeat)) for repeat in count(1))
        own = next(each for each in keys if all(load_of(run) != load_of(other) for other in groups.get(each, ())))
        groups.setdefault(own, []).append(run)
    leading = varied[0] if varied else "path"
    hues: dict[str, int] = {}
    variants: dict[tuple[str, ...], int] = {}
    series = []
    for key, members in groups.items():
        hue = hues.setdefault(str(members[0].get(leading)), len(hues))
        if leading == "path":
            hue = _PATH_COLOURS.get(str(members[0].get("path")), len(_PATH_COLOURS) + hue)
        variant = variants.setdefault(key[1:], len(variants)) + hue // COLOURS
        series.append(Series(_label(members[0], varied, key), tuple(members), hue % COLOURS, variant))
    return series


def facets(runs: Sequence[Run], axes: Sequence[Axis] = AXES) -> tuple[list[Facet], int]:
    """Returns the facets of each swept axis, at most `_MAX_FACETS` per axis, and the number of facets left out."""
    found: list[Facet] = []
    left_out = 0
    for axis in axes:
        over_axis = _facets(runs, axis)
        last = len(over_axis) - 1
        if last < _MAX_FACETS:
            found += over_axis
        else:
            found += [over_axis[round(number * last / (_MAX_FACETS - 1))] for number in range(_MAX_FACETS)]
            left_out += len(over_axis) - _MAX_FACETS
    return found, left_out


def arranged(runs: Sequence[Run], max_label: float = MAX_BAR_LABEL) -> list[tuple[str, list[Entry]]]:
    """Groups runs for bar charts: pairs of a heading, which is a load, and a bar for each series with that load.

    If a series' label is wider than `max_label`, series become the headings and loads the labels of bars. The heading
    is "" if all runs have the same load.
    """
    series = series_of(runs)
    owners = [(each, run) for each in series for run in each.runs]
    varied = _varied_axes(runs)
    swapped = bool(varied) and max(text_width(each.label) for each in series) > max_label
    groups: dict[str, list[Entry]] = {}
    for run in runs:
        owner = next(each for each, member in owners if member is run)
        load = load_text(run, varied)
        heading, label = (owner.label, load) if swapped else (load, owner.label)
        groups.setdefault(heading, []).append(Entry(label, owner, run))
    return list(groups.items())


def _facets(runs: Sequence[Run], axis: Axis) -> list[Facet]:
    """Returns the facets of one axis; each has at least two different values on the axis."""
    others = [each for each in AXES if each is not axis]
    groups: dict[tuple[float, ...], list[Run]] = {}
    for run in runs:
        if (axis.value(run) or 0) > 0:
            # An unknown part of the load sorts first.
            groups.setdefault(tuple(-1.0 if at is None else at for at in load_of(run, others)), []).append(run)
    series = series_of(runs)
    return [
        Facet(axis, load_text(chosen[0], others), _narrowed(series, chosen, axis))
        for _, chosen in sorted(groups.items(), key=lambda group: group[0])
        if len({axis.value(run) for run in chosen}) > 1
    ]


def _narrowed(series: Sequence[Series], chosen: Sequence[Run], axis: Axis) -> tuple[Series, ...]:
    """Returns the series reduced to the chosen runs, in ascending order of the axis; empty series are left out."""
    wanted = {id(run) for run in chosen}
    narrowed = []
    for each in series:
        members = sorted((run for run in each.runs if id(run) in wanted), key=lambda run: axis.value(run) or 0.0)
        if members:
            narrowed.append(Series(each.label, tuple(members), each.colour, each.variant))
    return tuple(narrowed)


def _varied_axes(runs: Sequence[Run]) -> list[Axis]:
    return [axis for axis in AXES if len({axis.value(run) for run in runs}) > 1]


def _label(run: Run, varied: Sequence[str], key: Sequence[str]) -> str:
    words = [DIMENSIONS[name](run[name]) for name in varied if run.get(name) not in (None, "")]
    if not words:
        words = [str(run.get("path", ""))]
    if len(key) > len(varied):
        words.append(f"({key[-1]})")
    return " ".join(words)
