"""Kernel launches copy the same bytes as numpy for any head slice, planes and pieces, and for several parts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvctl_agent.device.base import Geometry, PageStrides
from kvctl_agent.errors import DeviceError, MemoryLayoutError
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.layout.shape import Plane, Segment
from kvctl_agent.memory.allocations import RingMemory
from kvctl_agent.memory.copier import LandedPart, PendingCopy
from kvctl_agent.memory.device_copier import DeviceCopier, gather_geometries
from kvctl_agent.memory.host_copier import CopyPool, HostCopier
from kvctl_agent.memory.part_layout import PartLayout
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.region import MemorySpan
from kvctl_agent.memory.segment import RowIndex, SegmentMemory
from tests.support.host_device import HostDevice
from tests.support.numpy_copier import NumpyCopier

Planes = tuple[Plane, ...]

PLANES: dict[str, Planes] = {
    "K and V alike": (Plane("k", 4, 32), Plane("v", 4, 32)),
    "K wider than V": (Plane("k", 4, 24), Plane("v", 4, 16)),
    "with scales": (Plane("k", 4, 32), Plane("v", 4, 32), Plane("k_scale", 1, 4), Plane("v_scale", 1, 4)),
    "one row a page": (Plane("k", 1, 6), Plane("v", 1, 6)),
    "items of state": (Plane("state", 5, 12),),
}
PAGES = np.array([7, 2, 3, 4, 11, 0, 9], np.int64)
LAYERS, SLOTS, HEADS = 6, 12, 8


@contextmanager
def filled(planes: Planes, device: HostDevice | None, seed: int = 1) -> Iterator[SegmentMemory]:
    """Layers 2 to 7 of a segment, filled with random bytes."""
    held = LocalShard(Segment(0, "kv", 0, 10, HEADS, planes), 2, 2 + LAYERS, 0, HEADS)
    pool = KVPool.allocate((held,), planes[0].rows, SLOTS, device=device)
    (memory,) = pool.segments
    for layer in range(2, 2 + LAYERS):
        for plane in range(len(planes)):
            block = memory.block(layer, plane)
            block[:] = np.random.default_rng([seed, layer, plane]).integers(0, 256, block.nbytes, np.uint8)
    yield memory
    pool.close()


def finish(work: PendingCopy) -> None:
    while not work.done():
        pass


def bytes_of(memory: SegmentMemory) -> list[bytes]:
    return [block.array().tobytes() for layer in memory.blocks for block in layer]


def gathered(memory: SegmentMemory, head: int, heads: int, layers: tuple[int, int]) -> tuple[PartLayout, np.ndarray]:
    """A part gathered by numpy."""
    part = memory.part_layout(*layers, len(PAGES), heads)
    out = np.empty(part.region_bytes, np.uint8)
    (whole,) = part.pieces(part.nbytes)
    rows = RowIndex(memory, PAGES, head, heads)
    finish(NumpyCopier().gather(rows, [whole], [MemorySpan(out.ctypes.data, out.nbytes, out)]))
    return part, out


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


@pytest.fixture
def ring(device: HostDevice) -> Iterator[RingMemory]:
    ring = RingMemory(1 << 20, device)
    yield ring
    ring.close()


def read(device: HostDevice, stretch: MemorySpan, nbytes: int) -> np.ndarray:
    out = np.empty(nbytes, np.uint8)
    device.download(stretch.addr, out)
    return out


@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize(("head", "heads"), [(0, 8), (0, 2), (3, 4), (7, 1)])
class TestSameAsNumpy:
    def test_scatter_of_parts_that_landed_together(
        self, device: HostDevice, ring: RingMemory, planes: str, head: int, heads: int
    ) -> None:
        copier = DeviceCopier(device.copies())
        host = NumpyCopier()
        with (
            filled(PLANES[planes], None) as source,
            filled(PLANES[planes], device, 2) as memory,
            filled(PLANES[planes], None, 2) as model,
        ):
            landed = []
            for number, (layers, pages) in enumerate([((2, 4), PAGES), ((4, 8), PAGES), ((2, 8), PAGES[:2] + 1)]):
                part, region = gathered(source, head, heads, layers)
                part = memory.part_layout(*layers, len(pages), heads)
                stretch = ring.view(number << 16, part.region_bytes)
                device.upload(stretch.addr, region[: part.region_bytes])
                landed.append(LandedPart(RowIndex(memory, pages, head, heads), part, stretch))
                numpys = MemorySpan(0, part.region_bytes, region[: part.region_bytes])
                finish(host.scatter([LandedPart(RowIndex(model, pages, head, heads), part, numpys)]))
            # The last one writes over pages of the others: launches do not order rows, so it comes after them.
            finish(copier.scatter(landed[:2]))
            finish(copier.scatter(landed[2:]))
            assert bytes_of(memory) == bytes_of(model)
        copier.close()


class TestLaunches:
    @pytest.mark.parametrize(("planes", "launches"), [("K and V alike", 1), ("K wider than V", 2), ("with scales", 2)])
    def test_planes_that_are_alike_share_one(
        self, device: HostDevice, ring: RingMemory, planes: str, launches: int
    ) -> None:
        copier = DeviceCopier(device.copies())
        with filled(PLANES[planes], device) as memory:
            part = memory.part_layout(2, 8, len(PAGES), 2)
            rows = RowIndex(memory, PAGES, 2, 2)
            copier.gather(rows, part.pieces(part.nbytes), [ring.view(0, part.nbytes)])
            copier.scatter([LandedPart(rows, part, ring.view(at, part.region_bytes)) for at in (0, 1 << 16)])
            gather, scatter = device.begun
            assert [len(begun.batches) for begun in device.begun] == [launches, launches]
            blocks = LAYERS * len(PLANES[planes])
            assert sum(len(batch.blocks) for batch in gather.batches) == blocks
            assert sum(len(batch.blocks) for batch in scatter.batches) == 2 * blocks
            assert scatter.pages.tolist() == PAGES.tolist() * 2
            copier.prepare(memory, 2, 2)
            assert device.prepared == [batch.geometry for batch in scatter.batches]
            two = memory.shard._replace(head_lo=2, head_hi=4)
            assert gather_geometries(memory.addresses, two) == {batch.geometry for batch in gather.batches}
            copier.close()

    def test_parts_of_different_writers_share_one(self, device: HostDevice, ring: RingMemory) -> None:
        copier = DeviceCopier(device.copies())
        with filled(PLANES["K and V alike"], device) as memory, filled(PLANES["K and V alike"], None) as source:
            landed = []
            for head in (0, 2, 4, 6):
                part, region = gathered(source, head, 2, (2, 8))
                stretch = ring.view(head << 15, part.region_bytes)
                device.upload(stretch.addr, region)
                landed.append(LandedPart(RowIndex(memory, PAGES, head, 2), part, stretch))
            finish(copier.scatter(landed))
            (begun,) = device.begun
            assert len(begun.batches) == 1
            for layer, plane in [(2, 0), (7, 1)]:
                pages = [segment.block(layer, plane).reshape(SLOTS, -1)[PAGES] for segment in (memory, source)]
                assert np.array_equal(*pages)
            copier.close()

    def test_stretches_that_are_alike_differ_in_address_head_and_pages(
        self, device: HostDevice, ring: RingMemory
    ) -> None:
        """Block ranges of one part are reused for the next."""
        copier = DeviceCopier(device.copies())
        with filled(PLANES["with scales"], device) as memory:
            part = memory.part_layout(2, 8, len(PAGES), 2)
            for head, pages, at in [(0, PAGES, 0), (4, PAGES, 512), (4, PAGES[::-1], 512), (0, PAGES.astype("u1"), 0)]:
                wanted = np.empty(part.region_bytes, np.uint8)
                (whole,) = part.pieces(part.nbytes)
                rows = RowIndex(memory, pages, head, 2)
                finish(NumpyCopier().gather(rows, [whole], [MemorySpan(0, wanted.nbytes, wanted)]))
                stretch = ring.view(at, part.nbytes)
                device.fill(stretch.addr, part.nbytes, 0)
                finish(copier.gather(rows, [whole], [stretch]))
                assert np.array_equal(read(device, stretch, part.nbytes), wanted[: part.nbytes])
        copier.close()

    def test_whole_pages_are_one_wide_row(self, device: HostDevice) -> None:
        copier = DeviceCopier(device.copies())
        with filled(PLANES["K and V alike"], device) as memory:
            copier.prepare(memory, 0, HEADS)
            page = 4 * HEADS * 32
            (scatter,), (gather,) = device.prepared, gather_geometries(memory.addresses, memory.shard)
            assert scatter == gather.reversed()
            assert gather.merged() == Geometry(1, 1, page, PageStrides(page, page, page), None)
            elsewhere = memory.shard._replace(head_lo=HEADS, head_hi=2 * HEADS)
            assert gather_geometries(memory.addresses, elsewhere) == set()


class TestRefusal:
    def test_what_does_not_fit_is_never_launched(self, device: HostDevice, ring: RingMemory) -> None:
        copier = DeviceCopier(device.copies())
        with filled(PLANES["K and V alike"], device) as memory:
            part = memory.part_layout(2, 4, len(PAGES), 2)
            rows, fewer = RowIndex(memory, PAGES, 0, 2), RowIndex(memory, PAGES[:3], 0, 2)
            (piece,) = part.pieces(part.nbytes)
            with pytest.raises(MemoryLayoutError, match="do not fit into"):
                copier.gather(rows, [piece], [ring.view(0, part.nbytes - 1)])
            with pytest.raises(MemoryLayoutError, match="lie outside"):
                copier.gather(fewer, [piece], [ring.view(0, part.nbytes)])
            with pytest.raises(MemoryLayoutError, match="do not fit into"):
                copier.scatter([LandedPart(rows, part, ring.view(0, 1))])
            for wrong in (fewer, RowIndex(memory, PAGES, 0, 4)):
                with pytest.raises(MemoryLayoutError, match="bytes of staging do not match blocks 0 to 3"):
                    copier.scatter([LandedPart(wrong, part, ring.view(0, part.region_bytes))])
            beyond = PartLayout(5, 2, len(PAGES), part.page_bytes)
            with pytest.raises(MemoryLayoutError, match=r"blocks 10 to 13, .* lie outside the 12 blocks"):
                copier.scatter([LandedPart(rows, beyond, ring.view(0, part.region_bytes))])
        assert device.begun == []

    def test_the_host_copies_no_memory_of_a_device(self, device: HostDevice, ring: RingMemory) -> None:
        with filled(PLANES["K and V alike"], None) as memory:
            part, rows = memory.part_layout(2, 4, len(PAGES), 2), RowIndex(memory, PAGES, 0, 2)
            wake_fd = os.eventfd(0)
            scatter = HostCopier(CopyPool(0, wake_fd)).scatter
            os.close(wake_fd)  # the pool has a copy of it
            with pytest.raises(MemoryLayoutError, match="on a device; the host cannot copy it"):
                scatter([LandedPart(rows, part, ring.view(0, part.region_bytes))])

    def test_a_failed_copy_says_so_when_asked(self, device: HostDevice, ring: RingMemory) -> None:
        copier = DeviceCopier(device.copies())
        with filled(PLANES["K and V alike"], device) as memory:
            part, rows = memory.part_layout(2, 4, len(PAGES), 2), RowIndex(memory, PAGES, 0, 2)
            device.fail_next = 1
            work: Any = copier.scatter([LandedPart(rows, part, ring.view(0, part.region_bytes))])
            with pytest.raises(DeviceError, match="told to fail"):
                finish(work)
        copier.close()
