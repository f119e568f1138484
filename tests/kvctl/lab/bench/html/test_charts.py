"""Scales contain all values, and their ticks are round; formatting of numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.lab.bench.html import charts
from kvctl.lab.bench.html.markup import fitted, number, significant, text_width, times

positive = st.floats(min_value=1e-6, max_value=1e9)


class TestFromZero:
    def test_it_ends_at_a_tick_above_what_it_holds(self) -> None:
        axis = charts.from_zero(16.4, "GB/s", significant)
        assert (axis.lo, axis.hi) == (0, 20)
        assert axis.labels == ("0", "5", "10", "15", "20")

    def test_bytes_get_powers_of_two(self) -> None:
        assert charts.from_zero(64, "MiB", significant, binary=True).labels == ("0", "16", "32", "48", "64")

    @given(positive)
    def test_what_it_holds_fills_at_least_half(self, most: float) -> None:
        axis = charts.from_zero(most, "", significant)
        assert 0.5 <= axis.position(most) <= 1
        assert 2 <= len(axis.ticks) <= 7

    def test_nothing_at_all_still_has_an_axis(self) -> None:
        assert charts.from_zero(0, "", significant).hi == 1


class TestLogarithmic:
    def test_equal_factors_are_equal_distances(self) -> None:
        axis = charts.logarithmic([1, 1000], "", significant)
        steps = [axis.position(10 * tick) - axis.position(tick) for tick in (1, 10, 100)]
        assert steps == pytest.approx([1 / 3] * 3)

    def test_it_spans_from_a_1_2_5_below_to_one_above(self) -> None:
        axis = charts.logarithmic([0.34, 16.4], "", significant)
        assert (axis.lo, axis.hi) == (0.2, 20)
        assert axis.labels == ("0.2", "0.5", "1", "2", "5", "10", "20")

    def test_many_decades_get_a_tick_each_and_one_at_either_end(self) -> None:
        assert charts.logarithmic([30, 8e4], "", significant).labels == ("20", "100", "1,000", "10,000", "100,000")

    @given(st.lists(positive, min_size=1, max_size=9))
    def test_it_holds_its_values(self, values: list[float]) -> None:
        axis = charts.logarithmic(values, "", significant)
        assert axis.lo <= min(values) * 1.001
        assert axis.hi >= max(values) * 0.999
        assert len(axis.ticks) >= 2


class TestStops:
    def test_ticks_are_what_was_measured(self) -> None:
        axis = charts.stops([4, 1, 2, 1], "", significant)
        assert axis.ticks == (1, 2, 4)
        assert axis.position(2) == pytest.approx(0.5)


class TestSpanning:
    def test_nothing_lies_outside(self) -> None:
        axis = charts.spanning(-24, 4.2, "", significant)
        assert axis.ticks == (-20, -10, 0)
        assert (axis.position(-24), axis.position(4.2)) == (0, 1)

    def test_an_instant_has_an_axis_too(self) -> None:
        assert math.isfinite(charts.spanning(0, 0, "", significant).position(0))


class TestNumbers:
    @pytest.mark.parametrize(
        ("value", "text"),
        [(None, "-"), (0, "0"), (0.0042, "0.0042"), (0.343, "0.34"), (12.34, "12.3"), (1234, "1,234")],
    )
    def test_three_digits_that_mean_something(self, value: float | None, text: str) -> None:
        assert significant(value) == text

    def test_factors(self) -> None:
        assert [times(5.21), times(182.4)] == ["5.2 \N{MULTIPLICATION SIGN}", "182 \N{MULTIPLICATION SIGN}"]

    @pytest.mark.parametrize("value", [None, "3", True, math.nan, math.inf, [1]])
    def test_what_is_no_number_is_unknown(self, value: object) -> None:
        assert number(value) is None

    def test_a_text_that_does_not_fit_is_cut_where_it_says_so(self) -> None:
        assert fitted("decode-0", 400) == "decode-0"
        cut = fitted("a-very-long-agent-name", 60)
        assert cut.endswith("…")
        assert text_width(cut) <= 60
