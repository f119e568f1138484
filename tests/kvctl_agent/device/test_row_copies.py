"""Copies on a stream, against a stand-in of the driver that runs launches in Triton's interpreter as they come."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from kvctl_agent.device import driver as binding
from kvctl_agent.device import kernels
from kvctl_agent.device.base import Batch, BlockRange, BlockRanges, PendingChecksum, Table
from kvctl_agent.device.driver import Context
from kvctl_agent.device.events import EventPool
from kvctl_agent.device.kernels import ARGUMENTS, Kernels, Program, Variant
from kvctl_agent.device.row_copies import DEFAULT, CudaRowCopies, Tuning
from kvctl_agent.errors import DeadlineExceeded, DeviceError
from kvctl_agent.memory.checksum import bytes_checksum
from tests.kvctl_agent.device.fake_driver import OK, FakeDriver
from tests.kvctl_agent.device.geometries import of_rows
from tests.kvctl_agent.device.interpreted import interpret

APPENDED = 2
SMALL = Tuning(slots=3, slot_bytes=1024)


def _read(at: int, kind: str) -> int:
    return {"i32": ctypes.c_int32, "i64": ctypes.c_int64}[kind].from_address(at).value


class Launching(FakeDriver):  # type: ignore[misc]
    """A stand-in for the driver that also runs kernels.

    Attributes:
        variants: compiled variants, in order.
        launches: grid, threads and arguments of each non-empty launch.
        uploads: stream of each upload.
    """

    def __init__(self) -> None:
        super().__init__()
        self.variants: list[Variant] = []
        self.launches: list[SimpleNamespace] = []
        self.uploads: list[int] = []

    def cuMemcpyHtoDAsync(self, target, source, nbytes, stream):
        self.uploads.append(stream)
        return super().cuMemcpyHtoDAsync(target, source, nbytes, stream)

    def compile(self, variant: Variant, capability: int) -> Program:
        self.variants.append(variant)
        return Program("copy_rows", bytes([len(self.variants) - 1]), "", 32 * variant.warps, 0, APPENDED)

    def cuModuleLoadData(self, image):
        return self._in_context(self.variants[image[0]])

    def cuModuleGetFunction(self, module, name):
        assert name == b"copy_rows"
        return self._in_context(module)

    def cuLaunchKernel(self, variant, grid, y, z, threads, ty, tz, shared, stream, parameters, extra):
        assert (y, z, ty, tz, shared, extra) == (1, 1, 1, 1, 0, 0)
        pointers = (ctypes.c_void_p * (len(ARGUMENTS) + APPENDED)).from_address(parameters)
        given = [_read(at, kind) for at, kind in zip(pointers, [*ARGUMENTS.values(), *["i64"] * APPENDED], strict=True)]
        given, appended = given[: len(ARGUMENTS)], given[len(ARGUMENTS) :]
        assert appended == [0] * APPENDED
        items = given[3]
        if items:
            self.launches.append(SimpleNamespace(grid=grid, threads=threads, items=items, at=given[0]))
            interpret(variant, min(grid, 4), given)
        return OK


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launching]:
    fake = Launching()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)
    monkeypatch.setattr(kernels, "program", fake.compile)
    binding.load.cache_clear()
    yield fake
    binding.load.cache_clear()


def make(tuning: Tuning = SMALL) -> CudaRowCopies:
    context = Context(0, "GPU 0")
    return CudaRowCopies(context, Kernels(context, 90), EventPool(context), tuning)


class Pool:
    """Blocks of pages, of which two of four heads are copied, and packed memory for them."""

    def __init__(self, width: int = 32, slots: int = 12, blocks: int = 2, rows: int = 2) -> None:
        random = np.random.default_rng(width)
        self.width, self.slots, self.blocks, self.rows = width, slots, blocks, rows
        self.pages = random.integers(0, 256, (blocks, slots, rows, 2, width), np.uint8)
        self.packed = np.zeros((blocks, slots, rows, width), np.uint8)

    def gather(self, count: int, at: int = 0) -> Batch:
        """The second half of each row of the first `count` pages listed from `at` on, packed."""
        geometry = of_rows(self.rows, self.width, 2 * self.width, self.width, True, False)
        sources = [int(block.ctypes.data) + self.width for block in self.pages]
        targets = [int(block.ctypes.data) for block in self.packed]
        rows = [(source, target, at, 0, count) for source, target in zip(sources, targets, strict=True)]
        return Batch(geometry, np.array(rows, np.int64))

    def check(self, pages: np.ndarray) -> None:
        wanted = self.pages[:, pages][:, :, :, 1]
        assert np.array_equal(self.packed[:, : len(pages)], wanted)


PAGES = np.array([7, 2, 11, 0, 5], np.int32)


@pytest.mark.parametrize("programs", [None, 2])
def test_rows_are_copied(driver: Launching, programs: int | None) -> None:
    copies, pool = make(), Pool()
    event = copies.begin([pool.gather(5)], PAGES, programs=programs)
    assert event.done()
    pool.check(PAGES)
    assert driver.calls["cuMemcpyHtoDAsync"] == 1
    copies.close()


def test_a_request_is_one_upload_one_launch_for_each_batch_and_one_event(driver: Launching) -> None:
    copies, k, v = make(), Pool(32), Pool(48)
    copies.prepare([k.gather(1).geometry, v.gather(1).geometry])
    before = driver.calls.copy()
    pages = np.concatenate((PAGES, PAGES[::-1])).astype(np.int32)
    copies.begin([k.gather(5), v.gather(5, at=5)], pages)
    made = driver.calls - before
    assert made["cuMemcpyHtoDAsync"] == 1
    assert made["cuLaunchKernel"] == 2
    assert made["cuEventRecord"] == 1
    assert not made["cuMemAlloc"]
    assert not made["cuMemHostAlloc"]
    assert not made["cuModuleLoadData"]
    assert not made["cuStreamSynchronize"]
    k.check(PAGES)
    v.check(PAGES[::-1])
    copies.close()


def test_tables_may_be_reused_at_once(driver: Launching) -> None:
    """The slot is uploaded later, not the caller's arrays."""
    copies, pool = make(), Pool()
    batch, pages = pool.gather(5), PAGES.copy()
    copies.begin([batch], pages)
    pages[:], batch.blocks[:] = -1, -1
    pool.check(PAGES)
    copies.close()


