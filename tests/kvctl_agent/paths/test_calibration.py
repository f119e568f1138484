"""Measured costs of copies on a device, on the stand-in for one, and the memcpy rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvctl_agent.errors import DeadlineExceeded, DeviceError
from kvctl_agent.memory.allocations import HugePageMemory
from kvctl_agent.memory.region import Region
from kvctl_agent.paths import calibration
from kvctl_agent.paths.calibration import measure_device_copies, measure_direct, memcpy_gb_per_s
from tests.support.host_device import HostDevice

POISON = 0xDB


@pytest.fixture
def memory() -> Iterator[tuple[HugePageMemory, HugePageMemory]]:
    with HugePageMemory(8 << 20) as source, HugePageMemory(40 << 20) as target:
        target.array[:] = POISON
        yield source, target


def region(slab: HugePageMemory, nbytes: int | None = None) -> Region:
    return Region(slab.addr, slab.array.nbytes if nbytes is None else nbytes)


def test_gathers_are_measured_by_row_and_stay_inside(memory: tuple[HugePageMemory, HugePageMemory]) -> None:
    source, target = memory
    device, room = HostDevice(), 17 << 20
    cost = measure_device_copies(device.copies(), region(source), region(target, room))
    assert list(cost.row_bytes) == sorted(cost.row_bytes)
    assert all(us > 0 for us in cost.gather_us_per_mib)
    assert cost.gather_us_per_mib == cost.scatter_us_per_mib
    assert bool((target.array[room:] == POISON).all())
    used = {batch.geometry for begun in device.begun for batch in begun.batches}
    assert {geometry.width for geometry in used} == set(cost.row_bytes)
    assert set(device.prepared) == used
    assert all(geometry.src is not None and geometry.dst is None for geometry in used)


def test_rows_that_do_not_fit_are_left_out(memory: tuple[HugePageMemory, HugePageMemory]) -> None:
    source, target = memory
    cost = measure_device_copies(HostDevice().copies(), region(source), region(target, 1 << 20))
    assert cost.row_bytes == (256, 1024)
    with pytest.raises(DeviceError, match="too little to measure copies with"):
        measure_device_copies(HostDevice().copies(), region(source), region(target, 4096))
    with pytest.raises(DeviceError, match="too little to measure copies with"):
        measure_device_copies(HostDevice().copies(), region(source, 4096), region(target))


def test_direct_is_measured_at_two_sizes_with_its_share_of_the_device(
    memory: tuple[HugePageMemory, HugePageMemory],
) -> None:
    source, target = memory
    device, room = HostDevice(), 33 << 20
    cost = measure_direct(device.copies(), region(source), region(target, room), 12)
    assert cost.us_per_part >= 1
    assert cost.us_per_mib >= 0
    assert bool((target.array[room:] == POISON).all())
    assert {begun.programs for begun in device.begun} == {12}
    sizes = {sum(int(batch.blocks[:, 4].sum()) for batch in begun.batches) for begun in device.begun}
    assert len(sizes) == 2
    for begun in device.begun:
        count = len(begun.pages) // 2
        assert sorted(begun.pages[count:].tolist()) == list(range(count)), "no page is written twice"


def test_too_little_scratch_is_no_measurement(memory: tuple[HugePageMemory, HugePageMemory]) -> None:
    source, target = memory
    for room in (4096, 2 << 20):
        with pytest.raises(DeviceError, match="too little to measure the direct path with"):
            measure_direct(HostDevice().copies(), region(source), region(target, room), 1)


def test_both_follow_from_the_times_that_were_taken(
    memory: tuple[HugePageMemory, HugePageMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def took(copies: Any, batch: Any, pages: Any, nbytes: int, programs: Any) -> float:
        return 20 + 3 * nbytes / (1 << 20)

    monkeypatch.setattr(calibration, "_copy_us", took)
    source, target = memory
    direct = measure_direct(HostDevice().copies(), region(source), region(target), 1)
    assert np.allclose([direct.us_per_part, direct.us_per_mib], [20, 3])
    assert direct.us(8 << 20) == pytest.approx(44)


@pytest.mark.parametrize("rounds", [(1, 1, 1, 9, 9, 9), (9, 9, 9, 1, 1, 1)], ids=["load later", "load first"])
def test_other_load_does_not_make_bytes_free(
    memory: tuple[HugePageMemory, HugePageMemory], monkeypatch: pytest.MonkeyPatch, rounds: tuple[int, ...]
) -> None:
    slower = iter([factor for factor in rounds for _ in range(2)])

    def took(copies: Any, batch: Any, pages: Any, nbytes: int, programs: Any) -> float:
        return next(slower) * (20 + 3 * nbytes / (1 << 20))

    monkeypatch.setattr(calibration, "_copy_us", took)
    source, target = memory
    direct = measure_direct(HostDevice().copies(), region(source), region(target), 1)
    assert np.allclose([direct.us_per_part, direct.us_per_mib], [20, 3])


def test_small_copies_that_took_longer_than_large_ones_leave_a_cost_of_bytes(
    memory: tuple[HugePageMemory, HugePageMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_copy_us", lambda *_: 240.0)
    source, target = memory
    direct = measure_direct(HostDevice().copies(), region(source), region(target), 1)
    assert direct.us_per_mib == pytest.approx(2)
    assert direct.us(1 << 20) == pytest.approx(240)


def test_a_copy_that_does_not_end_is_given_up(
    memory: tuple[HugePageMemory, HugePageMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_WAIT_S", 0.01)
    source, target = memory
    copies = HostDevice(slow=1 << 60).copies()
    with pytest.raises(DeadlineExceeded, match=r"a copy of \d+ bytes had not ended"):
        measure_direct(copies, region(source), region(target), 1)
    copies.close()


def test_the_memcpy_rate_is_plausible() -> None:
    assert 0.1 < memcpy_gb_per_s(nbytes=4 << 20, seconds=0.01) < 1000
