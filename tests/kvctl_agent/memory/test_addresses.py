"""Pool addresses: the wire format, the address arithmetic, and arbitrary values from a peer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.errors import MemoryLayoutError, RemoteProtocolError
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.layout.shape import Plane, Segment
from kvctl_agent.memory.addresses import PlaneStrides, PoolAddresses, SegmentAddresses

K, V = 0, 1


def row_addrs(where: SegmentAddresses, layer: int, plane: int, pages: np.ndarray, head: int) -> list[int]:
    """Addresses of one head in every row of `pages`."""
    base = where.bases[layer - where.shard.layer_lo][plane] + head * where.strides[plane].head
    rows = range(where.shard.segment.planes[plane].rows)
    offsets = where.page_steps(plane).offsets(pages.astype(np.int32)).tolist()
    return [base + offset + row * where.strides[plane].row for offset in offsets for row in rows]


class TestAddresses:
    HELD = (
        LocalShard(Segment(0, "kv", 0, 9, 4, (Plane("k", 4, 12), Plane("v", 4, 20))), 7, 9, 0, 2),
        LocalShard(Segment(1, "conv", 0, 3, 2, (Plane("conv", 3, 8),), (1, 7, 8), None), 1, 3, 0, 2),
        LocalShard(Segment(2, "swa", 0, 1, 1, (Plane("swa", 1, 8),), (2,), None), 1, 1, 0, 1),
    )
    WHERE = PoolAddresses(
        (
            SegmentAddresses(HELD[0], 3, ((1000, 5000), (9000, 13000))),
            SegmentAddresses(HELD[1], 6, ((20000,), (30000,))),
            SegmentAddresses(HELD[2], 0, ()),
        ),
        aux_bases=(77,),
        aux_row_bytes=(24,),
        aux_slots=5,
    )

    def test_a_row_is_where_page_row_and_head_say(self) -> None:
        pages = np.array([2, 0])
        for segment, plane, layer, rows, base, row in (
            (0, K, 8, 4, 9000, 12),
            (0, V, 8, 4, 13000, 20),
            (1, 0, 1, 3, 20000, 8),
        ):
            where = self.WHERE.segments[segment]
            expected = [base + ((page * rows + number) * 2 + 1) * row for page in (2, 0) for number in range(rows)]
            assert row_addrs(where, layer, plane, pages, head=1) == expected
            assert where.page_bytes(plane) == rows * 2 * row

    def test_the_wire_form_is_plain_and_comes_back_equal(self) -> None:
        wire = self.WHERE.to_wire()
        assert wire == {
            "num_pages": 3,
            "slots": [3, 6, 0],
            "bases": [1000, 5000, 9000, 13000, 20000, 30000],
            "strides": [96, 24, 12, 160, 40, 20, 48, 16, 8, 8, 8, 8],
            "aux_bases": [77],
            "aux_row_bytes": [24],
            "aux_slots": 5,
        }
        assert PoolAddresses.from_wire(wire, self.HELD) == self.WHERE

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_pages": None}, "num_pages is None"),
            ({"num_pages": 2}, "kv has 3 pages, but num_pages is 2"),
            ({"aux_slots": True}, "aux_slots is True"),
            ({"aux_bases": [-1]}, "aux_bases is not a list of unsigned integers"),
            ({"aux_row_bytes": [(1 << 63) - 1]}, "the aux rows end beyond 64 bits"),
            ({"aux_bases": [77, 88]}, "2 aux_bases, 1 aux_row_bytes, 5 aux_slots"),
            ({"aux_slots": 0}, "1 aux_bases, 1 aux_row_bytes, 0 aux_slots"),
            ({"num_pages": 1 << 63}, "num_pages is"),
            ({"bases": [1.5, 2, 3, 4, 5, 6]}, "bases is not a list"),
            ({"bases": 7}, "bases is not a list"),
            ({"bases": []}, "0 bases, but that rank holds 6 planes"),
            ({"bases": [1] * 7}, "7 bases"),
            ({"bases": [1, 2, 3, 4, 5, (1 << 63) - 1]}, "conv ends beyond 64 bits"),
            ({"slots": [3, 6]}, "2 slots, but the model has 3 segments"),
            ({"slots": [3, "6", 0]}, "slots is not a list"),
            ({"slots": [3, 0, 0]}, "slots of conv is 0, but that rank holds 2 of its layers"),
            ({"slots": [3, 6, 1]}, "slots of swa is 1, but that rank holds 0"),
            ({"slots": [3, 1 << 60, 0]}, "conv ends beyond 64 bits"),
            ({"strides": [96, 24, 12]}, "3 strides, but the model has 12"),
            ({"strides": "many"}, "strides is not a list"),
            ({"strides": [-1] * 12}, "strides is not a list"),
            ({"strides": [0] * 12}, "kv: elements of plane k overlap: 12 bytes at strides of 0"),
            ({"strides": [96, 11, 24, *[1 << 40] * 9]}, "kv: elements of plane k overlap"),
            ({"strides": [95, 24, 12, *[1 << 40] * 9]}, "kv: elements of plane k overlap"),
            ({"strides": [1 << 62, 24, 12, 160, 40, 20, 48, 16, 8, 8, 8, 8]}, "kv ends beyond 64 bits"),
            ({"surprise": 1}, "surprise"),
        ],
    )
    def test_a_malformed_wire_form_is_refused_by_field(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(RemoteProtocolError, match=message):
            PoolAddresses.from_wire({**self.WHERE.to_wire(), **change}, self.HELD)

    def test_a_missing_field_is_refused_by_name(self) -> None:
        wire = self.WHERE.to_wire()
        del wire["aux_slots"]
        with pytest.raises(RemoteProtocolError, match="aux_slots"):
            PoolAddresses.from_wire(wire, self.HELD)

    @settings(max_examples=300, deadline=None)
    @given(data=st.data())
    def test_a_hostile_wire_form_is_refused_or_safe_to_reckon_with(self, data: st.DataObject) -> None:
        """Any accepted value has addresses below 64 bits, and pages or items wherever there are layers."""
        number = st.one_of(st.integers(-2, 9), st.integers(0, 1 << 64), st.none(), st.text(max_size=2), st.floats())
        lists = st.one_of(
            number, st.lists(number, max_size=7), st.lists(st.integers(0, 1 << 63), min_size=6, max_size=6)
        )
        wire = self.WHERE.to_wire()
        for name in data.draw(st.lists(st.sampled_from([*wire, "more"]), max_size=3)):
            wire[name] = data.draw(lists if name in ("slots", "bases", "strides") else number)
        try:
            where = PoolAddresses.from_wire(wire, self.HELD)
        except RemoteProtocolError:
            return
        assert where.to_wire() == wire
        for segment in where.segments:
            assert bool(segment.num_slots) == bool(segment.bases) == bool(segment.shard.num_layers)
            for layer in segment.bases:
                for plane, base in enumerate(layer):
                    assert 0 <= base + segment.extent(plane) < 1 << 63
                    assert segment.extent(plane) >= segment.num_slots * segment.page_bytes(plane)


LAYOUTS = {
    "nhd": PlaneStrides(4 * 3 * 8, 3 * 8, 8),
    "hnd": PlaneStrides(4 * 3 * 8, 8, 4 * 8),
    "fused rows": PlaneStrides(4 * 3 * 20, 20, 4 * 20),
    "block-outer": PlaneStrides(7 * 4 * 3 * 8, 3 * 8, 8),
    "heads outermost": PlaneStrides(4 * 8, 8, 6 * 4 * 8),
}


def strided(layout: str) -> SegmentAddresses:
    """Six pages of four rows of three heads of eight bytes."""
    shard = LocalShard(Segment(0, "kv", 0, 1, 3, (Plane("k", 4, 8),)), 0, 1, 0, 3)
    return SegmentAddresses(shard, 6, ((1000,),), (LAYOUTS[layout],))


class TestStrides:
    @pytest.mark.parametrize("split", [1, 2, 4])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_transfer_page_is_a_part_of_an_engine_page(self, layout: str, split: int) -> None:
        whole = strided(layout)
        segment = whole.shard.segment
        planes = (Plane("k", 4 // split, 8),)
        where = whole.at(whole.shard._replace(segment=replace(segment, planes=planes)), split)
        assert (where.num_slots, where.extent(0)) == (6 * split, whole.extent(0))
        for head in range(3):
            rows = row_addrs(whole, 0, 0, np.arange(6), head)
            assert row_addrs(where, 0, 0, np.arange(6 * split), head) == rows
        page, row, head = LAYOUTS[layout]
        assert rows[4 * 5 + 3] == 1000 + 5 * page + 3 * row + 2 * head
        assert where.extent(0) == rows[-1] + 8 - 1000

    def test_strides_travel_and_split_does_not(self) -> None:
        whole = PoolAddresses((strided("hnd"),), (), (), 0)
        shards = tuple(segment.shard for segment in whole.segments)
        halves = tuple(shard._replace(segment=replace(shard.segment, planes=(Plane("k", 2, 8),))) for shard in shards)
        assert PoolAddresses.from_wire(whole.to_wire(), shards).at(halves, 2) == whole.at(halves, 2)
        with pytest.raises(MemoryLayoutError, match="a page of k has 4 rows, which are not 2 transfer pages of 4"):
            whole.at(shards, 2)