def test_launches_with_few_programs_have_more_threads(driver: Launching) -> None:
    copies, pool = make(), Pool(width=4096, rows=16, slots=4)
    copies.begin([pool.gather(2)], PAGES[:2] % 4)
    copies.begin([pool.gather(2)], PAGES[:2] % 4, programs=2)
    copies.begin([pool.gather(2)], PAGES[:2] % 4, programs=1000)
    whole, few, more_than_needed = driver.launches
    assert (whole.grid, whole.threads) == (whole.items, 32 * DEFAULT.tile.warps) == (16, 256)
    assert (few.grid, few.threads, few.items) == (2, 32 * DEFAULT.bounded.warps, 4)
    assert more_than_needed.grid == 4
    copies.close()


def test_another_moment_is_waited_for_by_the_stream(driver: Launching) -> None:
    copies, pool = make(), Pool()
    first = copies.begin([pool.gather(1)], PAGES)
    copies.begin([pool.gather(1)], PAGES, after=first)
    ((_, _, event),) = driver.waits
    assert event == first.handle
    assert not driver.calls["cuEventSynchronize"]
    copies.close()


def test_tables_are_uploaded_ahead_of_kernels_that_are_still_to_run(driver: Launching) -> None:
    copies, pool = make(), Pool()
    copies.begin([pool.gather(1)], PAGES)
    driver.patience = 1 << 30  # nothing ends any more
    copies.begin([pool.gather(1)], PAGES)
    first, ahead = driver.uploads
    assert first != ahead
    ((_, waiting, _),) = driver.waits
    assert waiting == first
    driver.patience = 0
    copies.close()


# ---- ranges of tables --------------------------------------------------------------------------------------------


def ranges(pool: Pool, *counts: int) -> BlockRanges:
    """As `pool.gather`, for parts with these page counts, packed one after the other."""
    geometry = pool.gather(1).geometry
    page_bytes = pool.rows * pool.width
    first = int(pool.pages.ctypes.data)
    paged = first + np.arange(pool.blocks, dtype=np.int64) * pool.pages[0].nbytes
    table = Table(geometry, paged, np.arange(pool.blocks, dtype=np.int64) * page_bytes)
    each, listed, packed = [], 0, int(pool.packed.ctypes.data)
    for count in counts:
        each.append(BlockRange(0, pool.blocks, pool.width, packed, count, listed))
        listed += count
        packed += count * page_bytes * pool.blocks
    return BlockRanges(table, each)


