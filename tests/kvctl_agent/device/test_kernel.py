"""The copy kernel in Triton's interpreter, on host memory, against a copy row by row."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from kvctl_agent.device.base import Batch, Geometry, PageStrides, checksum_word
from kvctl_agent.device.kernels import Tile, variant
from kvctl_agent.device.launch_tables import split, table_bytes
from kvctl_agent.errors import DeviceError
from kvctl_agent.memory.checksum import bytes_checksum
from tests.kvctl_agent.device.geometries import of_rows
from tests.kvctl_agent.device.interpreted import launch

GATHER, SCATTER, DIRECT = (True, False), (False, True), (True, True)
SMALL = Tile(1024, 1)


def row_by_row(batch: Batch, pages: np.ndarray) -> None:
    """The expected result of a launch, copied row by row."""
    geometry = batch.geometry
    for src, dst, src_at, dst_at, count in batch.blocks.tolist():
        for element in product(range(count), range(geometry.rows), range(geometry.heads)):
            source = src + offset(geometry, geometry.src, pages[src_at:], *element)
            target = dst + offset(geometry, geometry.dst, pages[dst_at:], *element)
            ctypes.memmove(target, source, geometry.width)


def offset(geometry: Geometry, side: PageStrides | None, pages: np.ndarray, page: int, row: int, head: int) -> int:
    """Distance of a head of the `page`-th listed page from the block's address."""
    if side is None:
        return ((page * geometry.rows + row) * geometry.heads + head) * geometry.width
    number, sub = divmod(int(pages[page]), side.split)
    return number * side.page + sub * side.sub + row * side.row + head * side.head


@dataclass
class Side:
    """Memory of one side: blocks of `slots` pages, or packed pages one after the other.

    Attributes:
        shift: distance in bytes of the first block from a multiple of 4,096.
    """

    geometry: Geometry
    paged: bool
    row: int
    slots: int
    blocks: int
    start: int = 0
    shift: int = 0
    memory: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        arena = np.random.default_rng(self.row).integers(
            0, 256, self.shift + self.blocks * self.nbytes + 8192, np.uint8
        )
        at = -arena.ctypes.data % 4096 + self.shift
        self.memory = arena[at : at + self.blocks * self.nbytes]

    @property
    def nbytes(self) -> int:
        return self.slots * self.geometry.rows * self.row

    def address(self, block: int, page: int = 0) -> int:
        """Address of the first head of a paged block, or of the first page of a packed block."""
        inside = self.start if self.paged else page * self.geometry.rows * self.row
        return int(self.memory.ctypes.data) + block * self.nbytes + inside


def sides(
    rows: int,
    heads: int,
    head: int,
    count: int,
    head_bytes: int,
    way: tuple[bool, bool],
    shift: int = 0,
    blocks: int = 2,
) -> tuple[Geometry, list[Side]]:
    """Both sides of a copy of heads [head, head + count) of `heads`."""
    width, row = count * head_bytes, heads * head_bytes
    src_row, dst_row = (row if paged else width for paged in way)
    geometry = of_rows(rows, width, src_row, dst_row, *way)
    made = [
        Side(geometry, paged, row if paged else width, 9, blocks, head * head_bytes, shift if not side else 0)
        for side, paged in enumerate(way)
    ]
    return geometry, made


def check(geometry: Geometry, source: Side, target: Side, counts: list[int], **how: Any) -> None:
    """Copies parts with these page counts, all blocks of all parts in one launch, and compares all memory."""
    random = np.random.default_rng(sum(counts))
    order = [random.permutation(source.slots)[: sum(counts)] for _ in (source, target)]
    pages = np.concatenate(order).astype(np.int32)
    begins = np.cumsum([0, *counts]).tolist()
    rows = [
        (source.address(block, lo), target.address(block, lo), lo, len(order[0]) + lo, hi - lo)
        for lo, hi in pairwise(begins)
        for block in range(source.blocks)
    ]
    compare(Batch(geometry, np.array(rows, np.int64)), pages, target, **how)


