"""The checksum of a part: equal on both sides for any pages, heads and layouts; different if any byte differs."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import numpy as np
import pytest

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.parallel import ParallelConfig, local_shards
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.checksum import aux_checksum, part_checksum
from kvctl_agent.memory.pool import KVPool

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


@pytest.mark.parametrize(("layer", "plane", "byte"), [(0, 0, 0), (1, 1, 11), (2, 0, 15)])
def test_one_bit_anywhere_is_found(pools: tuple[KVPool, KVPool], layer: int, plane: int, byte: int) -> None:
    writer, reader = pools
    width = (16, 12)[plane]
    reader.segments[0].block(layer, plane).reshape(16, 4, 4, width)[THERE[1], 2, 3, byte] ^= 1
    here, there = checksums(writer, reader)
    assert here != there


def test_bytes_outside_the_part_are_ignored(pools: tuple[KVPool, KVPool]) -> None:
    writer, reader = pools
    before = checksums(writer, reader)
    reader.segments[0].block(0, 0).reshape(16, 4, 4, 16)[:, :, :2] ^= 255
    writer.segments[0].block(0, 0).reshape(8, 4, 2, 16)[0] ^= 255
    assert checksums(writer, reader) == before


def test_pages_in_another_order_are_found(pools: tuple[KVPool, KVPool]) -> None:
    writer, reader = pools
    assert part_checksum(reader, SHARE, np.array(THERE[::-1], np.int32), 2, 0, 3) != checksums(writer, reader)[0]


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