def check_strips(pool: Pool, *counts: int, pages: np.ndarray) -> None:
    """Compares the copies part by part and block by block."""
    wanted, listed = [], 0
    for count in counts:
        wanted.append(pool.pages[:, pages[listed : listed + count]][:, :, :, 1].reshape(-1))
        listed += count
    found = pool.packed.reshape(-1)[: sum(part.nbytes for part in wanted)]
    assert np.array_equal(found, np.concatenate(wanted))


@pytest.mark.parametrize("programs", [None, 2])
@pytest.mark.parametrize("counts", [(5,), (3, 2), (1, 1, 3)], ids=str)
def test_parts_are_strips_of_one_launch(driver: Launching, counts: tuple[int, ...], programs: int | None) -> None:
    copies, pool = make(), Pool(blocks=3)
    copies.begin([ranges(pool, *counts)], PAGES, programs=programs)
    check_strips(pool, *counts, pages=PAGES)
    assert len(driver.launches) == 1
    copies.close()
    assert not driver.allocated


def test_strips_may_be_of_some_blocks(driver: Launching) -> None:
    """Two parts of different layers and different numbers of them."""
    copies, pool = make(), Pool(blocks=5)
    table, (whole,) = ranges(pool, 3)
    copies.begin([BlockRanges(table, [whole._replace(lo=1, hi=2), whole._replace(lo=2, hi=5)])], PAGES)
    found = pool.packed.reshape(-1)
    page_bytes = pool.rows * pool.width
    assert not found[: 3 * page_bytes].any()
    wanted = pool.pages[1:, PAGES[:3]][:, :, :, 1].reshape(-1)
    assert np.array_equal(found[3 * page_bytes : 15 * page_bytes], wanted)
    copies.close()


def test_a_table_is_uploaded_once(driver: Launching) -> None:
    copies, pool = make(), Pool()
    same = ranges(pool, 5)
    copies.prepare([same.table.geometry])
    copies.begin([same], PAGES)
    before = driver.calls.copy()
    copies.begin([same], PAGES)
    made = driver.calls - before
    assert made["cuMemcpyHtoDAsync"] == made["cuLaunchKernel"] == made["cuEventRecord"] == 1
    assert not made["cuMemAlloc"]
    assert not made["cuModuleLoadData"]
    assert not made["cuStreamSynchronize"]
    copies.close()


def test_strips_and_batches_go_together(driver: Launching) -> None:
    copies, k, v = make(), Pool(32), Pool(48)
    copies.begin([v.gather(2), ranges(k, 5)], PAGES)
    check_strips(k, 5, pages=PAGES)
    v.check(PAGES[:2])
    copies.close()


def test_strips_whose_pages_fit_no_slot_become_several_requests(driver: Launching) -> None:
    copies, pool = make(SMALL._replace(slot_bytes=256)), Pool(slots=90, blocks=3)
    pages = np.random.default_rng(1).permutation(90).astype(np.int32)
    copies.begin([ranges(pool, 80, 10)], pages)
    assert len(driver.launches) > 1
    check_strips(pool, 80, 10, pages=pages)
    copies.close()


# ---- slots and events --------------------------------------------------------------------------------------------


def test_slots_are_taken_in_turns_and_waited_for_when_all_are_busy(driver: Launching) -> None:
    driver.patience = 1000
    copies, pool = make(), Pool()
    for _ in range(SMALL.slots):
        copies.begin([pool.gather(1)], PAGES)
    assert len({launch.at for launch in driver.launches}) == SMALL.slots
    assert not driver.calls["cuEventSynchronize"]
    copies.begin([pool.gather(1)], PAGES)
    assert driver.calls["cuEventSynchronize"] == 1
    assert driver.launches[-1].at == driver.launches[0].at
    copies.close()


def test_slots_that_were_read_are_not_waited_for(driver: Launching) -> None:
    copies, pool = make(), Pool()
    for _ in range(3 * SMALL.slots):
        copies.begin([pool.gather(1)], PAGES)
    assert not driver.calls["cuEventSynchronize"]
    copies.close()


