"""Gather and scatter against an oracle of plain loops, and the layout of a part against its definition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.copy import gather, gather_piece, scatter, scatter_piece
from kvctl_agent.memory.parts import PartLayout, Piece, Span
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.rows import RowIndex
from kvctl_agent.memory.slab import Bytes


@contextmanager
def filled_pool(
    layers: int, pages: int, page_size: int, heads: int, k_dim: int, v_dim: int, dtype_bytes: int, seed: int = 1
) -> Iterator[KVPool]:
    """A pool of random bytes."""
    pool = KVPool.allocate(layers, pages, page_size, heads, heads, k_dim, v_dim, dtype_bytes)
    random = np.random.default_rng(seed)
    for layer in range(layers):
        for kv in (0, 1):
            block = pool.block(layer, kv)
            block[:] = random.integers(0, 256, block.nbytes, dtype=np.uint8)
    try:
        yield pool
    finally:
        pool.close()


def row(pool: KVPool, layer: int, kv: int, page: int, token: int, head: int) -> slice:
    """Where one head of one token lies in its block, by the definition of NHD."""
    row_bytes = (pool.v_dim if kv else pool.k_dim) * pool.dtype_bytes
    start = ((page * pool.page_size + token) * pool.heads + head) * row_bytes
    return slice(start, start + row_bytes)


def part_rows(pool: KVPool, layers: range, pages: list[int], head: int, heads: int) -> Iterator[tuple[int, int, slice]]:
    """(layer, kv, place in the block) of every row of a part, in the order the region has."""
    for layer in layers:
        for kv in (0, 1):
            for page in pages:
                for token in range(pool.page_size):
                    for each in range(head, head + heads):
                        yield layer, kv, row(pool, layer, kv, page, token, each)


def layout_of(pool: KVPool, layers: range, pages: list[int], heads: int) -> PartLayout:
    k_bytes, v_bytes = pool.k_dim * pool.dtype_bytes, pool.v_dim * pool.dtype_bytes
    return PartLayout(layers.start, len(layers), len(pages), pool.page_size, heads, k_bytes, v_bytes)


def gathered(pool: KVPool, layers: range, pages: list[int], head: int, heads: int, target_bytes: int) -> Bytes:
    part = layout_of(pool, layers, pages, heads)
    rows = RowIndex(pool, pages, head, heads)
    region = np.zeros(part.region_bytes, dtype=np.uint8)
    for piece in part.pieces(target_bytes):
        assert gather_piece(piece, rows, region[piece.offset :]) == piece.nbytes
    return region[: part.nbytes]


# Heads of the pool and a slice of them: whole, aligned, unaligned, coprime, single, at either end.
SLICES = [(8, 0, 8), (8, 2, 2), (8, 3, 2), (8, 5, 3), (8, 7, 1), (1, 0, 1), (6, 2, 4), (5, 0, 3), (3, 1, 2)]
# A single page, scattered, repeated, one run, several runs, descending.
PAGES = [[3], [5, 0, 9, 2], [4, 4, 1, 4], [2, 3, 4, 5], [7, 8, 1, 2, 3, 0], [3, 2, 1, 0]]


@pytest.mark.parametrize("pages", PAGES, ids=str)
@pytest.mark.parametrize(("pool_heads", "head", "heads"), SLICES)
def test_gather_reads_what_plain_loops_read(pool_heads: int, head: int, heads: int, pages: list[int]) -> None:
    with filled_pool(3, 10, 4, pool_heads, k_dim=6, v_dim=10, dtype_bytes=2) as pool:
        oracle = b"".join(
            pool.block(layer, kv)[place].tobytes()
            for layer, kv, place in part_rows(pool, range(1, 3), pages, head, heads)
        )
        for target_bytes in (1, 200, 1 << 20):
            assert gathered(pool, range(1, 3), pages, head, heads, target_bytes).tobytes() == oracle


@pytest.mark.parametrize("pages", [pages for pages in PAGES if len(set(pages)) == len(pages)], ids=str)
@pytest.mark.parametrize(("pool_heads", "head", "heads"), SLICES)
def test_scatter_writes_what_plain_loops_write_and_nothing_else(
    pool_heads: int, head: int, heads: int, pages: list[int]
) -> None:
    for target_bytes in (1, 200, 1 << 20):
        with filled_pool(3, 10, 4, pool_heads, k_dim=6, v_dim=10, dtype_bytes=2) as pool:
            part = layout_of(pool, range(1, 3), pages, heads)
            region = np.random.default_rng(2).integers(0, 256, part.region_bytes, dtype=np.uint8)
            oracle = {(layer, kv): pool.block(layer, kv).copy() for layer in range(3) for kv in (0, 1)}
            at = 0
            for layer, kv, place in part_rows(pool, range(1, 3), pages, head, heads):
                size = place.stop - place.start
                oracle[layer, kv][place] = region[at : at + size]
                at += size
            assert at == part.nbytes
            rows = RowIndex(pool, pages, head, heads)
            for piece in part.pieces(target_bytes):
                assert scatter_piece(piece, rows, region[piece.offset :]) == piece.nbytes
            for (layer, kv), block in oracle.items():
                assert pool.block(layer, kv).tobytes() == block.tobytes()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_kernels_work_on_torch_tensors_of_any_element_size(dtype: torch.dtype) -> None:
    k = [torch.randint(0, 100, (12, 4, 8)).to(dtype)]
    v = [torch.randint(0, 100, (12, 4, 16)).to(dtype)]
    pool = KVPool.from_tensors(k, v, page_size=4, total_kv_heads=8)
    rows = RowIndex(pool, torch.tensor([2, 0]), 1, 2)
    for kv, tensor in enumerate((k[0], v[0])):
        expected = tensor.view(3, 4, 4, -1)[[2, 0], :, 1:3].contiguous()
        out = np.zeros(expected.numel() * dtype.itemsize, dtype=np.uint8)
        gather(Span(0, kv, 0, 2), rows, out)
        assert out.tobytes() == expected.view(torch.uint8).numpy().tobytes()
        scatter(Span(0, kv, 0, 2), rows, np.zeros_like(out))
        assert not tensor.view(3, 4, 4, -1)[[2, 0], :, 1:3].any()
        assert tensor.view(3, 4, 4, -1)[1].any(), "a page that was not named stays"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_gathered_here_and_scattered_there_reads_the_same(data: st.DataObject) -> None:
    """Two pools of different page numbers, pipeline offsets and local heads, as prefill and decode are."""
    heads = data.draw(st.integers(1, 4))
    sides = [(heads + data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2))) for _ in range(2)]
    (from_heads, from_layer), (to_heads, to_layer) = sides
    from_head, to_head = (data.draw(st.integers(0, total - heads)) for total, _ in sides)
    k_dim, v_dim, size = (data.draw(st.sampled_from(some)) for some in ([4, 3], [4, 5], [1, 2, 4]))
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    layers = data.draw(st.integers(1, 2))
    numbers = st.lists(st.integers(0, 11), min_size=1, max_size=8, unique=True)
    source_pages = data.draw(numbers)
    target_pages = data.draw(st.permutations(range(12)))[: len(source_pages)]
    piece_bytes = data.draw(st.integers(1, 2000))
    with (
        filled_pool(from_layer + layers, 12, page_size, from_heads, k_dim, v_dim, size, seed=1) as source,
        filled_pool(to_layer + layers, 12, page_size, to_heads, k_dim, v_dim, size, seed=2) as target,
    ):
        source_layers = range(from_layer, from_layer + layers)
        target_layers = range(to_layer, to_layer + layers)
        region = gathered(source, source_layers, source_pages, from_head, heads, piece_bytes)
        rows = RowIndex(target, target_pages, to_head, heads)
        for piece in layout_of(target, target_layers, target_pages, heads).pieces(piece_bytes):
            scatter_piece(piece, rows, region[piece.offset :])
        there = gathered(target, target_layers, target_pages, to_head, heads, piece_bytes)
        assert there.tobytes() == region.tobytes()


def test_long_runs_of_pages_are_found_and_copied_as_runs() -> None:
    with filled_pool(1, 200, 16, 4, k_dim=64, v_dim=64, dtype_bytes=2) as pool:
        pages = [*range(100, 180), *range(10, 90)]
        for head, heads in ((0, 4), (1, 2)):
            rows = RowIndex(pool, pages, head, heads)
            assert rows.as_runs
            assert list(rows.runs(0, 160)) == [(100, 0, 80), (10, 80, 160)]
            assert list(rows.runs(70, 85)) == [(170, 0, 10), (10, 10, 15)]
            assert list(rows.runs(80, 81)) == [(10, 0, 1)]
            region = gathered(pool, range(1), pages, head, heads, 1 << 16)
            blocks = [pool.block(0, kv).reshape(200, 16, 4, 128)[pages, :, head : head + heads] for kv in (0, 1)]
            assert region.tobytes() == b"".join(block.tobytes() for block in blocks)
        assert not RowIndex(pool, pages[::-1], 0, 4).as_runs


class TestRefusals:
    @pytest.fixture
    def pool(self) -> Iterator[KVPool]:
        with filled_pool(2, 10, 4, 4, k_dim=8, v_dim=8, dtype_bytes=2) as pool:
            yield pool

    @pytest.mark.parametrize(
        ("pages", "head", "heads", "message"),
        [
            ([1, 10], 0, 4, "page 10 is outside the pool of 10 pages"),
            ([1, -1], 0, 4, "page -1 is outside"),
            (np.array([1 << 63], dtype=np.uint64), 0, 4, "page 9223372036854775808 is outside"),
            ([], 0, 4, "non-empty"),
            ([1.0], 0, 4, "integers"),
            ([[1]], 0, 4, r"\(1, 1\)"),
            ([1], 3, 2, r"heads \[3, 5\) are outside the 4 heads"),
            ([1], -1, 2, r"heads \[-1, 1\)"),
            ([1], 0, 0, r"heads \[0, 0\)"),
        ],
    )
    def test_rows_outside_the_pool(self, pool: KVPool, pages: list[int], head: int, heads: int, message: str) -> None:
        with pytest.raises(MemoryLayoutError, match=message):
            RowIndex(pool, pages, head, heads)

    def test_spans_outside_the_part_or_the_pool(self, pool: KVPool) -> None:
        rows = RowIndex(pool, [1, 5], 0, 2)
        out = np.zeros(4096, dtype=np.uint8)
        for copy in (gather, scatter):
            for page_lo, page_hi in ((0, 3), (1, 1), (-1, 1)):
                with pytest.raises(MemoryLayoutError, match="outside the 2 pages"):
                    copy(Span(0, 0, page_lo, page_hi), rows, out)
            with pytest.raises(MemoryLayoutError, match=r"layer=2.* lies outside the pool's 2 layers"):
                copy(Span(2, 0, 0, 1), rows, out)

    def test_staging_that_is_short_or_not_flat_bytes(self, pool: KVPool) -> None:
        rows, span = RowIndex(pool, [1, 5], 0, 2), Span(0, 0, 0, 2)
        need = 2 * 4 * 2 * 16
        for staging in (
            np.zeros(need - 1, dtype=np.uint8),
            np.zeros((need, 1), dtype=np.uint8),
            np.zeros(need, dtype=np.int64),
            np.zeros(2 * need, dtype=np.uint8)[::2],
        ):
            for copy in (gather, scatter):
                with pytest.raises(MemoryLayoutError, match=f"needs {need} contiguous uint8"):
                    copy(span, rows, staging)


class TestPartLayout:
    def test_blocks_follow_layer_then_k_before_v(self) -> None:
        part = PartLayout(5, 2, 3, 4, 2, k_row_bytes=10, v_row_bytes=6)
        assert [part.block(layer, kv) for layer in (5, 6) for kv in (0, 1)] == [
            (0, 240), (240, 144), (384, 240), (624, 144),
        ]  # fmt: skip
        assert part.nbytes == 768
        assert part.region_bytes == 768
        assert PartLayout(0, 1, 1, 1, 1, 1, 1).region_bytes == 256
        with pytest.raises(MemoryLayoutError, match=r"layer 7 is not in the part's layers \[5, 7\)"):
            part.block(7, 0)
        with pytest.raises(MemoryLayoutError, match="positive sizes"):
            PartLayout(0, 0, 3, 4, 2, 10, 6)

    @settings(max_examples=200, deadline=None)
    @given(
        sizes=st.tuples(*[st.integers(0, 3)] + [st.integers(1, 6)] * 6),
        target_bytes=st.integers(1, 3000),
    )
    def test_pieces_tile_the_region_in_order_within_the_target(
        self, sizes: tuple[int, int, int, int, int, int, int], target_bytes: int
    ) -> None:
        part = PartLayout(*sizes)
        at = 0
        for piece in part.pieces(target_bytes):
            assert piece.offset == at
            for span in piece.spans:
                block, _ = part.block(span.layer, span.kv)
                assert block + span.page_lo * part.page_bytes(span.kv) == at
                at += (span.page_hi - span.page_lo) * part.page_bytes(span.kv)
            assert piece.offset + piece.nbytes == at
            one_page = piece.spans[0].page_hi - piece.spans[0].page_lo == 1
            assert piece.nbytes <= target_bytes or (len(piece.spans) == 1 and one_page)
        assert at == part.nbytes

    def test_a_large_block_is_split_evenly_and_small_ones_are_grouped(self) -> None:
        large = PartLayout(0, 1, 10, 1, 1, k_row_bytes=100, v_row_bytes=10)
        assert [piece.nbytes for piece in large.pieces(900)] == [500, 500, 100]
        small = PartLayout(0, 3, 1, 1, 1, k_row_bytes=10, v_row_bytes=10)
        assert small.pieces(40) == (
            Piece(0, 40, (Span(0, 0, 0, 1), Span(0, 1, 0, 1), Span(1, 0, 0, 1), Span(1, 1, 0, 1))),
            Piece(40, 20, (Span(2, 0, 0, 1), Span(2, 1, 0, 1))),
        )
