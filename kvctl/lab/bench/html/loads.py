"""What was asked of a run: requests in flight, prompt tokens, and how long compute takes beside the transfer.

Each is an axis that can be swept; runs of one load can be compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvctl.lab.bench.html.numbers import grouped, lookup, significant

Run = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Axis:
    """One part of a load.

    Attributes:
        key: in a run's row.
        over: what a plot is over.
        title: with the unit, under the axis.
        label: a value as a tick.
        words: a value in a sentence.
    """

    key: str
    over: str
    title: str
    label: Callable[[float], str]
    words: str

    def value(self, run: Run) -> float | None:
        """Where a run stands; ratios to two digits, which is as well as they are met."""
        found = lookup(run, self.key)
        return float(f"{found:.2g}") if found is not None and self.key == "ratio" else found

    def told(self, value: float) -> str:
        """`concurrency 4`, `1,024 tokens`, `transfer : compute 0.5`."""
        return self.words.format(self.label(value))


AXES = (
    Axis("concurrency", "concurrency", "concurrency (requests in flight)", grouped, "concurrency {}"),
    Axis("tokens", "prompt tokens", "prompt length (tokens)", grouped, "{} tokens"),
    Axis("ratio", "transfer : compute", "transfer : compute", significant, "transfer : compute {}"),
)

Load = tuple[float | None, ...]


def load_of(run: Run, axes: Iterable[Axis] = AXES) -> Load:
    """Where a run stands on each of the axes."""
    return tuple(axis.value(run) for axis in axes)


def told(run: Run, axes: Iterable[Axis] = AXES) -> str:
    """`concurrency 4 · 1,024 tokens`, as far as it is known."""
    return " · ".join(axis.told(value) for axis in axes if (value := axis.value(run)) is not None)


def same_load(run: Run, other: Run) -> bool:
    """Whether two runs were asked the same."""
    return load_of(run) == load_of(other)


def varied_axes(runs: Sequence[Run]) -> list[Axis]:
    """Axes on which the runs do not all stand at one place."""
    return [axis for axis in AXES if len({axis.value(run) for run in runs}) > 1]


def common_load(runs: Sequence[Run]) -> str:
    """The part of the load that all runs share."""
    varied = varied_axes(runs)
    return told(runs[0], [axis for axis in AXES if axis not in varied])
