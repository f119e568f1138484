from __future__ import annotations

import mmap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvctl_agent.contract.choices import HOST
from kvctl_agent.errors import LocalProtocolError, MemoryLayoutError
from kvctl_agent.memory.allocations import (
    HUGE_PAGE_BYTES,
    HugePageMemory,
    RingMemory,
    StagingBuffers,
    back_with_huge_pages,
)
from kvctl_agent.memory.region import Region, merge_adjacent
from tests.support.process_memory import mapped_kib, mappings, needs_collapse, resident_kib

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_a_slab_is_aligned_zeroed_and_of_the_requested_size() -> None:
    with HugePageMemory(3 * HUGE_PAGE_BYTES + 17) as memory:
        assert memory.addr % HUGE_PAGE_BYTES == 0
        assert memory.array.nbytes == memory.nbytes == 3 * HUGE_PAGE_BYTES + 17
        assert memory.array.ctypes.data == memory.addr
        assert memory.region == (memory.addr, memory.nbytes, HOST)
        assert not memory.array.any()
        memory.array[-1] = 7
        assert memory.array[-1] == 7


@pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="this kernel has transparent huge pages switched off"
)
@pytest.mark.parametrize("nbytes", [8 << 20, 64 << 20], ids=["one thread touches", "two threads touch"])
def test_a_slab_is_resident_in_huge_pages_before_its_first_use(nbytes: int) -> None:
    with HugePageMemory(nbytes) as memory:
        huge_kib = mapped_kib(memory.addr, "AnonHugePages")
        assert huge_kib is not None
        assert huge_kib >= nbytes // 1024


def test_close_gives_the_pages_back_even_when_a_view_outlives_it() -> None:
    memory = HugePageMemory(16 << 20)
    memory.array[:] = 9
    view = memory.array[: 8 << 20]
    addr = memory.addr
    memory.close()
    memory.close()
    assert (resident_kib(addr, 16 << 20), memory.array.nbytes) == (0, 0)
    assert not view[:4096].any(), "late readers see zeros, not a crash"
    del view
    assert resident_kib(addr, 16 << 20) == 0


@pytest.mark.parametrize("nbytes", [0, -5, 1 << 62])
def test_a_size_that_cannot_be_mapped_is_refused_with_the_size(nbytes: int) -> None:
    with pytest.raises(MemoryLayoutError, match=str(nbytes)):
        HugePageMemory(nbytes)


def addr_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


@needs_collapse
def test_memory_of_an_engine_moves_into_huge_pages_and_keeps_its_content() -> None:
    nbytes = 8 * HUGE_PAGE_BYTES
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        content = np.random.default_rng(1).bytes(nbytes)
        memory.write(content)
        addr = addr_of(memory)
        before = mapped_kib(addr, "AnonHugePages", nbytes)
        # Tensors with an allocator's header between them, the first of which ends within a huge page.
        half = nbytes // 2 + 4096
        back_with_huge_pages([Region(addr + half + 64, nbytes - half - 64), Region(addr, half)])
        after = mapped_kib(addr, "AnonHugePages", nbytes)
        assert before == 0
        assert after is not None
        assert after >= (nbytes - HUGE_PAGE_BYTES) // 1024
        assert memory[:] == content


@needs_collapse
def test_huge_pages_stay_inside_the_memory_of_an_engine_and_are_not_allocated_ahead() -> None:
    nbytes = 8 * HUGE_PAGE_BYTES
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        first = -addr_of(memory) % HUGE_PAGE_BYTES
        addr = addr_of(memory) + first
        written = first + 2 * HUGE_PAGE_BYTES
        memory[:written] = b"x" * written
        # Whole huge pages of it are the second one, which was written, and the third and fourth, which were not.
        back_with_huge_pages([Region(addr + 1, 4 * HUGE_PAGE_BYTES)])
        assert mapped_kib(addr_of(memory), "AnonHugePages", nbytes) == HUGE_PAGE_BYTES // 1024
        assert resident_kib(addr_of(memory), nbytes) == written // 1024


