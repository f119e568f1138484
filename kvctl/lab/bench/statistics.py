"""Percentiles, summaries, spreads of rounds and unions of spans, without numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import comb

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
MIN_ROUNDS = 4
"""Fewest rounds of each of two settings that can tell them apart; equal settings seem to differ once in 35 then."""


def percentile(ordered: Sequence[float], quantile: float) -> float:
    """Returns a quantile (0 to 1) of `ordered`, interpolated linearly; `ordered` is ascending and not empty."""
    at = quantile * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summary_ms(values_ns: Iterable[float]) -> dict[str, float | None]:
    """Returns the mean, the `QUANTILES` and the maximum in milliseconds; all are None without values."""
    ordered = sorted(value / 1e6 for value in values_ns)
    if not ordered:
        return dict.fromkeys(("mean", *QUANTILES, "max"))
    return {
        "mean": sum(ordered) / len(ordered),
        **{name: percentile(ordered, quantile) for name, quantile in QUANTILES.items()},
        "max": ordered[-1],
    }


def stage_us(values_ns: Iterable[float]) -> dict[str, float | None]:
    """Returns p50 and p99 in microseconds; both are None without values."""
    ordered = sorted(value / 1e3 for value in values_ns)
    if not ordered:
        return {"p50": None, "p99": None}
    return {"p50": percentile(ordered, 0.5), "p99": percentile(ordered, 0.99)}


def union(spans: Iterable[tuple[int, int]]) -> int:
    """Returns the length of the union of [start, end) spans."""
    total = 0
    reached: int | None = None
    for start, end in sorted(spans):
        if reached is None or start > reached:
            total += max(0, end - start)
            reached = max(end, start)
        elif end > reached:
            total += end - reached
            reached = end
    return total


def median(values: Sequence[float]) -> float:
    """Returns the median of `values`, which is not empty."""
    return percentile(sorted(values), 0.5)


def spread(rounds: Sequence[float]) -> tuple[float, float]:
    """Returns the lowest and the highest value, without as many outliers at each end as the number of rounds allows.

    None of fewer than seven rounds are left out, one of seven, a quarter of twelve: the most with which the spreads of
    two equal settings do not overlap in at most one of 20 benches.
    """
    ordered, count = sorted(rounds), len(rounds)
    outside = 0
    while _chance(count, outside + 1) <= 0.05:
        outside += 1
    return ordered[outside], ordered[-1 - outside]


def _chance(count: int, outside: int) -> float:
    """Returns how often the spreads of two equal settings do not overlap, each without `outside` rounds at both ends.

    All orders of the rounds of both are equally likely then; counted are those in which the spread of one ends before
    that of the other begins, after `early` rounds of the other.
    """
    if 2 * outside >= count:
        return 1.0
    apart = sum(
        comb(count - outside - 1 + early, early) * comb(outside + count - early, outside)
        for early in range(outside + 1)
    )
    return 2 * apart / comb(2 * count, count)


def told_apart(one: Sequence[float], other: Sequence[float]) -> bool | None:
    """Returns whether the spreads of two settings do not overlap; None if one has fewer than `MIN_ROUNDS` rounds."""
    if min(len(one), len(other)) < MIN_ROUNDS:
        return None
    return not _overlap(spread(one), spread(other))


def times_text(runs: Sequence[float], others: Sequence[float]) -> str:
    """Formats the ratio of two medians as `1.97 x`, and as `≈ 1.08 x` if the spreads of several runs each overlap."""
    if not runs or not others or median(others) <= 0:
        return "-"
    several = min(len(runs), len(others)) > 1
    return "≈ " * (several and _overlap(spread(runs), spread(others))) + f"{median(runs) / median(others):.2f} x"


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]