def compare(batch: Batch, pages: np.ndarray, target: Side, **how: Any) -> None:
    before = target.memory.copy()
    row_by_row(batch, pages)
    wanted = target.memory.copy()
    target.memory[:] = before
    launch(batch, pages, **{"tile": SMALL, **how})
    assert np.array_equal(target.memory, wanted)
    assert not np.array_equal(before, wanted)


# (heads, head, count, head elements): of multi-head attention; of one shared latent.
SLICES = [(8, 0, 8, 16), (8, 0, 2, 16), (8, 6, 2, 16), (8, 3, 3, 16), (5, 1, 3, 10), (4, 1, 1, 24), (1, 0, 1, 576)]


@pytest.mark.parametrize("way", [GATHER, SCATTER, DIRECT], ids=["gather", "scatter", "direct"])
@pytest.mark.parametrize(("dtype_bytes", "page_size"), [(1, 64), (2, 1), (2, 64), (4, 16)])
@pytest.mark.parametrize("heads", SLICES, ids=str)
def test_every_shape(
    heads: tuple[int, int, int, int], dtype_bytes: int, page_size: int, way: tuple[bool, bool]
) -> None:
    total, head, count, elements = heads
    geometry, (source, target) = sides(page_size, total, head, count, elements * dtype_bytes, way)
    # Few words at a time keep the interpreter busy only where tiles end.
    check(geometry, source, target, [3, 1], tile=Tile(16 << 10, 16))


@pytest.mark.parametrize("way", [GATHER, SCATTER, DIRECT], ids=["gather", "scatter", "direct"])
@pytest.mark.parametrize("shift", [1, 2, 4, 8, 24])
def test_addresses_decide_how_wide_words_may_be(shift: int, way: tuple[bool, bool]) -> None:
    geometry, (source, target) = sides(4, 4, 1, 2, 32, way, shift)
    check(geometry, source, target, [2, 3])


@pytest.mark.parametrize("way", [GATHER, SCATTER, DIRECT], ids=["gather", "scatter", "direct"])
@pytest.mark.parametrize("counts", [[1], [9], [1, 1, 1], [5, 1, 3], [2, 7]], ids=str)
def test_parts_of_one_launch_differ_in_pages(counts: list[int], way: tuple[bool, bool]) -> None:
    geometry, (source, target) = sides(4, 4, 2, 2, 64, way)
    check(geometry, source, target, counts)


@pytest.mark.parametrize("programs", [1, 2, 5, 100])
def test_any_number_of_programs_does_it_all(programs: int) -> None:
    geometry, (source, target) = sides(8, 4, 2, 2, 64, GATHER)
    check(geometry, source, target, [4, 5], programs=programs)


@pytest.mark.parametrize("tile", [Tile(256, 1), Tile(1024, 1), Tile(16 << 10, 4), Tile(64 << 10, 16)], ids=str)
def test_any_tile_gives_the_same(tile: Tile) -> None:
    geometry, (source, target) = sides(16, 1, 0, 1, 288, DIRECT)
    check(geometry, source, target, [3, 6], tile=tile)


def test_both_sides_may_hold_different_heads() -> None:
    """TP4 to TP1: a writer's two heads are its whole row here and two of eight there."""
    geometry = of_rows(16, 128, 128, 512, True, True)
    source = Side(geometry, True, 128, 9, 2)
    target = Side(geometry, True, 512, 9, 2, start=256)
    check(geometry, source, target, [4, 2])


def test_k_and_v_of_different_widths_are_two_batches() -> None:
    for width in (192, 128):
        geometry, (source, target) = sides(4, 8, 2, 2, width, GATHER)
        check(geometry, source, target, [3])


