"""Measures copies on this machine: the memcpy rate, and the cost of row copies for the path cost model.

Row copies are measured in host memory, on a device, and to a peer's device. Host copies take a few milliseconds to
measure. Copies on a device resemble those of a part: rows cover half of the pool's row, as in a head slice, pages are
random, and the kernel's event is polled until it is done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

from kvctl_agent.device.base import Batch, Geometry, PageStrides, RowCopies
from kvctl_agent.errors import DeadlineExceeded, DeviceError
from kvctl_agent.memory.allocations import Bytes, HugePageMemory
from kvctl_agent.memory.host_copier import copy_rows
from kvctl_agent.memory.region import Region
from kvctl_agent.paths.connection_model import CopyCost, DirectCost

_ROWS = (256, 512, 1024, 2048, 8192, 32768)
_PIECE = 1 << 20  # one MiB, so that a measured time is the time per MiB
_ROUNDS = 6
_DEVICE_ROWS = (256, 1024, 4096)
_DIRECT_ROW = 512
_PAGE_ROWS = 16
_BLOCKS = 32  # number of blocks, like the planes of a part's layers
_SMALL, _BIG = 1 << 20, 16 << 20
# Of the time of a large copy, the least that its bytes take: where ranks share a GPU, the switch takes the most.
_LEAST_SHARE = 1 / 8
_WAIT_S = 5.0
_MIN_COPIES = 3


def memcpy_gb_per_s(nbytes: int = 128 << 20, seconds: float = 0.5) -> float:
    """Returns the memcpy rate of one thread in GB/s (1e9 bytes per second), the median of copies made over `seconds`.

    Source and target are in huge pages, which are faulted in before the measurement.

    Args:
        nbytes: Bytes of a copy. It must exceed the last-level cache, or the rate of the cache is measured.
        seconds: Duration of the measurement; at least three copies are made.
    """
    rates: list[float] = []
    with HugePageMemory(nbytes) as source, HugePageMemory(nbytes) as target:
        deadline = time.perf_counter() + seconds
        while len(rates) < _MIN_COPIES or time.perf_counter() < deadline:
            start = time.perf_counter_ns()
            np.copyto(target.array, source.array)
            rates.append(nbytes / (time.perf_counter_ns() - start))
    return median(rates)


def memcpy_gb_per_s_within(memory: Bytes) -> float:
    """Returns the memcpy rate of one thread in GB/s from one half of `memory` to the other, the best of three copies.

    The measurement takes a few milliseconds.

    Args:
        memory: uint8 array, faulted in before; its second half is overwritten. It must exceed the caches, or their rate
            is measured.
    """
    source, target = np.array_split(memory[: len(memory) // 2 * 2], 2)
    durations_ns: list[int] = []
    for _ in range(_MIN_COPIES):
        start = time.perf_counter_ns()
        np.copyto(target, source)
        durations_ns.append(time.perf_counter_ns() - start)
    return source.nbytes / max(1, min(durations_ns))


def measure_copies(memory: Bytes) -> CopyCost:
    """Measures the cost of gathering random rows into a piece that stays in cache, and of scattering from it.

    The copier of the parts does it. Each row size is measured once per
    round; the result is the fastest round.

    Args:
        memory: uint8 array, faulted in before and overwritten here. It must be larger than the caches, so that its rows
            are as cold as those of a pool.
    """
    random = np.random.default_rng(0)
    hot, cold = memory[:_PIECE], memory[_PIECE:]
    gather = [float("inf")] * len(_ROWS)
    scatter = [float("inf")] * len(_ROWS)
    for _ in range(_ROUNDS):
        for index, row_bytes in enumerate(_ROWS):
            # The scatter uses other rows than the gather, because the rows just read are in cache.
            sources, targets = random.integers(len(cold) // row_bytes, size=(2, _PIECE // row_bytes))
            since = time.perf_counter()
            copy_rows(True, cold, row_bytes, sources, hot)
            between = time.perf_counter()
            copy_rows(False, cold, row_bytes, targets, hot)
            gather[index] = min(gather[index], between - since)
            scatter[index] = min(scatter[index], time.perf_counter() - between)
    return CopyCost(_ROWS, tuple(seconds * 1e6 for seconds in gather), tuple(seconds * 1e6 for seconds in scatter))


def measure_device_copies(copies: RowCopies, source: Region, target: Region) -> CopyCost:
    """Measures gathers on a device. Scatters, which copy the same rows in reverse, are assumed to cost the same.

    Args:
        copies: The stream to measure with.
        source: Region to read: the pool, or other memory that is not in cache.
        target: Region of the same device; overwritten.

    Raises:
        DeviceError: a region is too small, or a copy failed.
        DeadlineExceeded: a copy did not end.
    """
    rates: dict[int, float] = {}
    for row in _DEVICE_ROWS:
        geometry = Geometry(_PAGE_ROWS, 1, row, _wide_rows(row), None)
        nbytes = _usable(geometry, source, target, _BIG)
        if nbytes:
            copies.prepare([geometry])
            # Includes the launch, although the fixed cost of staging also contains it.
            rates[row] = _best_us(copies, geometry, source, target, [nbytes], None)[0] / nbytes * (1 << 20)
    if not rates:
        raise DeviceError(f"{source.nbytes} and {target.nbytes} bytes are too little to measure copies with")
    return CopyCost(tuple(rates), tuple(rates.values()), tuple(rates.values()))


def measure_direct(copies: RowCopies, source: Region, target: Region, programs: int) -> DirectCost:
    """Measures the cost of parts on path direct.

    Ranks that start together measure at the same time, and slow each other's copies by more than the two sizes differ:
    without a bound, and with all small copies first, the large ones looked free.

    Args:
        copies: The stream to measure with.
        source: Region to read: the pool, or other memory that is not in cache.
        target: A peer's scratch memory, mapped into the local address space; overwritten.
        programs: Maximum number of thread blocks, as for `RowCopies.begin`.

    Raises:
        DeviceError: a region is too small, or a copy failed.
        DeadlineExceeded: a copy did not end.
    """
    paged = _wide_rows(_DIRECT_ROW)
    geometry = Geometry(_PAGE_ROWS, 1, _DIRECT_ROW, paged, paged)
    small, big = (_usable(geometry, source, target, nbytes) for nbytes in (_SMALL, _BIG))
    if not small < big:
        raise DeviceError(f"{source.nbytes} and {target.nbytes} bytes are too little to measure the direct path with")
    copies.prepare([geometry])
    small_us, big_us = _best_us(copies, geometry, source, target, [small, big], programs)
    us_per_mib = max(big_us - small_us, big_us * _LEAST_SHARE) / (big - small) * (1 << 20)
    return DirectCost(max(1.0, small_us - us_per_mib * small / (1 << 20)), us_per_mib)


def _usable(geometry: Geometry, source: Region, target: Region, nbytes: int) -> int:
    """Returns the bytes of the largest payload up to `nbytes` that fits both regions; 0 if none does.

    A payload has the same number of whole pages in each block.
    """
    source_page, target_page = _page_bytes(geometry)
    if source.nbytes < source_page:
        return 0
    pages = min(nbytes // geometry.page_bytes, target.nbytes // target_page)
    return pages // _BLOCKS * _BLOCKS * geometry.page_bytes


def _page_bytes(geometry: Geometry) -> tuple[int, int]:
    """Returns the bytes of memory that a page takes up at the source and at the destination."""
    src, dst = (geometry.page_bytes if side is None else side.page for side in (geometry.src, geometry.dst))
    return src, dst


def _wide_rows(row: int) -> PageStrides:
    """Returns the strides of rows of which `row` bytes, half of each, are copied."""
    return PageStrides(_PAGE_ROWS * 2 * row, 2 * row, row)


def _best_us(
    copies: RowCopies, geometry: Geometry, source: Region, target: Region, sizes: Sequence[int], programs: int | None
) -> list[float]:
    """Returns the time of the fastest copy of each size in bytes, in µs.

    The sizes take turns, so that other load affects all alike.
    """
    random = np.random.default_rng(0)
    blocks = [_blocks(geometry, source, target, nbytes) for nbytes in sizes]
    source_pages = source.nbytes // _page_bytes(geometry)[0]
    best = [float("inf")] * len(sizes)
    for _ in range(_ROUNDS):
        for index, nbytes in enumerate(sizes):
            count = nbytes // geometry.page_bytes
            sources = random.integers(source_pages, size=count, dtype=np.int32)
            targets = random.permutation(np.arange(count, dtype=np.int32))
            pages = np.concatenate((sources, targets))
            took_us = _copy_us(copies, Batch(geometry, blocks[index]), pages, nbytes, programs)
            best[index] = min(best[index], took_us)
    return best


def _blocks(geometry: Geometry, source: Region, target: Region, nbytes: int) -> npt.NDArray[np.int64]:
    """Returns the blocks of a copy, as `Batch` has them: each has an equal share of the pages."""
    page = geometry.page_bytes
    count = nbytes // page
    blocks = np.empty((_BLOCKS, 5), np.int64)
    first = np.arange(_BLOCKS, dtype=np.int64) * (count // _BLOCKS)
    blocks[:, 0] = source.addr
    blocks[:, 1] = target.addr + (first * page if geometry.dst is None else 0)
    blocks[:, 2], blocks[:, 3], blocks[:, 4] = first, count + first, count // _BLOCKS
    return blocks


def _copy_us(copies: RowCopies, batch: Batch, pages: npt.NDArray[np.int32], nbytes: int, programs: int | None) -> float:
    """Returns the time of one copy of `nbytes` bytes, in µs."""
    since = time.perf_counter()
    event = copies.begin([batch], pages, programs=programs)
    while not event.done():
        if time.perf_counter() - since > _WAIT_S:
            raise DeadlineExceeded(f"a copy of {nbytes} bytes had not ended after {_WAIT_S:g} s")
    return (time.perf_counter() - since) * 1e6
