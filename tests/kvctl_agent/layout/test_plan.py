"""The rules of the plan one by one; `test_plan_oracle` checks whole plans element by element."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import ParallelConfig, mix64
from kvctl_agent.layout.plan import (
    TransferSlice,
    aux_writer,
    keeper,
    opened_at,
    prefill_ranks,
    readers_of,
    slices_of_writer,
    slices_to_reader,
    state_slices_to_reader,
    transfer_slices,
    writer_cells,
)
from kvctl_agent.layout.plan_inputs import PLAN_VERSION, PlanInputs
from kvctl_agent.layout.shape import ModelShape, StateShape

SHAPE = ModelShape(num_layers=32, num_kv_heads=8, k_dim=128, v_dim=128, dtype_bytes=2)


def inputs_of(
    prefill: ParallelConfig, decode: ParallelConfig, shape: ModelShape = SHAPE, cp_mode: str = "rank0"
) -> PlanInputs:
    return PlanInputs(shape=shape, page_size=16, chunk_pages=8, prefill=prefill, decode=decode, cp_mode=cp_mode)


def legal_tps(heads: int, most: int) -> list[int]:
    return [tp for tp in range(1, most + 1) if heads % tp == 0 or tp % heads == 0]


# --- Heads. ---


def test_slices_by_writer_and_by_reader_are_the_same_plan() -> None:
    inputs = inputs_of(ParallelConfig(dp=2, tp=16), ParallelConfig(dp=2, tp=4))
    for room, decode_dp in product(range(8), range(2)):
        every = transfer_slices(inputs, room, decode_dp)
        by_writer = [s for rank in range(32) for s in slices_of_writer(inputs, room, decode_dp, rank)]
        by_reader = [s for tp in range(4) for s in slices_to_reader(inputs, room, decode_dp * 4 + tp)]
        assert set(by_writer) == set(by_reader) == set(every)
        assert len(by_writer) == len(by_reader) == len(every)


def test_the_aux_row_has_one_writer_that_also_sends_kv_and_rooms_spread_over_writers() -> None:
    inputs = inputs_of(ParallelConfig(tp=8), ParallelConfig(dp=2, tp=2))
    seen = set()
    for room, reader in product(range(200), range(4)):
        owing = sorted(s.writer for s in slices_to_reader(inputs, room, reader))
        elected = aux_writer(inputs, room, reader)
        assert elected == owing[(mix64(room) + reader) % len(owing)]
        seen.add((reader, elected))
    assert seen == {(reader, writer) for reader in range(4) for writer in range(reader % 2 * 4, reader % 2 * 4 + 4)}


def test_rooms_of_one_geometry_share_one_plan() -> None:
    plain = inputs_of(ParallelConfig(tp=4), ParallelConfig(dp=4))
    assert transfer_slices(plain, 1, 0) is transfer_slices(plain, 2**63, 0)
    replicated = inputs_of(ParallelConfig(tp=32), ParallelConfig())
    assert len({id(transfer_slices(replicated, room, 0)) for room in range(500)}) == 4


@st.composite
def sides(draw: st.DrawFn, heads: int, layers: int, most_cp: int) -> ParallelConfig:
    cuts = draw(st.lists(st.integers(1, layers - 1), max_size=5, unique=True).map(sorted)) if layers > 1 else []
    stages = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    tp = draw(st.sampled_from(legal_tps(heads, 256)))
    return ParallelConfig(
        dp=draw(st.integers(1, 3)), pp=len(stages), cp=draw(st.integers(1, most_cp)), tp=tp, stages=stages
    )


# --- Where a room is opened. ---


@pytest.mark.parametrize("room", [0, 1, 12345, 2**64 - 1])
def test_between_equal_sizes_each_rank_opens_a_room_at_its_counterpart_and_the_keeper_at_all(room: int) -> None:
    inputs = inputs_of(ParallelConfig(dp=2, tp=4), ParallelConfig(dp=3, tp=4))
    first, kept = 4 * (room % 2), keeper(inputs, room, 1)
    assert kept == 4 + mix64(room) % 4
    everywhere = tuple(range(first, first + 4))
    assert prefill_ranks(inputs, room) == everywhere
    for tp in range(4):
        assert opened_at(inputs, room, 4 + tp) == (everywhere if 4 + tp == kept else (first + tp,))
        assert readers_of(inputs, room, 1, first + tp) == {4 + tp}
        assert readers_of(inputs, room, 1, 4 - first + tp) == set(), "another dp group computes the room"


def test_rooms_spread_over_keepers() -> None:
    inputs = inputs_of(ParallelConfig(tp=4), ParallelConfig(dp=2, pp=2, tp=2))
    hits = Counter(keeper(inputs, room, 0) for room in range(2000))
    assert sorted(hits) == [0, 1, 4, 5]
    assert min(hits.values()) > 400


@settings(deadline=None)
@given(heads=st.integers(1, 64), layers=st.integers(1, 40), room=st.integers(0, 2**64 - 1), data=st.data())
def test_a_room_is_opened_wherever_anything_of_it_may_be_written_and_its_keeper_connects_all_ranks(
    heads: int, layers: int, room: int, data: st.DataObject
) -> None:
    prefill = data.draw(sides(heads, layers, most_cp=3), "prefill")
    decode = data.draw(sides(heads, layers, most_cp=2), "decode")
    conv = StateShape("conv", layers=(0,), rows=1, heads=1, head_bytes=2)
    shape = replace(SHAPE, num_kv_heads=heads, num_layers=layers, states=(conv,))
    inputs = inputs_of(prefill, decode, shape, cp_mode=data.draw(st.sampled_from(["rank0", "all", "room-hash"])))
    dp = data.draw(st.integers(0, decode.dp - 1), "dp")
    readers = [rank for rank in range(decode.size) if decode.coord(rank).dp == dp]
    opened = {reader: opened_at(inputs, room, reader) for reader in readers}
    for reader, at in opened.items():
        writers = {each.writer for each in slices_to_reader(inputs, room, reader)}
        writers |= {each.writer for each in state_slices_to_reader(inputs, room, reader)}
        assert {*writers, aux_writer(inputs, room, reader)} <= set(at)
    assert set(opened[keeper(inputs, room, dp)]) == set(prefill_ranks(inputs, room))
    assert all(prefill.coord(rank).dp == room % prefill.dp for rank in prefill_ranks(inputs, room))
    for rank in prefill_ranks(inputs, room):
        found, kept = readers_of(inputs, room, dp, rank), keeper(inputs, room, dp)
        assert found
        assert found | {kept} == {reader for reader in readers if rank in opened[reader]}


# --- Whole rows and refusals. ---


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda i: transfer_slices(i, 0, 2), "dp=2 is outside an instance with dp size 2"),
        (lambda i: transfer_slices(i, 0, -1), "dp=-1 is outside an instance with dp size 2"),
        (lambda i: slices_of_writer(i, 0, 0, 4), "rank 4 is not one of the 4 ranks"),
        (lambda i: slices_to_reader(i, 0, 2), "rank 2 is not one of the 2 ranks"),
        (lambda i: state_slices_to_reader(i, 0, 2), "rank 2 is not one of the 2 ranks"),
        (lambda i: opened_at(i, 0, 2), "rank 2 is not one of the 2 ranks"),
        (lambda i: readers_of(i, 0, 0, 4), "rank 4 is not one of the 4 ranks"),
        (lambda i: keeper(i, 0, 2), "dp=2 is outside an instance with dp size 2"),
        (lambda i: aux_writer(i, 0, -1), "rank -1 is not one of the 2 ranks"),
        (lambda i: writer_cells(i, 0, 4, 0, 1, 0), "rank 4 is not one of the 4 ranks"),
        (lambda i: writer_cells(i, 0, 0, 0, 1, 2), "prefix of 2 pages is longer than the prompt of 1"),
    ],
)
def test_ranks_that_do_not_exist_are_refused(ask: Callable[[PlanInputs], object], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        ask(inputs_of(ParallelConfig(tp=4), ParallelConfig(dp=2)))


def test_inputs_of_another_version_are_never_planned() -> None:
    with pytest.raises(
        LayoutError, match=f"plan_version {PLAN_VERSION} ≠ {PLAN_VERSION + 1}: unsupported plan version"
    ):
        transfer_slices(replace(inputs_of(ParallelConfig(), ParallelConfig()), plan_version=PLAN_VERSION + 1), 0, 0)


WHOLE = TransferSlice(
    writer=0,
    reader=0,
    segment=0,
    src_head=0,
    dst_head=0,
    heads=2,
    layer_lo=4,
    layer_hi=36,
    src_pool_heads=2,
    dst_pool_heads=2,
    page_head_bytes=16 * 512,
)


def test_whole_rows_are_exactly_what_both_pools_hold() -> None:
    assert WHOLE.whole_rows
    assert not replace(WHOLE, src_pool_heads=4).whole_rows
    assert not replace(WHOLE, dst_pool_heads=4).whole_rows
    assert not replace(WHOLE, heads=1).whole_rows


def test_payload_is_layers_by_pages_by_heads() -> None:
    assert WHOLE.num_layers == 32
    assert WHOLE.payload_bytes(64) == WHOLE.part_bytes(64) == 32 * 64 * 2 * 16 * 512
    assert WHOLE.payload_bytes(1, layers=4) == 4 * 2 * 16 * 512
    assert WHOLE.payload_bytes(0) == WHOLE.payload_bytes(5, layers=0) == 0


@pytest.mark.parametrize(("pages", "staged"), [(0, 0), (1, 256), (51, 256), (52, 512)])
def test_a_parts_staging_is_its_payload_aligned_up_to_256(pages: int, staged: int) -> None:
    odd = replace(WHOLE, layer_lo=0, layer_hi=1, heads=1, page_head_bytes=5)
    assert odd.part_bytes(pages) == staged