def test_pages_may_repeat_in_a_gather() -> None:
    geometry, (source, target) = sides(4, 4, 1, 2, 32, GATHER, blocks=1)
    pages = np.array([7, 7, 2, 7], np.int32)
    compare(Batch(geometry, np.array([[source.address(0), target.address(0), 0, 0, 4]])), pages, target)


# ---- strides ------------------------------------------------------------------------------------------------------

NHD, HND, FUSED, BLOCKS_OUTER = "kpth", "kpht", "phtk", "pkth"


class Tensor:
    """A layer's K and V in one tensor with axes in any order, with one page more than is used.

    Attributes:
        logical: view `[pages, tokens, heads, K and V, head bytes]`.
    """

    def __init__(self, order: str, sizes: dict[str, int], width: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.memory = random.integers(0, 256, (*(sizes[axis] for axis in order), width), np.uint8)
        self.logical = self.memory.transpose(*(order.index(axis) for axis in "pthk"), 4)

    def strides(self, split: int) -> PageStrides:
        page, row, head, *_ = self.logical.strides
        return PageStrides(page, row, head, split, self.logical.shape[1] // split * row)

    def address(self, head: int, plane: int) -> int:
        return int(self.memory.ctypes.data) + head * self.logical.strides[2] + plane * self.logical.strides[3]

    def pages(self, split: int, head: int, heads: int) -> np.ndarray:
        """Pages of the copy, `[K and V, pages, rows, heads, head bytes]`; a view where numpy can make one."""
        pages, rows, _, planes, width = self.logical.shape
        some = self.logical[:, :, head : head + heads].transpose(3, 0, 1, 2, 4)
        return some.reshape(planes, pages * split, rows // split, heads, width)


def test_what_is_contiguous_on_both_sides_is_merged() -> None:
    """Heads of NHD, then rows; heads of a page of one row; rows of HND between pages; but rows of HND stay apart."""
    sizes = {"p": 4, "t": 8, "h": 3, "k": 2}
    nhd, hnd, fused = (Tensor(order, sizes, 16, 0).strides(1) for order in (NHD, HND, FUSED))
    assert Geometry(8, 3, 16, nhd, None).merged() == Geometry(1, 1, 384, PageStrides(384, 384, 384), None)
    assert Geometry(8, 2, 16, nhd, None).merged() == Geometry(8, 1, 32, PageStrides(384, 48, 32), None)
    assert Geometry(8, 3, 16, hnd, hnd).merged() == Geometry(1, 1, 384, *[PageStrides(384, 384, 384)] * 2)
    assert Geometry(8, 3, 16, hnd, None).merged() == Geometry(8, 3, 16, PageStrides(384, 16, 128), None)
    assert Geometry(8, 3, 16, fused, None).merged() == Geometry(8, 3, 16, PageStrides(768, 32, 256), None)
    assert Geometry(1, 3, 16, hnd, None).merged() == Geometry(3, 1, 16, PageStrides(384, 128, 16), None)
    blocks_outer = Tensor(BLOCKS_OUTER, sizes, 16, 0).strides(1)
    assert Geometry(8, 3, 16, blocks_outer, nhd).merged() == Geometry(
        1, 1, 384, PageStrides(768, 384, 384), PageStrides(384, 384, 384)
    )


@pytest.mark.parametrize("heads", [2, 8])
def test_contiguous_pages_that_are_split_are_pages(heads: int) -> None:
    """Pages of 64 tokens in transfer pages of 16 take the kernels of pages of 16."""
    row = 8 * 256
    split = Geometry(16, heads, 256, PageStrides(64 * row, row, 256, 4, 16 * row), None)
    plain = Geometry(16, heads, 256, PageStrides(16 * row, row, 256), None)
    assert split.merged() == plain.merged()
    assert variant(split, 0, SMALL) == variant(plain, 0, SMALL)


# ---- what does not fit one upload -------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [80, 128, 256, 1024])
@pytest.mark.parametrize("way", [GATHER, SCATTER, DIRECT], ids=["gather", "scatter", "direct"])
def test_requests_that_were_split_copy_the_same(way: tuple[bool, bool], nbytes: int) -> None:
    geometry, (source, target) = sides(2, 4, 1, 2, 16, way, blocks=3)
    order = np.random.default_rng(4).permutation(9)
    pages = np.concatenate((order, order[::-1])).astype(np.int32)
    rows = [
        (source.address(block, lo), target.address(block, lo), lo, 9 + lo, hi - lo)
        for lo, hi in ((0, 7), (7, 9))
        for block in range(3)
    ]
    batch = Batch(geometry, np.array(rows, np.int64))
    before = target.memory.copy()
    row_by_row(batch, pages)
    wanted = target.memory.copy()
    target.memory[:] = before
    for (some,), listed in split([batch], pages, nbytes):
        assert table_bytes([some], listed) <= nbytes
        row_by_row(some, listed)
    assert np.array_equal(target.memory, wanted)


# ---- variants ----------------------------------------------------------------------------------------------------


def test_a_page_that_is_contiguous_on_both_sides_is_one_row() -> None:
    chosen = variant(of_rows(16, 1024, 1024, 1024, True, False), 0, Tile(16 << 10, 4))
    assert (chosen.rows, chosen.units, chosen.unit, chosen.tile_units) == (1, 1, 16 << 10, 1)


def test_rows_split_into_powers_of_two() -> None:
    chosen = variant(of_rows(16, 1152, 2304, 1152, True, False), 0, Tile(16 << 10, 4))
    assert (chosen.rows, chosen.units, chosen.unit, chosen.align) == (16, 9, 128, 16)
    assert chosen.page_units == 144
    assert -(-8 * chosen.page_units // chosen.tile_units) == 9


@pytest.mark.parametrize(
    "wrong",
    [of_rows(0, 8, 8, 8, True, False), of_rows(4, 0, 8, 8, True, False), of_rows(4, 16, 8, 16, True, False)],
    ids=str,
)
def test_rows_that_cannot_be_are_refused(wrong: Geometry) -> None:
    with pytest.raises(DeviceError, match="invalid geometry"):
        variant(wrong, 0, SMALL)


# ---- checksums ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 4, 6, 12, 16, 144, 256])
@pytest.mark.parametrize(
    ("order", "shift", "split"), [(NHD, 0, 1), (NHD, 1, 1), (HND, 0, 2), (HND, 2, 2), (FUSED, 0, 1), (FUSED, 1, 2)]
)
def test_the_checksum_of_a_launch_is_that_of_its_packed_bytes(order: str, width: int, shift: int, split: int) -> None:
    """`shift`: bytes by which the memory is off its alignment, so that words are loaded in parts."""
    sizes = {"p": 4, "t": 4 * split, "h": 3, "k": 2}
    tensor = Tensor(order, sizes, width, 1)
    memory = np.zeros(tensor.memory.nbytes + 8, np.uint8)
    moved = memory[shift : shift + tensor.memory.nbytes]
    moved[:] = tensor.memory.reshape(-1)
    strides, by = tensor.strides(split), int(moved.ctypes.data) - int(tensor.memory.ctypes.data)
    pages = np.array([5, 0, 2] if split > 1 else [3, 0, 2], np.int32)
    packed = tensor.pages(split, 1, 2)[:, pages]
    positions = 1000 * width, 1000 * width + packed[0].nbytes  # behind other planes of the part
    blocks = [(tensor.address(1, number) + by, at, 0, 0, 3) for number, at in enumerate(positions)]
    batch = Batch(Geometry(4, 2, width, strides, None), np.array(blocks))
    total = np.zeros(1, np.uint32)
    launch(batch, pages, SMALL, total=total)
    assert total[0] == bytes_checksum(packed.reshape(-1), checksum_word(width), positions[0])
    assert np.array_equal(moved, tensor.memory.reshape(-1))
