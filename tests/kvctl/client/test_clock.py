"""Clock offsets: correct within their error, and no correction for noise."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvctl.client.clock import ClockOffset, estimate, more_precise, shared

DELAY = st.integers(min_value=0, max_value=10**9)


@given(st.integers(-(10**12), 10**12), DELAY, DELAY)
def test_the_true_offset_lies_within_the_bound(offset: int, there: int, back: int) -> None:
    sent = 10**15
    clock = estimate(sent, sent + there + back, sent + there + offset)
    assert abs(clock.offset_ns - offset) <= clock.error_ns


def test_an_offset_within_its_bound_corrects_nothing() -> None:
    assert estimate(1000, 3000, 2400).correction_ns == 0
    assert estimate(1000, 3000, 9000).correction_ns == 7000


def test_a_round_trip_through_a_pause_does_not_replace_a_better_measurement() -> None:
    earlier, stretched = ClockOffset(5_000_000, 100_000), ClockOffset(900_000_000, 1_000_000_000)
    kept = more_precise(stretched, earlier, 2_000_000_000)
    assert kept.offset_ns == 5_000_000
    assert kept.correction_ns == 5_000_000
    assert kept.error_ns > earlier.error_ns
    assert more_precise(earlier, stretched, 2_000_000_000) == earlier


def test_an_old_measurement_is_worth_less_with_time() -> None:
    earlier, latest = ClockOffset(5_000, 1_000), ClockOffset(7_000, 300_000)
    assert more_precise(latest, earlier, 1_000_000_000).offset_ns == 5_000
    assert more_precise(latest, earlier, 3_600_000_000_000) == latest


def test_a_clock_that_was_set_is_measured_anew() -> None:
    earlier, latest = ClockOffset(5_000, 1_000), ClockOffset(3_600_000_000_000, 300_000)
    assert more_precise(latest, earlier, 1_000_000_000) == latest


def test_agents_of_a_host_share_the_most_precise_measurement() -> None:
    rough, precise, other = ClockOffset(3_400, 500), ClockOffset(3_100, 20), ClockOffset(0, 100)
    clocks = [("n1", rough), ("n1", precise), ("n2", other), ("", rough)]
    assert shared(clocks) == [precise, precise, other, rough]


def test_measurements_that_contradict_each_other_are_not_shared() -> None:
    early, late = ClockOffset(9_000, 50), ClockOffset(3_100, 20)
    assert shared([("n1", early), ("n1", late)]) == [early, late], "one started before the clock was set"