def test_events_are_reused_but_not_while_someone_has_them(driver: Launching) -> None:
    copies, pool = make(), Pool()
    kept = copies.begin([pool.gather(1)], PAGES)
    handles = {copies.begin([pool.gather(1)], PAGES).handle for _ in range(50)}
    assert kept.handle not in handles
    assert driver.calls["cuEventCreate"] <= SMALL.slots + 2
    copies.close()
    assert kept.done()


# ---- large requests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_bytes", [128, 256])
def test_tables_that_fit_no_slot_become_several_requests(driver: Launching, slot_bytes: int) -> None:
    copies, pool = make(SMALL._replace(slot_bytes=slot_bytes)), Pool(slots=60, blocks=7)
    pages = np.random.default_rng(1).permutation(60).astype(np.int32)
    done = copies.begin([pool.gather(60)], pages)
    assert done.done()
    assert len(driver.launches) > 1
    pool.check(pages)
    copies.close()


def test_more_rows_than_the_kernel_counts_are_refused(driver: Launching) -> None:
    copies, pool = make(), Pool()
    batch = pool.gather(1)
    batch.blocks[:, 4] = 1 << 31
    with pytest.raises(DeviceError, match="too many for one launch"):
        copies.begin([batch], PAGES)
    copies.close()


# ---- checksums ---------------------------------------------------------------------------------------------------


def checksum_of(pool: Pool, pages: np.ndarray) -> int:
    """As `pool.gather`, from position 0 on."""
    return bytes_checksum(pool.pages[:, pages][:, :, :, 1].reshape(-1), 4, 0)


def settled(pending: PendingChecksum) -> int:
    deadline = time.monotonic() + 60
    while not pending.done():
        assert time.monotonic() < deadline
    return pending.value


def positions(pool: Pool, *counts: int) -> BlockRanges:
    """The ranges of parts with these page counts, each from position 0 on."""
    table, found = ranges(pool, *counts)
    return BlockRanges(table, [each._replace(packed=0) for each in found])


@pytest.mark.parametrize("slot_bytes", [SMALL.slot_bytes, 256])
def test_checksums_are_read_back_with_the_event(driver: Launching, slot_bytes: int) -> None:
    """In one request, and in several if the tables fit no slot."""
    copies, pool = make(SMALL._replace(slot_bytes=slot_bytes)), Pool(slots=90, blocks=3)
    pages = np.random.default_rng(1).permutation(90).astype(np.int32)[:70]
    pending = copies.checksum([positions(pool, 70)], pages)
    driver.patience = 2
    assert settled(pending) == checksum_of(pool, pages)
    assert (len(driver.launches) > 1) == (slot_bytes == 256)
    assert not driver.calls["cuEventSynchronize"]
    assert pending.done()
    assert not pool.packed.any()
    copies.close()


def test_a_checksum_waits_for_its_event_and_survives_later_requests(driver: Launching) -> None:
    copies, pool = make(), Pool()
    copies.prepare([pool.gather(1).geometry], checksum=True)
    driver.patience = 50
    part, before = positions(pool, 5), driver.calls.copy()
    pending = [copies.checksum([part], pages) for pages in (PAGES, PAGES[::-1])]
    made = driver.calls - before
    assert (made["cuLaunchKernel"], made["cuMemcpyDtoHAsync"]) == (2, 2)
    assert made["cuMemAlloc"] == 1  # the block table
    assert not any(each.done() for each in pending)
    driver.patience = 0
    for _ in range(2 * SMALL.slots):
        copies.begin([pool.gather(5)], PAGES)
    assert [settled(each) for each in pending] == [checksum_of(pool, PAGES), checksum_of(pool, PAGES[::-1])]
    copies.close()
    assert not driver.allocated


