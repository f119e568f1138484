"""The kernel and numpy agree: parts of every dtype, head slice, page size and kind of attention, there and back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvctl_agent.device.base import Batch, BlockRanges, Device, PageIds, PendingChecksum
from kvctl_agent.device.cuda import open_device
from kvctl_agent.device.row_copies import DEFAULT
from kvctl_agent.errors import DeviceUnavailable
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import Plane, Segment
from kvctl_agent.memory.allocations import RingMemory
from kvctl_agent.memory.checksum import DeviceChecksums, HostChecksums
from kvctl_agent.memory.copier import LandedPart, PendingCopy
from kvctl_agent.memory.device_copier import DeviceCopier
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.pool_layouts import POOL_LAYOUTS
from kvctl_agent.memory.region import Region
from kvctl_agent.memory.segment import RowIndex
from tests.kvctl_agent.device.interpreted import launch
from tests.support.numpy_copier import NumpyCopier

DTYPES = {"fp8": 1, "bf16": 2, "fp32": 4}  # of copies, their sizes alone
LAYERS, SLOTS = 2, 6
PAGE_SIZES = (1, 16, 64)
DEADLINE_S = 60.0
PAGES = np.array([4, 0, 1, 5, 3])

# (heads, head, count, elements of K, of V); no V is a latent.
MODELS = {
    "all heads": (4, 0, 4, 16, 16),
    "two of eight heads": (8, 6, 2, 16, 16),
    "three of five": (5, 1, 3, 10, 10),
    "K wider than V": (4, 1, 2, 24, 16),
    "latent": (1, 0, 1, 576, 0),
}


@pytest.fixture
def no_leaks() -> None:
    """The driver opens descriptors as it needs them, and keeps them."""


class Sum(NamedTuple):
    """A checksum that is known."""

    value: int

    def done(self) -> bool:
        return True


class Interpreted:
    """Row copies that are complete immediately."""

    def checksum(self, batches: Sequence[Batch | BlockRanges], pages: PageIds) -> Sum:
        total = np.zeros(1, np.uint32)
        for batch in batches:
            launch(batch, pages, DEFAULT.bounded, 1, total)
        return Sum(int(total[0]))

    def begin(self, batches: Sequence[Batch | BlockRanges], pages: PageIds, **_: Any) -> SimpleNamespace:
        for batch in batches:
            # Wide enough that the interpreter takes a block in one go.
            launch(batch, pages, DEFAULT.bounded, programs=1)
        return SimpleNamespace(done=lambda: True)


@contextmanager
def filled(
    model: str, page_size: int, dtype: str, seed: int, device: Device | None = None, layout: str = "nhd"
) -> Iterator[tuple[KVPool, list[Region]]]:
    """A pool with a segment of random bytes, and its memory."""
    heads, *_, k, v = MODELS[model]
    planes = tuple(Plane(name, page_size, size * DTYPES[dtype]) for name, size in (("k", k), ("v", v)) if size)
    held = LocalShard(Segment(0, "kv", 0, LAYERS, heads, planes), 0, LAYERS, 0, heads)
    pool = KVPool.allocate((held,), page_size, SLOTS, device=device, layout=layout)
    blocks = pool.regions()
    random = np.random.default_rng(seed)
    for block in blocks:
        write(block, random.integers(0, 256, block.nbytes, np.uint8), device)
    yield pool, blocks
    pool.close()


def write(block: Region, data: np.ndarray, device: Device | None) -> None:
    if device is None:
        block.array()[:] = data
    else:
        device.upload(block.addr, data)


def read(addr: int, nbytes: int, device: Device | None) -> np.ndarray:
    if device is None:
        return Region(addr, nbytes).array().copy()
    out = np.empty(nbytes, np.uint8)
    device.download(addr, out)
    return out


def settle(work: PendingCopy | PendingChecksum) -> None:
    until = time.monotonic() + DEADLINE_S
    while not work.done():
        assert time.monotonic() < until, "the copy does not end"


def there_and_back(
    model: str,
    dtype: str,
    page_size: int,
    device: Device | None,
    kernel: DeviceCopier,
    layouts: tuple[str, str] = ("nhd", "nhd"),
    split: int = 1,
) -> None:
    """Gathers and scatters a part by numpy in host memory and by the kernel on a device, or in host memory, too.

    The checksums of the source and of the target, by numpy and by the kernel, are all equal.

    Args:
        layouts: Layouts of the pools from which the part is gathered and to which it is scattered.
        split: Transfer pages in a page.
    """
    _, head, heads, *_ = MODELS[model]
    numpy = NumpyCopier()
    results = []
    for copier, place in ((numpy, None), (kernel, device)):
        with ExitStack() as stack:
            here, _ = stack.enter_context(filled(model, page_size, dtype, 1, place, layouts[0]))
            there, blocks = stack.enter_context(filled(model, page_size, dtype, 2, place, layouts[1]))
            (source,), (target,) = here.segments_at(split), there.segments_at(split)
            part = source.part_layout(0, LAYERS, len(PAGES), heads)
            (whole,) = part.pieces(part.nbytes)
            ring = stack.enter_context(closing(RingMemory(part.region_bytes, place)))
            stretch = ring.view(0, part.region_bytes)
            settle(copier.gather(RowIndex(source, PAGES, head, heads), [whole], [stretch]))
            back = RowIndex(target, PAGES[::-1], head, heads)
            settle(copier.scatter([LandedPart(back, part, stretch)]))
            packed = read(stretch.addr, part.nbytes, place)
            sums = []
            share = TransferSlice(0, 0, 0, head, head, heads, 0, LAYERS, 0, 0, 0)
            for pool, pages in ((here, PAGES), (there, PAGES[::-1])):
                checksums = HostChecksums(pool) if copier is numpy else DeviceChecksums(pool, kernel.copies)
                pending = checksums.begin(share, pages, head, 0, LAYERS, split)
                settle(pending)
                sums.append(pending.value)
            assert sums[0] == sums[1]
            results.append([np.array(sums), packed, *(read(block.addr, block.nbytes, place) for block in blocks)])
    assert results[0][1].any()
    assert all(map(np.array_equal, *results))


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_in_the_interpreter(model: str, dtype: str, page_size: int) -> None:
    there_and_back(model, dtype, page_size, None, DeviceCopier(Interpreted()))


@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("layout", POOL_LAYOUTS)
@pytest.mark.parametrize("model", ["two of eight heads", "all heads", "latent"])
def test_layouts_in_the_interpreter(model: str, layout: str, split: int) -> None:
    other = list(POOL_LAYOUTS)[list(POOL_LAYOUTS).index(layout) - 1]
    there_and_back(model, "bf16", 16, None, DeviceCopier(Interpreted()), (layout, other), split)


def opened() -> Device:
    try:
        return open_device(0)
    except DeviceUnavailable:
        pytest.skip("no NVIDIA GPU here (run benchmarks/gpu.sh on one)")


@pytest.mark.parametrize("layout", POOL_LAYOUTS)
def test_layouts_on_a_gpu(layout: str) -> None:
    device = opened()
    other = list(POOL_LAYOUTS)[list(POOL_LAYOUTS).index(layout) - 1]
    with closing(DeviceCopier(device.copies())) as kernel:
        for model, split in product(("two of eight heads", "K wider than V", "latent"), (1, 4)):
            there_and_back(model, "bf16", 16, device, kernel, (layout, other), split)


@pytest.mark.parametrize("model", MODELS)
def test_on_a_gpu(model: str) -> None:
    device = opened()
    with closing(DeviceCopier(device.copies())) as kernel:
        for dtype, page_size in product(DTYPES, PAGE_SIZES):
            there_and_back(model, dtype, page_size, device, kernel)
