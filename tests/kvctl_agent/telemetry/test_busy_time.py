"""Spans: the union of intervals, however they come."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.telemetry.durations import BusyTime

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda at: (at[0], at[0] + at[1])))


def spans_of(intervals: list[tuple[int, int]]) -> BusyTime:
    spans = BusyTime()
    for start, end in intervals:
        spans.add(start, end)
    return spans


def test_overlaps_count_once_and_gaps_not_at_all() -> None:
    spans = spans_of([(0, 10), (5, 15), (40, 50)])
    assert spans.split(12) == (12, 13)
    assert spans.split(45) == (20, 5)


def test_nothing_moved() -> None:
    assert not BusyTime()
    assert BusyTime().split(5) == (0, 0)


@given(INTERVALS, st.integers(-5, 90))
def test_against_counting_every_tick(intervals: list[tuple[int, int]], moment: int) -> None:
    ticks = {tick for start, end in intervals for tick in range(start, end)}
    spans = spans_of(intervals)
    assert spans.split(moment) == (sum(tick < moment for tick in ticks), sum(tick >= moment for tick in ticks))


@given(INTERVALS)
def test_what_touches_melts(intervals: list[tuple[int, int]]) -> None:
    kept = spans_of(intervals)._spans
    assert all(before[1] < after[0] for before, after in itertools.pairwise(kept))
