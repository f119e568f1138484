"""Formatting and parsing of numbers with units."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.render import units
from kvctl.render.view import Kind


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 s"),
        (812, "812 ns"),
        (12_345, "12.3 µs"),
        (999_999, "1 ms"),
        (1_240_000, "1.24 ms"),
        (12_300_000_000, "12.3 s"),
        (59_999_999_999, "1m00s"),
        (123_000_000_000, "2m03s"),
        (7_500_000_000_000, "2h05m"),
        (300_000_000_000_000, "3d11h"),
        (-1500, "-1.5 µs"),
    ],
)
def test_durations(value: int | None, text: str) -> None:
    assert units.duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64 MiB"),
        ((1 << 20) - 1, "1 MiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_sizes(value: int | None, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("text", "ns"),
    [("5s", 5e9), ("200ms", 2e8), ("1.5us", 1500), ("2µs", 2000), ("1h30m", 5.4e12), ("7ns", 7), ("1d", 8.64e13)],
)
def test_durations_are_read(text: str, ns: float) -> None:
    assert units.parse_duration(text) == ns


@pytest.mark.parametrize("text", ["", "5", "s", "5 parsecs", "5s!", "-5s", "5ss"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"), [("512B", 512), ("64MiB", 64 << 20), ("1GB", 10**9), ("1.5kb", 1500), ("2 GiB", 2 << 30)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "64", "MiB", "64XB", "1e9B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        units.parse_size(text)


@given(st.integers(min_value=1, max_value=60 * 10**9 - 10**8))
def test_a_printed_duration_reads_back_to_three_digits(ns: int) -> None:
    again = units.parse_duration(units.duration(ns).replace(" ", ""))
    assert math.isclose(again, ns, rel_tol=6e-3)


@given(st.integers(min_value=0, max_value=1 << 62))
def test_durations_and_sizes_stay_short(value: int) -> None:
    assert len(units.duration(value)) <= 11
    assert len(units.size(min(value, 999 << 40))) <= 8


def test_little_is_not_nothing() -> None:
    assert [units.three_digits(value) for value in (0.0, 0.0004, 0.0049, 0.005, 0.72)] == [
        "0",
        "0.0004",
        "0.0049",
        "0.01",
        "0.72",
    ]
    assert [Kind.RATE.value.human(value) for value in (0.0, 0.004, 0.02)] == ["0.00", "<0.01", "0.02"]
