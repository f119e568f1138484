"""Runs of bytes that are contiguous on both sides, for pairs of layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.layout.shape import Plane, Segment
from kvctl_agent.memory.addresses import PlaneStrides, SegmentAddresses
from kvctl_agent.paths.bulk import BulkPath
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.paths.runs import PlaneRuns, segment_runs, whole_pages
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


def test_single_heads_of_tokens_are_sent_by_address_and_other_runs_by_number() -> None:
    """A list of all single heads of a pool may have tens of millions of entries."""

    class Recorder(Copies):
        prepared = 0

        def prepare_local(self, addrs: Any, sizes: Any) -> Any:
            self.prepared += 1
            return super().prepare_local(addrs, sizes)

    random = np.random.default_rng(2)
    found = set()
    for _ in range(100):
        pair = random_pair(random)
        recorder = Recorder(pair)
        connection = connect(recorder, pair)
        SlicePath().start(connection, order_of(pair))
        planes = connection.segments[0].local.shard.segment.planes
        single = any(
            each.per_page > plane.rows
            for each, plane in zip(connection.segments[0].runs(pair.share.heads), planes, strict=True)
        )
        assert recorder.prepared == (not single)
        found.add(single)
    assert found == {True, False}
