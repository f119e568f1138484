"""The ring: allocation, rounds, retirement, the watermark, and the gate of a writer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.protocol.ring import ALIGNMENT, Position, Region, Ring, RingGate, may_write

UNIT = ALIGNMENT


def ring(units: int) -> Ring:
    return Ring(units * UNIT)


def open_now(ring: Ring, region: Region) -> bool:
    return may_write(region.round, region.end, ring.watermark)


def test_a_request_that_fits_is_granted_even_when_all_bytes_are_in_use() -> None:
    log = ring(2)
    for _ in range(10):
        log.allocate(2 * UNIT)
    assert log.used_bytes == 20 * UNIT
    assert log.high_water_bytes == log.size_bytes


def test_a_region_that_does_not_fit_before_the_end_starts_the_next_round() -> None:
    log = ring(3)
    log.allocate(2 * UNIT)
    assert log.allocate(2 * UNIT)[1:] == (0, 2 * UNIT, 1)


def test_sizes_are_aligned_up() -> None:
    log = ring(4)
    assert log.allocate(1).end == UNIT
    assert log.allocate(UNIT + 1).end == 3 * UNIT


@pytest.mark.parametrize("nbytes", [0, -1, 3 * UNIT + 1, 1 << 70])
def test_what_can_never_fit_is_refused(nbytes: int) -> None:
    log = ring(3)
    assert not log.fits(nbytes)
    with pytest.raises(LocalProtocolError, match=f"{nbytes} bytes cannot fit a staging ring of {3 * UNIT} bytes"):
        log.allocate(nbytes)
    assert log.watermark == Position(0, 0)


def test_a_ring_of_no_bytes_fits_nothing() -> None:
    assert not Ring(0).fits(1)


def test_a_region_of_the_next_round_opens_when_the_tail_has_passed_its_end() -> None:
    assert not may_write(1, 2 * UNIT, Position(0, UNIT))
    assert may_write(1, 2 * UNIT, Position(0, 2 * UNIT))
    assert may_write(1, 2 * UNIT, Position(1, 0))
    assert not may_write(2, UNIT, Position(0, 2 * UNIT))


def test_freeing_twice_changes_nothing() -> None:
    log = ring(3)
    region = log.allocate(UNIT)
    log.allocate(UNIT)
    assert log.free(region.serial)
    before = (log.watermark, log.used_bytes, log.sequence)
    assert not log.free(region.serial)
    assert not log.free(999)
    assert (log.watermark, log.used_bytes, log.sequence) == before


ASIDE = 9
steps = st.lists(st.one_of(st.integers(1, 4), st.integers(-6, -1), st.just(ASIDE)), max_size=60)


@given(units=st.integers(1, 5), script=steps)
def test_no_two_writers_that_obey_the_watermark_meet(units: int, script: list[int]) -> None:
    """A positive step asks for so many units, a negative one frees one of the regions, `ASIDE` sets the oldest aside
    when its overlapping have given theirs back; any open one may write, one set aside at any time."""
    log = ring(units)
    live: list[Region] = []
    begun: set[int] = set()
    for step in script:
        if step == ASIDE:
            if (oldest := log.oldest) is not None:
                for serial in log.overlapping(oldest.serial):
                    assert serial not in begun, "an heir waits behind whom it inherits from"
                    live = [region for region in live if region.serial != serial]
                    log.free(serial)
                assert log.retire(oldest.serial)
        elif step > 0:
            if log.fits(step * UNIT):
                live.append(log.allocate(step * UNIT))
        elif live:
            region = live.pop(-step % len(live))
            begun.discard(region.serial)
            log.free(region.serial)
        begun.update(region.serial for region in live if open_now(log, region))
        writers = [region for region in live if region.serial in begun]
        for place, one in enumerate(writers):
            for other in writers[:place]:
                assert one.end <= other.offset or other.end <= one.offset, (one, other)
        if log.oldest is not None:
            assert open_now(log, log.oldest), "the oldest is always open, so there is always progress"
        assert log.used_bytes == sum(region.end - region.offset for region in live)


@given(units=st.integers(1, 5), sizes=st.lists(st.integers(1, 5), max_size=30))
def test_regions_open_in_the_order_in_which_they_were_given(units: int, sizes: list[int]) -> None:
    log = ring(units)
    live = [log.allocate(size * UNIT) for size in sizes if size <= units]
    while live:
        opened = [open_now(log, region) for region in live]
        assert opened == sorted(opened, reverse=True)
        log.free(live.pop(0).serial)


class TestSetAside:
    def test_the_watermark_passes_it_and_new_allocations_skip_it(self) -> None:
        log = ring(4)
        silent, other = log.allocate(UNIT), log.allocate(3 * UNIT)
        assert log.retire(silent.serial)
        assert log.watermark == Position(0, UNIT)
        log.free(other.serial)
        assert [log.allocate(UNIT).offset // UNIT for _ in range(4)] == [1, 2, 3, 1]
        assert log.used_bytes == 5 * UNIT

    def test_its_bytes_are_used_again_once_it_is_freed(self) -> None:
        log = ring(2)
        silent = log.allocate(UNIT)
        log.retire(silent.serial)
        assert not log.free(silent.serial), "the watermark had passed it"
        assert log.used_bytes == 0
        assert log.fits(2 * UNIT)
        assert log.allocate(2 * UNIT).offset == 0

    def test_whoever_was_given_its_bytes_in_a_later_round_is_its_heir(self) -> None:
        log = ring(4)
        first, second, heir, distant = (log.allocate(2 * UNIT) for _ in range(4))
        assert log.overlapping(first.serial) == [heir.serial]
        assert log.overlapping(second.serial) == [distant.serial]
        log.exclude(first.serial)
        log.free(heir.serial)
        assert log.overlapping(first.serial) == []
        assert log.allocate(2 * UNIT).offset == 2 * UNIT, "it is avoided before it is set aside, too"

    def test_what_fits_between_no_two_avoided_regions_is_refused(self) -> None:
        log = ring(5)
        regions = [log.allocate(UNIT) for _ in range(5)]
        for place in (1, 3):
            log.exclude(regions[place].serial)
        assert log.largest_bytes == UNIT
        assert not log.fits(2 * UNIT)
        log.free(regions[3].serial)
        assert log.largest_bytes == 3 * UNIT

    def test_setting_the_last_one_aside_starts_a_new_round(self) -> None:
        log = ring(2)
        log.retire(log.allocate(UNIT).serial)
        assert log.watermark == Position(1, 0)
        assert open_now(log, log.allocate(UNIT)), "an empty ring gates nobody"


def test_a_new_gate_opens_round_0_only() -> None:
    gate = RingGate()
    assert gate.open(0, 1000)
    assert not gate.open(1, 1)


def test_a_watermark_opens_the_regions_it_has_passed() -> None:
    gate = RingGate()
    assert gate.hear([0, 512, 1], 5)
    assert gate.open(1, 512)
    assert not gate.open(1, 513)
    assert gate.heard_ns == 5


@pytest.mark.parametrize(
    "watermark", [[2, 512, 6], [3, 0, 7], [2, 512, 7], [], [1], [1, 2], [1, 2, 3, 4], [4, 512, 8, 9]]
)
def test_old_and_malformed_news_change_nothing(watermark: list[int]) -> None:
    gate = RingGate()
    gate.hear([3, 0, 7], 0)
    assert not gate.hear(watermark, 1)
    assert (gate.position, gate.sequence, gate.heard_ns) == ((3, 0), 7, 0)