def test_the_cells_of_results_are_reused(driver: Launching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl_agent.device.launch_tables._CELLS", 4)
    copies, pool = make(), Pool()
    pinned = driver.calls["cuMemHostAlloc"]
    for _ in range(20):
        assert settled(copies.checksum([positions(pool, 5)], PAGES)) == checksum_of(pool, PAGES)
    assert driver.calls["cuMemHostAlloc"] == pinned + 1
    pending = [copies.checksum([positions(pool, 5)], PAGES) for _ in range(6)]
    assert driver.calls["cuMemHostAlloc"] == pinned + 2
    assert {settled(each) for each in pending} == {checksum_of(pool, PAGES)}
    copies.close()


@pytest.mark.parametrize("name", ["cuLaunchKernel", "cuMemcpyDtoHAsync", "cuEventRecord"])
def test_a_failed_checksum_leaves_nothing_under_way(driver: Launching, name: str) -> None:
    copies, pool = make(), Pool()
    driver.failing[name] = (driver.CUresult.CUDA_ERROR_LAUNCH_FAILED,)
    with pytest.raises(DeviceError, match="LAUNCH_FAILED"):
        copies.checksum([positions(pool, 5)], PAGES)
    del driver.failing[name]
    pinned = driver.calls["cuMemHostAlloc"]
    assert settled(copies.checksum([positions(pool, 5)], PAGES)) == checksum_of(pool, PAGES)
    assert driver.calls["cuMemHostAlloc"] == pinned
    copies.close()
    with pytest.raises(DeviceError, match="closed"):
        copies.checksum([positions(pool, 5)], PAGES)


# ---- addresses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
@pytest.mark.parametrize("side", [0, 1])
def test_each_alignment_has_its_own_variant(driver: Launching, shift: int, side: int) -> None:
    copies = make()
    rows = np.zeros((2, 1024), np.uint8)
    rows[0] = np.arange(1024) % 251
    at = [int(row.ctypes.data) + -int(row.ctypes.data) % 64 for row in rows]
    at[side] += shift
    geometry = of_rows(1, 64, 64, 64, True, False)
    copies.begin([Batch(geometry, np.array([[*at, 0, 0, 4]]))], np.arange(4, dtype=np.int32))
    assert driver.variants[-1].align == shift
    assert ctypes.string_at(at[0], 256) == ctypes.string_at(at[1], 256)
    copies.close()


# ---- errors and ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuMemcpyHtoDAsync", "cuLaunchKernel", "cuEventRecord"])
def test_a_failed_request_leaves_nothing_under_way(driver: Launching, name: str) -> None:
    copies, pool = make(), Pool()
    driver.failing[name] = (driver.CUresult.CUDA_ERROR_LAUNCH_FAILED,)
    with pytest.raises(DeviceError, match="LAUNCH_FAILED"):
        copies.begin([pool.gather(5)], PAGES)
    assert driver.calls["cuStreamSynchronize"] == 2
    del driver.failing[name]
    copies.begin([pool.gather(5)], PAGES)
    pool.check(PAGES)
    copies.close()


def test_closing_does_not_wait_for_ever(driver: Launching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl_agent.device.row_copies._END_S", 0.05)
    copies, pool = make(), Pool()
    driver.patience = 1 << 30
    copies.begin([pool.gather(5)], PAGES)
    with pytest.raises(DeadlineExceeded, match=r"a copy on the GPU has not ended within 0\.05 s"):
        copies.close()
    assert driver.allocated  # the kernel may still read its tables
    assert not driver.calls["cuMemFreeHost"]
    copies.close()


def test_closing_waits_and_gives_all_back(driver: Launching) -> None:
    copies, pool = make(), Pool()
    copies.begin([pool.gather(5)], PAGES)
    copies.close()
    copies.close()
    assert driver.calls["cuStreamSynchronize"] == driver.calls["cuStreamDestroy"] == 2
    assert driver.calls["cuMemFreeHost"] == 1
    assert not driver.allocated
    with pytest.raises(DeviceError, match="closed"):
        copies.begin([pool.gather(5)], PAGES)


@pytest.mark.parametrize("name", ["cuMemAlloc", "cuCtxGetStreamPriorityRange"])
def test_what_cannot_be_made_leaves_nothing(driver: Launching, name: str) -> None:
    driver.failing[name] = (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        make()
    assert driver.calls["cuMemFreeHost"] == 1
    assert not driver.allocated


def test_what_is_prepared_is_compiled_once_for_all_streams(driver: Launching) -> None:
    context = Context(0, "GPU 0")
    loaded, events = Kernels(context, 90), EventPool(context)
    pool = Pool()
    for _ in range(2):
        copies = CudaRowCopies(context, loaded, events, SMALL)
        copies.prepare([pool.gather(1).geometry])
        copies.close()
    assert len(driver.variants) == 2
    assert driver.calls["cuStreamSynchronize"] == 6
