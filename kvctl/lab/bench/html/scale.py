"""Where a value stands on an axis, and which values get a tick: round ones, no more than have room."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_TICKS = 5


@dataclass(frozen=True, slots=True)
class Scale:
    """One axis.

    Attributes:
        lo, hi: values at its ends; both above 0 on a logarithmic axis.
        ticks: values with a gridline.
        labels: text of each tick.
        title: what is measured, with its unit.
    """

    lo: float
    hi: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    title: str
    log: bool = False

    def position(self, value: float) -> float:
        """0 at `lo`, 1 at `hi`; values beyond are held at the ends."""
        lo, hi = self.lo, self.hi
        if self.log:
            lo, hi, value = math.log(lo), math.log(hi), math.log(max(value, self.lo))
        return min(1.0, max(0.0, (value - lo) / (hi - lo)))


def from_zero(most: float, title: str, label: Callable[[float], str], binary: bool = False) -> Scale:
    """A linear axis from 0 to the first tick at or above `most`; `binary` steps by powers of two."""
    step = _binary_step(most) if binary else _step(most)
    count = max(1, math.ceil(most / step - 1e-9))
    ticks = tuple(step * number for number in range(count + 1))
    return Scale(0.0, ticks[-1], ticks, tuple(label(tick) for tick in ticks), title)


def spanning(lo: float, hi: float, title: str, label: Callable[[float], str], ticks: int = _TICKS) -> Scale:
    """A linear axis from exactly `lo` to `hi`, for time: nothing happens before or after."""
    hi = hi if hi > lo else lo + 1.0
    step = _step(hi - lo, ticks)
    first, last = math.ceil(lo / step - 1e-9), math.floor(hi / step + 1e-9)
    stood = tuple(step * number for number in range(first, last + 1))
    return Scale(lo, hi, stood, tuple(label(tick) for tick in stood), title)


def shares(title: str) -> Scale:
    """A linear axis from nothing to all."""
    ticks = (0.0, 0.25, 0.5, 0.75, 1.0)
    return Scale(0.0, 1.0, ticks, tuple(f"{tick * 100:.0f} %" for tick in ticks), title)


def logarithmic(values: Sequence[float], title: str, label: Callable[[float], str]) -> Scale:
    """A logarithmic axis around positive `values`, from and to a 1, 2 or 5 of some decade."""
    rounds = [digit * 10.0**power for power in range(-12, 16) for digit in (1, 2, 5)]
    low, high = min(values), max(values)
    lo = max(each for each in rounds if each <= low * (1 + 1e-9))
    hi = min(each for each in rounds if each >= high * (1 - 1e-9) and each > lo)
    inside = [each for each in rounds if lo <= each <= hi]
    decades = [each for each in inside if _is_decade(each)]
    # Over several decades: these, and both ends, so that the axis tells where it begins.
    ticks = sorted({lo, *decades, hi}) if len(inside) > 8 else inside
    return Scale(lo, hi, tuple(ticks), tuple(label(tick) for tick in ticks), title, log=True)


def stops(values: Sequence[float], title: str, label: Callable[[float], str]) -> Scale:
    """A logarithmic axis with a tick at each of several positive `values`: those that a sweep has measured."""
    ticks = tuple(sorted(set(values)))
    return Scale(ticks[0], ticks[-1], ticks, tuple(label(tick) for tick in ticks), title, log=True)


def _step(most: float, ticks: int = _TICKS) -> float:
    """A 1, 2 or 5 of some decade that goes into `most` at most `ticks` times."""
    if most <= 0:
        return 1.0
    raw = most / ticks
    decade = 10.0 ** math.floor(math.log10(raw))
    return float(next(digit * decade for digit in (1, 2, 5, 10) if digit * decade >= raw * (1 - 1e-9)))


def _binary_step(most: float) -> float:
    return 2.0 ** math.ceil(math.log2(most / _TICKS)) if most > 0 else 1.0


def _is_decade(value: float) -> bool:
    return abs(math.log10(value) - round(math.log10(value))) < 1e-9
