"""The clock offset: right within its bound, and never a correction out of noise."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvctl.client.clock import estimate

DELAY = st.integers(min_value=0, max_value=10**9)


@given(st.integers(-(10**12), 10**12), DELAY, DELAY)
def test_the_true_offset_lies_within_the_bound(offset: int, there: int, back: int) -> None:
    sent = 10**15
    clock = estimate(sent, sent + there + back, sent + there + offset)
    assert abs(clock.offset_ns - offset) <= clock.error_ns


def test_an_offset_within_its_bound_corrects_nothing() -> None:
    assert estimate(1000, 3000, 2400).correction_ns == 0
    assert estimate(1000, 3000, 9000).correction_ns == 7000
