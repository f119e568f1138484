"""Runs of bytes that are contiguous on both sides, for pairs of layouts."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.parallel import LocalShard, ParallelConfig, RankCoord, local_shards
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import ModelShape, Plane, Segment
from kvctl_agent.memory.addresses import PlaneStrides, SegmentAddresses
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.paths.base import Path
from kvctl_agent.paths.bulk import BulkPath
from kvctl_agent.paths.contiguous_runs import PlaneRuns, segment_runs, whole_pages
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.paths.slice import SlicePath
from tests.kvctl_agent.paths.test_layout_pairs import Copies, connect, order_of, random_pair

ROWS, HEADS, BYTES = 4, 3, 8
NHD = PlaneStrides(96, 24, 8)
HND = PlaneStrides(96, 8, 32)
FUSED = PlaneStrides(192, 16, 64)
PAIRED = PlaneStrides(192, 24, 8)


def addresses(strides: PlaneStrides, split: int = 1) -> SegmentAddresses:
    shard = LocalShard(Segment(0, "kv", 0, 1, HEADS, (Plane("k", ROWS, BYTES),)), 0, 1, 0, HEADS)
    return SegmentAddresses(shard, 8, ((4096,),), (strides,), split)


def runs(source: PlaneStrides, target: PlaneStrides, heads: int = HEADS, splits: tuple[int, int] = (1, 1)) -> PlaneRuns:
    (found,) = segment_runs(addresses(source, splits[0]), addresses(target, splits[1]), heads)
    return found


@pytest.mark.parametrize(
    ("source", "target", "heads", "expected"),
    [
        (NHD, NHD, 3, (4, 3)),
        (NHD, NHD, 2, (1, 2)),
        (HND, HND, 3, (4, 3)),
        (HND, HND, 2, (4, 2)),  # heads of a page are adjacent
        (NHD, HND, 3, (1, 1)),
        (NHD, HND, 1, (1, 1)),
        (HND, HND, 1, (4, 1)),
        (FUSED, FUSED, 3, (1, 1)),
        (PAIRED, NHD, 3, (4, 3)),
    ],
)
def test_a_run_is_as_large_as_both_sides_allow(
    source: PlaneStrides, target: PlaneStrides, heads: int, expected: tuple[int, int]
) -> None:
    found = runs(source, target, heads)
    assert (found.rows, found.heads) == expected
    assert found.per_page == ROWS * heads // (expected[0] * expected[1])
    assert runs(target, source, heads)[:3] == found[:3]
    assert whole_pages((found,)) == (found.per_page == 1)


def test_staging_has_the_order_of_nhd() -> None:
    found = runs(HND, NHD)
    assert (found.gather_bytes, found.scatter_bytes, found.page_bytes) == (BYTES, 96, 96)
    found = runs(NHD, FUSED, heads=2)
    assert (found.gather_bytes, found.scatter_bytes, found.page_bytes) == (16, BYTES, 64)


@pytest.mark.parametrize(
    ("source", "target", "heads", "splits", "adjacent"),
    [
        (NHD, NHD, 3, (1, 1), True),
        (NHD, NHD, 2, (1, 1), False),
        (PAIRED, NHD, 3, (1, 1), False),
        (PlaneStrides(192, 24, 8), NHD, 3, (2, 1), True),  # a page of 8 rows, in halves
        (PlaneStrides(384, 24, 8), NHD, 3, (2, 1), False),
    ],
)
def test_pages_are_adjacent_if_nothing_is_between_them(
    source: PlaneStrides, target: PlaneStrides, heads: int, splits: tuple[int, int], adjacent: bool
) -> None:
    assert runs(source, target, heads, splits).adjacent == adjacent
    assert runs(target, source, heads, splits[::-1]).adjacent == adjacent


def test_path_bulk_refuses_pages_that_are_not_one_run() -> None:
    random, refused = np.random.default_rng(1), 0
    for _ in range(300):
        pair = random_pair(random)
        connection: PeerConnection = connect(Copies(pair), pair)
        if pair.share.whole_rows and not whole_pages(connection.segments[0].runs(pair.share.heads)):
            refused += 1
            with pytest.raises(MemoryLayoutError, match="path bulk needs contiguous pages in the same order"):
                BulkPath().start(connection, order_of(pair))
    assert refused > 20


class TestAdjacentPlanes:
    """Pools of one tensor of K and V: 5 pages of 4 tokens, 2 layers, 3 heads of 8 bytes."""

    def descriptors(self, layouts: tuple[str, str], src: Any, dst: Any, heads: int = 3, scale_bytes: int = 0) -> int:
        """Sends a part from one allocated pool to another, compares the memory, and returns the descriptors."""
        model = ModelShape(2, HEADS, 8, 8, 1, k_scale_bytes=scale_bytes, v_scale_bytes=scale_bytes)
        shards = local_shards(model, ROWS, ParallelConfig(), RankCoord(0, 0, 0, 0))
        share = TransferSlice(0, 0, 0, 0, HEADS - heads, heads, 0, 2, HEADS, HEADS, shards[0].segment.page_head_bytes)
        with (
            closing(KVPool.allocate(shards, ROWS, 8, layout=layouts[0])) as source,
            closing(KVPool.allocate(shards, ROWS, 8, layout=layouts[1])) as target,
        ):
            whole = source.regions()[0].array()
            whole[:] = np.random.default_rng(0).integers(0, 256, whole.nbytes, np.uint8)
            pair: Any = SimpleNamespace(
                source=SimpleNamespace(raw=whole),
                target=SimpleNamespace(raw=target.regions()[0].array()),
                staged=lambda: bytes(share.payload_bytes(len(src), 2)),
            )
            transport: Any = Copies(pair)
            connection = PeerConnection("reader", transport, source, target.addresses(), 0)
            src_pages, dst_pages = (np.array(pages, np.int32) for pages in (src, dst))
            part: Any = SimpleNamespace(layers=(0, 2), share=share, src_pages=src_pages, dst_pages=dst_pages)
            whole_page = share.whole_rows and whole_pages(connection.segments[0].runs(heads))
            path: Path = BulkPath() if whole_page else SlicePath()
            path.start(connection, order_of(part))
            for layer in range(2):
                for plane in range(len(shards[0].segment.planes)):
                    wanted = np.zeros_like(target.segments[0].elements(layer, plane))
                    sent = source.segments[0].elements(layer, plane)[src][:, :, :heads]
                    wanted[dst, :, HEADS - heads :] = sent
                    assert np.array_equal(target.segments[0].elements(layer, plane), wanted)
            count: int = transport.descriptors
            return count

    @pytest.mark.parametrize(
        ("layouts", "heads", "of_a_page"),
        [
            (("nhd", "nhd"), 3, 2),
            (("fused", "fused"), 3, 1),
            (("fused-nhd", "fused-nhd"), 3, 1),
            (("kv-inner", "kv-inner"), 3, 1),
            (("block-outer", "kv-inner"), 3, 1),
            (("fused", "fused"), 2, 1),
            (("fused", "fused-nhd"), 3, ROWS * 3),
            (("fused", "nhd"), 3, 2 * ROWS * 3),
            (("kv-inner", "kv-inner"), 2, 2 * ROWS),
        ],
    )
    def test_adjacent_k_and_v_are_one_descriptor(self, layouts: tuple[str, str], heads: int, of_a_page: int) -> None:
        scales = 2 * 3  # those of both planes, of three pages that are not consecutive
        assert self.descriptors(layouts, [1, 4, 6], [5, 3, 0], heads, 2) == 2 * (3 * of_a_page + scales)

    def test_consecutive_pages_of_k_and_v_are_one_descriptor(self) -> None:
        assert self.descriptors(("kv-inner", "kv-inner"), [1, 2, 3], [4, 5, 6]) == 2
        assert self.descriptors(("nhd", "nhd"), [1, 2, 3], [4, 5, 6]) == 2 * 2
