"""The checksum of a part: equal on both sides for any pages, heads and layouts; different if any byte differs."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import numpy as np
import pytest

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, local_shards
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.checksum import DeviceChecksums, aux_checksum, bytes_checksum, part_checksum
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.segment import SegmentMemory
from tests.support.host_device import HostDevice
from tests.support.strided import strided

SHAPE = ModelShape(num_layers=3, num_kv_heads=4, k_dim=8, v_dim=6, dtype_bytes=2)
# The second half of the heads: all that the writer has, heads 2 and 3 of the reader's.
SHARE = TransferSlice(1, 0, 0, 0, 2, 2, 0, 3, 2, 4, 4 * (16 + 12))
HERE, THERE = [3, 1, 7], [12, 5, 6]


def pool(side: ParallelConfig, rank: int, pages: int) -> KVPool:
    return KVPool.allocate(local_shards(SHAPE, 4, side, side.coord(rank)), 4, pages, aux_slots=2, aux_row_bytes=24)


@pytest.fixture
def pools() -> Iterator[tuple[KVPool, KVPool]]:
    """A writer's and a reader's pool with the same part in both."""
    writer, reader = pool(ParallelConfig(tp=2), 1, 8), pool(ParallelConfig(), 0, 16)
    random = np.random.default_rng(4)
    for layer in range(3):
        for plane, width in enumerate((16, 12)):
            rows = random.integers(0, 256, (3, 4, 2, width), np.uint8)
            writer.segments[0].block(layer, plane).reshape(8, 4, 2, width)[HERE] = rows
            reader.segments[0].block(layer, plane).reshape(16, 4, 4, width)[THERE, :, 2:4] = rows
    yield writer, reader
    writer.close()
    reader.close()


def checksums(writer: KVPool, reader: KVPool, lo: int = 0, hi: int = 3) -> tuple[int, int]:
    return (
        part_checksum(writer, SHARE, np.array(HERE, np.int32), SHARE.src_head, lo, hi),
        part_checksum(reader, SHARE, np.array(THERE, np.int32), SHARE.dst_head, lo, hi),
    )


@pytest.mark.parametrize(("lo", "hi"), [(0, 3), (1, 2), (1, 3)])
def test_both_sides_find_the_same(pools: tuple[KVPool, KVPool], lo: int, hi: int) -> None:
    here, there = checksums(*pools, lo, hi)
    assert here == there


# ---- properties --------------------------------------------------------------------------------------------------


def reference(data: bytes, word: int, position: int) -> int:
    """The checksum as it is defined."""
    total = 0
    for at in range(0, len(data), word):
        x = int.from_bytes(data[at : at + word], "little") ^ (position + at) * 0x9E3779B1 & 0xFFFFFFFF
        x = (x ^ x >> 16) * 0x21F0AAAD & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0x735A2D97 & 0xFFFFFFFF
        total += x ^ x >> 15
    return total & 0xFFFFFFFF


@pytest.mark.parametrize("word", [1, 2, 4])
@pytest.mark.parametrize("position", [0, 4096, (1 << 32) - 64, (1 << 40) + 4])
def test_it_is_as_it_is_defined(word: int, position: int) -> None:
    data = np.random.default_rng(word).integers(0, 256, 1200, np.uint8)
    assert bytes_checksum(data, word, position) == reference(data.tobytes(), word, position)
    whole = bytes_checksum(data, word, 64)
    halves = bytes_checksum(data[:400], word, 64) + bytes_checksum(data[400:], word, 464)
    assert whole == halves & 0xFFFFFFFF


@pytest.mark.parametrize(("k", "v", "dtype"), [(8, 6, 2), (3, 5, 1), (4, 4, 4), (6, 8, 1)])
def test_the_value_does_not_depend_on_strides_and_split_pages(k: int, v: int, dtype: int) -> None:
    """The same part in a pool of HND and in pages of twice the size, and by the kernel of a device."""
    shape = ModelShape(3, 4, k, v, dtype)
    plain = KVPool.allocate(local_shards(shape, 4, ParallelConfig(), RankCoord(0, 0, 0, 0)), 4, 16)
    share = TransferSlice(1, 0, 0, 0, 2, 2, 0, 3, 2, 4, 4 * (k + v) * dtype)
    random = np.random.default_rng(5)
    for layer in range(3):
        for plane in range(2):
            block = plain.segments[0].block(layer, plane)
            block[:] = random.integers(0, 256, block.nbytes, np.uint8)
    pages = np.array([9, 4, 5, 0], np.int32)
    right = part_checksum(plain, share, pages, 1, 1, 3)
    device = HostDevice()
    copies = device.copies()
    for split in (1, 2):
        if split == 2:  # the same memory in pages of 8 tokens
            shards = local_shards(shape, 8, ParallelConfig(), RankCoord(0, 0, 0, 0))
            memory = plain.segments[0]
            plain = KVPool([SegmentMemory(shards[0], 8, memory.blocks)], page_size=8, owner=plain)
        assert part_checksum(plain, share, pages, 1, 1, 3, split) == right
        pending = DeviceChecksums(plain, copies).begin(share, pages, 1, 1, 3, split)
        while not pending.done():
            pass
        assert pending.value == right
    if k == v:
        memory, kept = strided(plain.segments[0].shard, 8, "plhtk")
        for layer in range(3):
            for plane in range(2):
                memory.elements(layer, plane)[:] = plain.segments[0].elements(layer, plane)
        fused = KVPool([memory], page_size=8, owner=kept)
        assert part_checksum(fused, share, pages, 1, 1, 3, 2) == right
        pending = DeviceChecksums(fused, copies).begin(share, pages, 1, 1, 3, 2)
        while not pending.done():
            pass
        assert pending.value == right
    assert part_checksum(plain, share, pages, 2, 1, 3, 2) != right  # another head
    assert part_checksum(plain, share, pages, 1, 0, 2, 2) != right  # other layers
    assert part_checksum(plain, share, pages + 1, 1, 1, 3, 2) != right  # other pages


def test_an_aux_row_is_its_bytes(pools: tuple[KVPool, KVPool]) -> None:
    writer, reader = pools
    writer.aux[0][1] = np.arange(24, dtype=np.uint8)
    assert aux_checksum(writer, 1) == crc32(bytes(range(24)))
    assert aux_checksum(reader, 0) != aux_checksum(writer, 1)


@pytest.mark.parametrize("row", [-1, 2])
def test_an_aux_row_that_is_not_there_is_refused(pools: tuple[KVPool, KVPool], row: int) -> None:
    with pytest.raises(MemoryLayoutError, match=f"aux row {row} is outside the pool of 2 rows"):
        aux_checksum(pools[0], row)


def test_pages_of_another_pool_are_refused(pools: tuple[KVPool, KVPool]) -> None:
    with pytest.raises(MemoryLayoutError, match="page 12 is outside the pool of 8 pages"):
        part_checksum(pools[0], SHARE, np.array(THERE, np.int32), 0, 0, 3)
