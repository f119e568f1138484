"""Throughput is bytes over the union of spans; a window without transfers has no rate."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.contract.values import nearest_rank
from kvctl_agent.observer.rates import RecentEnds, SpanRate
from kvctl_agent.telemetry.durations import Latencies

SECOND = 1_000_000_000


def rate(spans: list[tuple[int, int, int]], window: int = SECOND) -> SpanRate:
    made = SpanRate(window)
    for start, end, nbytes in spans:
        made.add(start, end, nbytes)
    return made


def union(spans: list[tuple[int, int, int]]) -> int:
    """Length of the union of spans, the slow and obvious way."""
    covered, until = 0, -1
    for start, end, _ in sorted(spans):
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered


def test_nothing_moved_is_no_rate() -> None:
    assert SpanRate(SECOND).window(5) == {
        "window_ns": SECOND,
        "bytes": 0,
        "gb_per_s": None,
        "rooms_per_s": None,
    }


def test_a_span_without_length_is_not_a_division_by_zero() -> None:
    window = rate([(10, 10, 5), (20, 10, 5)]).window(30)
    assert window["bytes"] == 10
    assert window["gb_per_s"] == 5.0


def test_a_constant_stream_keeps_its_rate_wherever_the_window_ends() -> None:
    made = SpanRate(SECOND)
    step = 1_000_000
    for number in range(5000):
        made.add(number * step, (number + 3) * step, 2 * step)  # three at a time: 2 bytes per ns together
        if number > 2000 and number % 97 == 0:
            window = made.window((number + 3) * step)
            assert window["gb_per_s"] == pytest.approx(2.0, rel=0.01)
            assert window["bytes"] == pytest.approx(2 * SECOND, rel=0.01)
    assert len(made._spans) < 200  # and it does not keep 1000 spans for that


spans_strategy = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(1, 500), st.integers(0, 10**6)).map(
        lambda s: (s[0], s[0] + s[1], s[2])
    ),
    min_size=1,
    max_size=40,
)


@given(spans_strategy)
def test_in_any_order_time_is_the_union_and_no_byte_is_lost(spans: list[tuple[int, int, int]]) -> None:
    # The grain (1/64 of the window) lies inside the range of lengths, so full stretches are exercised too.
    window = rate(spans, window=6400).window(2500)
    total = sum(nbytes for _, _, nbytes in spans)
    assert window["bytes"] == pytest.approx(total, abs=1)
    assert window["gb_per_s"] == pytest.approx(total / union(spans))


@given(spans_strategy, st.lists(st.integers(0, 3000)), st.integers(1, 2000), st.integers(0, 4000))
def test_a_window_is_the_sum_of_the_shares_of_its_spans(
    spans: list[tuple[int, int, int]], rooms: list[int], length: int, now: int
) -> None:
    """Compares the totals that the rate keeps with a sum over all stored spans, also where it has dropped old ones."""
    made = rate(spans, length)
    for at in sorted(rooms):
        made.room(at)
    shares = [
        (max(0, min(end, now) - max(start, now - length)), end - start, nbytes) for start, end, nbytes in made._spans
    ]
    busy = sum(inside for inside, _, _ in shares)
    moved = sum(nbytes * inside / whole for inside, whole, nbytes in shares)
    window = made.window(now)
    assert window["bytes"] == pytest.approx(moved, abs=1)
    assert window["gb_per_s"] == (pytest.approx(moved / busy, abs=1e-6) if busy else None)
    finished = sum(now - length < at <= now for at in made._rooms)
    assert window["rooms_per_s"] == (finished * 1e9 / length if finished else None)


class TestLatencies:
    def test_nearest_rank(self) -> None:
        latencies = Latencies()
        for value in random.Random(3).sample(range(1, 101), 100):
            latencies.add(value)
        assert latencies.summary() == {"p50_ns": 50, "p90_ns": 90, "p99_ns": 99, "count": 100}

    @given(st.lists(st.integers(0, 20)), st.integers(1, 8))
    def test_quantiles_are_those_of_the_latest(self, values: list[int], keep: int) -> None:
        latencies = Latencies(keep)
        for value in values:
            latencies.add(value)
        kept = sorted(values[-keep:])
        quantiles = {f"p{percent}_ns": nearest_rank(kept, percent / 100) for percent in (50, 90, 99)}
        assert latencies.summary() == {**quantiles, "count": len(values)}


def test_rooms_that_ended_in_the_window_are_counted_by_state() -> None:
    ends = RecentEnds(300 * SECOND)
    for at_s in range(1000):
        ends.add("Failed" if at_s % 10 == 0 else "Success", at_s * SECOND)
    assert ends.counts(999 * SECOND) == {"Success": 9 * 31, "Failed": 31}
    assert ends.counts(1305 * SECOND) == {}


def test_a_room_that_ended_before_the_latest_one_is_counted_with_it() -> None:
    ends = RecentEnds(300 * SECOND)
    ends.add("Success", 100 * SECOND)
    ends.add("Failed", 50 * SECOND)
    assert ends.counts(100 * SECOND) == {"Success": 1, "Failed": 1}


def test_the_time_of_the_latest_success_is_kept() -> None:
    ends = RecentEnds(300 * SECOND)
    for state, at_ns in (("Success", SECOND), ("Failed", 2 * SECOND), ("Success", 900 * SECOND)):
        ends.add(state, at_ns)
    assert ends.success_ns == 900 * SECOND
