"""`ring=80%`: thresholds as people write them, and what they say of a value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvctl.exit_codes import CheckState
from kvctl.health.measures import MEASURES_BY_NAME, Measure, Unit
from kvctl.render import units


class ThresholdError(ValueError):
    """A threshold cannot be understood; the text says which and what to write."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Where a measure becomes a warning, and where it becomes critical; None nowhere."""

    warn: float | None = None
    crit: float | None = None

    def state(self, measure: Measure, value: float | None) -> CheckState:
        """A value at the threshold has reached it; of what has a least, only less than it has."""

        def reached(limit: float | None) -> bool:
            if limit is None or value is None:
                return False
            return value < limit if measure.least else value >= limit

        return (
            CheckState.CRITICAL if reached(self.crit) else CheckState.WARNING if reached(self.warn) else CheckState.OK
        )


def parse(warn: Sequence[str], crit: Sequence[str], areas: Sequence[str]) -> dict[str, Threshold]:
    """Reads `--warn` and `--crit`, by the measure's name.

    Args:
        areas: what is checked; a threshold of anything else would never be looked at.

    Raises:
        ThresholdError: one is no threshold, or the warning is worse than the critical one.
    """
    warnings, criticals = _values("--warn", warn, areas), _values("--crit", crit, areas)
    found = {
        name: Threshold(warnings.get(name), criticals.get(name)) for name in dict.fromkeys((*warnings, *criticals))
    }
    for name, threshold in found.items():
        if threshold.warn is None or threshold.crit is None:
            continue
        measure = MEASURES_BY_NAME[name]
        if threshold.crit < threshold.warn if not measure.least else threshold.crit > threshold.warn:
            order = "more" if measure.least else "less"
            raise ThresholdError(
                f"{name}: critical {human(measure, threshold.crit)} is {order} than the warning at "
                f"{human(measure, threshold.warn)}, which would never be seen"
            )
    return found


def _values(option: str, texts: Sequence[str], areas: Sequence[str]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for piece in (piece.strip() for each in texts for piece in each.split(",")):
        name, separator, text = piece.partition("=")
        measure = MEASURES_BY_NAME.get(name)
        if not separator or not text:
            raise ThresholdError(f"{option} {piece!r}: write NAME=VALUE, as in ring=80%")
        if measure is None:
            near = difflib.get_close_matches(name, MEASURES_BY_NAME, n=1)
            known = ", ".join(each.name for each in MEASURES_BY_NAME.values() if each.area in areas)
            raise ThresholdError(f"{option} {name}: {f'did you mean {near[0]}?' if near else f'there are {known}'}")
        if measure.area not in areas:
            raise ThresholdError(f"{option} {name} is of kvctl check {measure.area}, and of kvctl check all")
        found[name] = _read(option, measure, text)
    return found


def _read(option: str, measure: Measure, text: str) -> float:
    examples = {Unit.COUNT: "4", Unit.SECONDS: "30s", Unit.RATIO: "80% or 0.8", Unit.BYTES: "64MiB"}
    try:
        match measure.unit:
            case Unit.SECONDS:
                return units.parse_duration(text) / 1e9
            case Unit.BYTES:
                return units.parse_size(text)
            case Unit.COUNT:
                value = float(int(text))
            case Unit.RATIO:
                value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
                if value > 1:
                    raise ValueError
        if value < 0:
            raise ValueError
        return value
    except ValueError:
        raise ThresholdError(f"{option} {measure.name}={text}: write it as {examples[measure.unit]}") from None


def human(measure: Measure, value: float | None) -> str:
    """As people read it."""
    if value is None:
        return units.UNKNOWN
    match measure.unit:
        case Unit.SECONDS:
            return units.duration(value * 1e9)
        case Unit.RATIO:
            return units.percent(value)
        case Unit.BYTES:
            return units.size(value)
    return units.count(round(value))