def test_memory_of_others_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(bytes(4 * HUGE_PAGE_BYTES))
    shared = mmap.mmap(-1, 4 * HUGE_PAGE_BYTES)
    with path.open("r+b") as file, shared, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as mapped:
        flags = []
        for memory in (shared, mapped):
            memory.write(b"x" * len(memory))
            addr = addr_of(memory)
            back_with_huge_pages([Region(addr, len(memory)), Region(addr, len(memory), 0)])
            assert memory[:] == b"x" * len(memory)
            flags.append(mappings(addr, addr + 1)[0]["VmFlags"].split())
        assert all("hg" not in each for each in flags)  # as MADV_HUGEPAGE marks a mapping


def test_regions_that_touch_are_joined_and_others_stay_apart() -> None:
    regions = [Region(300, 50), Region(100, 100), Region(200, 50), Region(350, 1)]
    assert merge_adjacent(regions) == [(100, 150, HOST), (300, 51, HOST)]
    assert merge_adjacent([Region(100, 50, 1), Region(150, 50, 0)]) == [(100, 50, 1), (150, 50, 0)]
    assert merge_adjacent([]) == []


def test_a_ring_gives_views_inside_itself_only() -> None:
    ring = RingMemory(1 << 20)
    try:
        four, one = ring.view(256, 4), ring.view(256, 1)
        assert four.array is not None
        assert one.array is not None
        four.array.view(np.uint32)[0] = 0x01020304
        assert one.array[0] == 4
        assert ring.region() == (ring.addr, 1 << 20, HOST)
        assert (four.addr, four.array.ctypes.data, four.nbytes) == (ring.addr + 256, ring.addr + 256, 4)
        for offset, nbytes in [(-1, 4), (0, 0), ((1 << 20) - 3, 4)]:
            with pytest.raises(MemoryLayoutError, match="outside the ring"):
                ring.view(offset, nbytes)
    finally:
        ring.close()
        ring.close()


def test_buffers_are_disjoint_and_lie_in_the_registered_region() -> None:
    staging = StagingBuffers(3, 5000)
    region = staging.region()
    buffers = [staging.acquire(peer) for peer in "abc"]
    spans = []
    for buffer in buffers:
        assert buffer is not None
        addr, nbytes, array = buffer.span
        assert array is not None
        assert (array.ctypes.data, array.nbytes) == (addr, nbytes)
        assert nbytes == staging.buffer_bytes >= 5000
        spans.append((addr, addr + nbytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert region.addr <= spans[0][0]
    assert spans[-1][1] <= region.addr + region.nbytes
    del array, buffer, buffers
    staging.close()
    staging.close()


def test_an_exhausted_pool_says_none_and_serves_again_after_a_release() -> None:
    staging = StagingBuffers(2, 4096)
    first, second = staging.acquire("a"), staging.acquire("b")
    assert first is not None
    assert second is not None
    assert staging.acquire("c") is None
    assert (staging.in_use, staging.high_water) == (2, 2)
    staging.release(first)
    assert (staging.in_use, staging.high_water) == (1, 2)
    assert staging.acquire("c") is first, "the buffer that is hottest in cache comes first"
    staging.close()


def test_a_peer_holds_no_more_than_it_leaves_free() -> None:
    staging = StagingBuffers(8, 4096)
    held = {peer: [staging.acquire(peer) for _ in range(8)] for peer in ("a", "b", "c")}
    counts = {peer: sum(buffer is not None for buffer in buffers) for peer, buffers in held.items()}
    assert counts == {"a": 4, "b": 2, "c": 1}
    returned = held["b"][0]
    assert returned is not None
    staging.release(returned)
    assert staging.acquire("a") is None
    assert staging.acquire("c") is returned
    staging.close()


def test_a_buffer_cannot_be_released_twice_or_to_another_pool() -> None:
    staging, other = StagingBuffers(1, 4096), StagingBuffers(1, 4096)
    buffer = staging.acquire("a")
    assert buffer is not None
    with pytest.raises(LocalProtocolError, match="buffer 0 was released but is not in use"):
        other.release(buffer)
    staging.release(buffer)
    with pytest.raises(LocalProtocolError, match="not in use"):
        staging.release(buffer)
    staging.close()
    other.close()


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(MemoryLayoutError, match="0 staging buffers of 4096 bytes"):
        StagingBuffers(0, 4096)
