"""Percentiles and unions of spans, compared with slow and simple definitions."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.lab.bench.statistics import (
    MIN_ROUNDS,
    median,
    percentile,
    spread,
    stage_us,
    summary_ms,
    times_text,
    told_apart,
    union,
)

spans_strategy = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: tuple(sorted(pair))))


@given(spans=spans_strategy)
def test_the_union_counts_every_moment_once(spans: list[tuple[int, int]]):
    assert union(spans) == len({moment for start, end in spans for moment in range(start, end)})


@given(values=st.lists(st.floats(0, 1e6), min_size=2))
def test_percentiles_are_those_of_the_standard_library(values: list[float]):
    ordered, cuts = sorted(values), statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(ordered, number / 100) for number in range(1, 100)] == pytest.approx(cuts)
    assert (percentile(ordered, 0), percentile(ordered, 1)) == (ordered[0], ordered[-1])
    assert median(values) == pytest.approx(statistics.median(values))
    assert median(values[:1]) == values[0]


def test_a_summary_is_in_milliseconds_and_unknown_without_values():
    assert summary_ms([1_000_000, 3_000_000])["mean"] == 2
    assert summary_ms([1_000_000, 3_000_000])["max"] == 3
    assert set(summary_ms([]).values()) == {None}


def test_a_stage_is_in_microseconds_and_unknown_without_values():
    assert stage_us([1000, 3000]) == {"p50": 2, "p99": pytest.approx(2.98)}
    assert stage_us([]) == {"p50": None, "p99": None}


@pytest.mark.parametrize(
    ("rounds", "limits"),
    [
        ([3.0], (3.0, 3.0)),
        ([4.1, 3.7, 3.9], (3.7, 4.1)),
        (list(range(6)), (0, 5)),
        (list(range(7)), (1, 5)),  # an outlier on each side is left out
        (list(range(12)), (3, 8)),
    ],
)
def test_the_spread_leaves_out_outliers_of_many_rounds(rounds: list[float], limits: tuple[float, float]):
    assert spread(rounds) == limits
    assert spread(rounds[::-1]) == limits


@pytest.mark.parametrize("count", range(MIN_ROUNDS, 9))
def test_equal_settings_are_told_apart_in_one_of_20_benches_at_most(count: int):
    """Rounds of two equal settings may come in any order; the first is one of the first setting's."""
    rounds = set(range(2 * count))
    ones = [{0, *more} for more in itertools.combinations(range(1, 2 * count), count - 1)]
    apart = sum(bool(told_apart(list(one), list(rounds - one))) for one in ones)
    assert apart <= len(ones) / 20
    assert count > MIN_ROUNDS or (apart, len(ones)) == (1, 35)


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8], True),
        ([5, 6, 7, 8], [1, 2, 3, 4], True),
        ([1, 2, 3, 5], [5, 6, 7, 8], False),
        ([1, 2, 3], [50, 60, 70, 80], None),  # too few
        ([], [], None),
    ],
)
def test_settings_are_told_apart_if_their_spreads_do_not_overlap(
    one: list[float], other: list[float], apart: bool | None
):
    assert told_apart(one, other) is apart


@pytest.mark.parametrize(
    ("runs", "others", "text"),
    [
        ([3.0, 4.0], [1.0, 2.0], "2.33 x"),
        ([3.0, 4.0], [1.0, 3.0], "≈ 1.75 x"),
        ([3.0], [3.0], "1.00 x"),  # one run has no spread
        ([], [1.0], "-"),
        ([1.0], [0.0], "-"),
    ],
)
def test_a_ratio_of_medians_says_whether_the_spreads_overlap(runs: list[float], others: list[float], text: str):
    assert times_text(runs, others) == text
