"""Percentiles and unions of spans, compared with slow and simple definitions."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.lab.bench.statistics import median, percentile, stage_us, summary_ms, union

spans_strategy = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: tuple(sorted(pair))))
values_strategy = st.lists(st.floats(0, 1e6), min_size=1)


@given(spans=spans_strategy)
def test_the_union_counts_every_moment_once(spans: list[tuple[int, int]]):
    assert union(spans) == len({moment for start, end in spans for moment in range(start, end)})


def test_the_union_of_nothing_is_nothing():
    assert union([]) == 0


@given(values=values_strategy)
def test_percentiles_start_at_the_least_and_end_at_the_most(values: list[float]):
    ordered = sorted(values)
    assert percentile(ordered, 0) == ordered[0]
    assert percentile(ordered, 1) == ordered[-1]
    assert median(values) == pytest.approx(statistics.median(values))


@given(values=st.lists(st.floats(0, 1e6), min_size=2))
def test_percentiles_are_those_of_the_standard_library(values: list[float]):
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for number in (50, 90, 95, 99):
        assert percentile(sorted(values), number / 100) == pytest.approx(cuts[number - 1])


def test_a_summary_is_in_milliseconds_and_unknown_without_values():
    assert summary_ms([1_000_000, 3_000_000])["mean"] == 2
    assert summary_ms([1_000_000, 3_000_000])["max"] == 3
    assert set(summary_ms([]).values()) == {None}


def test_a_stage_is_in_microseconds_and_unknown_without_values():
    assert stage_us([1000, 3000]) == {"p50": 2, "p99": pytest.approx(2.98)}
    assert stage_us([]) == {"p50": None, "p99": None}
