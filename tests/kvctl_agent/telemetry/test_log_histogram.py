"""A histogram's quantiles are within 1/32 of the true ones, over the whole range of durations."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.telemetry.durations import LogHistogram


def histogram(*durations: int) -> LogHistogram:
    made = LogHistogram()
    for duration in durations:
        made.add(duration)
    return made


def test_empty() -> None:
    assert histogram().quantiles(0.5, 0.99) == [None, None]


@given(st.integers(0, 2**40))
def test_one_value_comes_back(duration: int) -> None:
    (found,) = histogram(duration).quantiles(0.5)
    assert found is not None
    assert abs(found - duration) <= duration / 32


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200))
def test_quantiles_are_near_the_true_ones(durations: list[int]) -> None:
    made = histogram(*durations)
    assert made.count == len(durations)
    wanted = (0.5, 0.9, 0.99, 1.0)
    for quantile, found in zip(wanted, made.quantiles(*wanted), strict=True):
        true = sorted(durations)[math.ceil(quantile * len(durations)) - 1]
        assert found is not None
        assert abs(found - true) <= true / 32


def test_out_of_range_is_the_nearest_in_range() -> None:
    assert histogram(-5).quantiles(0.5) == [0]
    (found,) = histogram(1 << 60).quantiles(0.5)
    assert found is not None
    assert found < 1 << 41
