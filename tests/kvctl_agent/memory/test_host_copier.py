from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.layout.shape import Plane, Segment
from kvctl_agent.memory.allocations import Bytes
from kvctl_agent.memory.copier import LandedPart
from kvctl_agent.memory.host_copier import CopyPool, HostCopier, gather_piece
from kvctl_agent.memory.part_layout import PartLayout, Piece, Span
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.region import MemorySpan
from kvctl_agent.memory.segment import RowIndex, SegmentMemory
from tests.support.pools import WIDE_K, filled


def scatter_part(rows: RowIndex, part: PartLayout, region: Bytes) -> None:
    wake_fd = os.eventfd(0)
    pool = CopyPool(0, wake_fd)
    os.close(wake_fd)  # the pool has a copy of it
    copy = HostCopier(pool).scatter([LandedPart(rows, part, MemorySpan(0, region.nbytes, region))])
    while not copy.done():
        pass
    pool.close()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_kernels_work_on_torch_tensors_of_any_element_size(dtype: torch.dtype) -> None:
    k = [torch.randint(0, 100, (12, 4, 8)).to(dtype)]
    v = [torch.randint(0, 100, (12, 4, 16)).to(dtype)]
    pool = KVPool.from_tensors(k, v, page_size=4, total_kv_heads=8)
    rows = RowIndex(pool.segments[0], torch.tensor([2, 0]), 1, 2)
    part = pool.segments[0].part_layout(0, 1, 2, 2)
    expected = [tensor.view(3, 4, 4, -1)[[2, 0], :, 1:3].contiguous().view(torch.uint8).numpy() for tensor in (*k, *v)]
    out = np.zeros(part.nbytes, dtype=np.uint8)
    (piece,) = part.pieces()
    gather_piece(piece, rows, out)
    assert out.tobytes() == b"".join(each.tobytes() for each in expected)
    scatter_part(rows, part, np.zeros(part.region_bytes, np.uint8))
    for tensor in (*k, *v):
        assert not tensor.view(3, 4, 4, -1)[[2, 0], :, 1:3].any()
        assert tensor.view(3, 4, 4, -1)[1].any(), "a page that was not named stays"


class TestRefusals:
    @pytest.fixture
    def memory(self) -> Iterator[SegmentMemory]:
        with filled(range(3, 5), 10, 4, (Plane("k", 4, 16), Plane("v", 4, 16))) as memory:
            yield memory

    @pytest.mark.parametrize(
        ("pages", "head", "heads", "message"),
        [
            ([1, 10], 0, 4, "kv: page 10 is outside the pool of 10 pages"),
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
    def test_rows_outside_the_pool(
        self, memory: SegmentMemory, pages: list[int], head: int, heads: int, message: str
    ) -> None:
        with pytest.raises(MemoryLayoutError, match=message):
            RowIndex(memory, pages, head, heads)

    @pytest.mark.parametrize(("lo", "hi", "asked"), [(2, 4, "layers 2-3"), (4, 6, "layers 4-5"), (5, 6, "layers 5")])
    def test_layers_of_another_stage(self, memory: SegmentMemory, lo: int, hi: int, asked: str) -> None:
        with pytest.raises(MemoryLayoutError, match=f"kv: {asked} requested, but this rank has layers 3-4"):
            memory.part_layout(lo, hi, 1, 1)
        with pytest.raises(MemoryLayoutError, match="but this rank has layers 3-4"):
            memory.block(hi - 1 if lo > 3 else lo, 0)

    def test_a_segment_of_which_the_stage_has_no_layer(self) -> None:
        memory = SegmentMemory(LocalShard(Segment(1, "draft", 8, 9, 4, WIDE_K), 8, 8, 0, 4), 0, ())
        for asked in (
            lambda: memory.block(8, 0),
            lambda: memory.check_heads(0, 4),
            lambda: memory.part_layout(8, 9, 1, 4),
        ):
            with pytest.raises(MemoryLayoutError, match=r"draft: .* this rank's pipeline stage has none of its layers"):
                asked()


class TestPartLayout:
    def test_blocks_follow_layer_then_plane(self) -> None:
        part = PartLayout(5, 2, 3, (80, 48))
        assert [part.block(layer, plane) for layer in (5, 6) for plane in (0, 1)] == [
            (0, 240), (240, 144), (384, 240), (624, 144),
        ]  # fmt: skip
        assert part.nbytes == 768
        assert part.region_bytes == 768
        assert PartLayout(0, 1, 1, (1, 1)).region_bytes == 256
        with pytest.raises(MemoryLayoutError, match=r"layer 7 is not in the part's layers 5-6"):
            part.block(7, 0)
        for wrong in ((0, 3, (80, 48)), (2, 0, (80, 48)), (2, 3, (80, 0))):
            with pytest.raises(MemoryLayoutError, match="positive sizes"):
                PartLayout(0, *wrong)

    @settings(max_examples=200, deadline=None)
    @given(
        sizes=st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 6)),
        page_bytes=st.lists(st.integers(1, 200), min_size=1, max_size=4).map(tuple),
        target_bytes=st.integers(1, 3000),
    )
    def test_pieces_tile_the_region_in_order_within_the_target(
        self, sizes: tuple[int, int, int], page_bytes: tuple[int, ...], target_bytes: int
    ) -> None:
        part = PartLayout(*sizes, page_bytes)
        at = 0
        for piece in part.pieces(target_bytes):
            assert piece.offset == at
            for span in piece.spans:
                block, _ = part.block(span.layer, span.plane)
                assert block + span.page_lo * page_bytes[span.plane] == at
                at += (span.page_hi - span.page_lo) * page_bytes[span.plane]
            assert piece.offset + piece.nbytes == at
            assert all(span.page_hi - span.page_lo == part.num_pages for span in piece.spans[1:]), "whole blocks"
            one_page = piece.spans[0].page_hi - piece.spans[0].page_lo == 1
            assert piece.nbytes <= target_bytes or (len(piece.spans) == 1 and one_page)
        assert at == part.nbytes

    def test_a_large_block_is_split_evenly_and_small_ones_are_grouped(self) -> None:
        large = PartLayout(0, 1, 10, (100, 60))
        assert [piece.nbytes for piece in large.pieces(900)] == [500, 500, 600]
        small = PartLayout(0, 3, 1, (10, 10))
        assert small.pieces(40) == (
            Piece(0, 40, (Span(0, 0, 0, 1), Span(0, 1, 0, 1), Span(1, 0, 0, 1), Span(1, 1, 0, 1))),
            Piece(40, 20, (Span(2, 0, 0, 1), Span(2, 1, 0, 1))),
        )

    def test_small_blocks_ride_with_the_rest_of_a_large_one(self) -> None:
        """Scales of a long room are not pieces of their own."""
        part = PartLayout(0, 1, 10, (100, 100, 2, 2))
        assert [piece.nbytes for piece in part.pieces(900)] == [500, 500, 500, 540]
        assert part.pieces(900)[-1].spans == (Span(0, 1, 5, 10), Span(0, 2, 0, 10), Span(0, 3, 0, 10))
