"""The plan against a brute-force oracle, then its rules one by one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import grid
from kvctl_agent.layout.heads import mix64
from kvctl_agent.layout.plan import (
    PLAN_VERSION,
    Factor,
    PlanInputs,
    aux_writer,
    prefill_dp,
    shares,
    shares_of_writer,
    shares_to_reader,
)
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.layout.side import Side

SHAPE = ModelShape(num_layers=32, num_kv_heads=8, k_dim=128, v_dim=128, dtype_bytes=2)


def inputs_of(prefill: Side, decode: Side, shape: ModelShape = SHAPE, page_size: int = 16) -> PlanInputs:
    return PlanInputs(shape=shape, page_size=page_size, chunk_pages=8, prefill=prefill, decode=decode)


def legal_tps(heads: int, most: int) -> list[int]:
    return [tp for tp in range(1, most + 1) if heads % tp == 0 or tp % heads == 0]


# --- The oracle: every byte of every decode rank, written once, from a rank that holds it. ---

LAYERS, PAGE, PAGES, PREFIX, DIM_BYTES = 2, 2, 5, 1, 3
UNWRITTEN, POISON = -1, -2


def held_heads(heads: int, tp: int, rank: int) -> list[int]:
    """Which heads a rank holds, said in another way than the code says it: deal out the replicated list."""
    return np.split(np.repeat(np.arange(heads), max(1, tp // heads)), tp)[rank].tolist()


def content(heads: list[int]) -> npt.NDArray[np.int64]:
    """The true KV of these heads, [layer, token, head, byte]: every element a different number."""
    layer, token, head, byte = np.ix_(range(LAYERS), range(PAGES * PAGE), heads, range(DIM_BYTES))
    return ((layer * 1000 + token) * 1000 + head) * 10 + byte


def geometries() -> Iterator[tuple[int, Side, Side]]:
    for heads in (1, 2, 3, 4, 6, 8):
        for prefill_tp, decode_tp in product(legal_tps(heads, 12), repeat=2):
            for from_dp, to_dp in ((1, 1), (2, 1), (1, 2), (3, 2)):
                yield heads, Side(dp=from_dp, tp=prefill_tp), Side(dp=to_dp, tp=decode_tp)
    yield 24, Side(tp=6), Side(tp=4)
    yield 24, Side(tp=4), Side(tp=6)
    yield 12, Side(dp=2, tp=4), Side(dp=2, tp=6)


def test_every_byte_of_a_decode_rank_is_written_once_with_the_right_bytes() -> None:
    for heads, prefill, decode in geometries():
        shape = ModelShape(LAYERS, heads, k_dim=2, v_dim=1, dtype_bytes=1)
        inputs = PlanInputs(shape=shape, page_size=PAGE, chunk_pages=2, prefill=prefill, decode=decode)
        truth = content(list(range(heads)))
        for room in (0, 7, 2**64 - 1):
            # Only the dp rank that computed the room has its KV; another's pool must never be read.
            sources = []
            for rank in range(prefill.size):
                mine = content(held_heads(heads, prefill.tp, rank % prefill.tp))
                sources.append(mine if rank // prefill.tp == room % prefill.dp else np.full_like(mine, POISON))
            for decode_dp in range(decode.dp):
                check_room(inputs, room, decode_dp, sources, truth)


def check_room(
    inputs: PlanInputs, room: int, decode_dp: int, sources: list[npt.NDArray[np.int64]], truth: npt.NDArray[np.int64]
) -> None:
    heads, tp = inputs.shape.num_kv_heads, inputs.decode.tp
    held = [held_heads(heads, tp, rank % tp) for rank in range(inputs.decode.size)]
    pools = [np.full((LAYERS, PAGES * PAGE, len(mine), DIM_BYTES), UNWRITTEN) for mine in held]
    writes = [np.zeros(pool.shape, dtype=np.int64) for pool in pools]
    for cell in grid(PAGES, PREFIX, inputs.chunk_pages):
        tokens = slice(cell.first * PAGE, (cell.first + cell.count) * PAGE)
        for share in shares(inputs, room, decode_dp):
            layers = slice(share.layer_lo, share.layer_hi)
            to = (layers, tokens, slice(share.dst_head, share.dst_head + share.heads))
            source = sources[share.writer][layers, tokens, share.src_head : share.src_head + share.heads]
            assert source.shape[2] == share.heads
            pools[share.reader][to] = source
            writes[share.reader][to] += 1
            assert sources[share.writer].shape[2] == share.src_pool_heads
            assert pools[share.reader].shape[2] == share.dst_pool_heads
    where = f"{inputs.prefill} {inputs.decode} heads={heads} room={room} decode_dp={decode_dp}"
    for rank, mine in enumerate(held):
        served = rank // tp == decode_dp
        sent = slice(PREFIX * PAGE, None)
        assert (writes[rank][:, sent] == served).all(), where
        assert (writes[rank][:, : PREFIX * PAGE] == 0).all(), where
        if served:
            assert (pools[rank][:, sent] == truth[:, sent][:, :, mine]).all(), where


# --- The rules. ---


def test_tp4_to_tp1_is_four_writers_of_two_heads_side_by_side() -> None:
    owed = shares_to_reader(inputs_of(Side(tp=4), Side(dp=4)), room=9, reader=2)
    assert [(s.writer, s.src_head, s.dst_head, s.heads) for s in owed] == [
        (0, 0, 0, 2),
        (1, 0, 2, 2),
        (2, 0, 4, 2),
        (3, 0, 6, 2),
    ]
    assert {s.reader for s in owed} == {2}
    assert {(s.layer_lo, s.layer_hi) for s in owed} == {(0, 32)}


def test_tp1_to_tp4_is_one_writer_with_a_slice_for_each_rank() -> None:
    owed = shares_of_writer(inputs_of(Side(), Side(tp=4)), room=9, decode_dp=0, writer=0)
    assert [(s.reader, s.src_head, s.dst_head, s.heads) for s in owed] == [(r, 2 * r, 0, 2) for r in range(4)]


def test_sizes_of_which_neither_divides_the_other_share_the_intersections() -> None:
    inputs = inputs_of(Side(tp=6), Side(tp=4), replace(SHAPE, num_kv_heads=24))
    assert [(s.writer, s.reader, s.src_head, s.dst_head, s.heads) for s in shares(inputs, 1, 0)] == [
        (0, 0, 0, 0, 4),
        (1, 0, 0, 4, 2),
        (1, 1, 2, 0, 2),
        (2, 1, 0, 2, 4),
        (3, 2, 0, 0, 4),
        (4, 2, 0, 4, 2),
        (4, 3, 2, 0, 2),
        (5, 3, 0, 2, 4),
    ]


def test_each_decode_replica_gets_its_own_copy() -> None:
    inputs = inputs_of(Side(), Side(tp=4), replace(SHAPE, num_kv_heads=2))
    assert [(s.reader, s.src_head, s.heads) for s in shares(inputs, 3, 0)] == [
        (0, 0, 1),
        (1, 0, 1),
        (2, 1, 1),
        (3, 1, 1),
    ]


@pytest.mark.parametrize("room", [0, 1, 12345, 2**64 - 1])
def test_among_prefill_replicas_the_hash_of_the_room_and_the_decode_rank_choose(room: int) -> None:
    inputs = inputs_of(Side(tp=8), Side(dp=2, tp=2), replace(SHAPE, num_kv_heads=2))
    for reader in range(4):
        (owed,) = shares_to_reader(inputs, room, reader)
        assert owed.writer == (reader % 2) * 4 + (mix64(room) + reader) % 4


def test_rooms_spread_over_prefill_replicas() -> None:
    inputs = inputs_of(Side(tp=8), Side(), replace(SHAPE, num_kv_heads=2))
    hits = Counter(share.writer for room in range(2000) for share in shares(inputs, room, 0))
    assert sorted(hits) == list(range(8))
    assert min(hits.values()) > 400
    assert max(hits.values()) < 600


def test_a_room_is_computed_by_one_prefill_dp_rank_and_the_others_owe_nothing() -> None:
    inputs = inputs_of(Side(dp=3, tp=2), Side())
    for room in range(6):
        assert prefill_dp(inputs, room) == room % 3
        owing = {rank for rank in range(6) if shares_of_writer(inputs, room, 0, rank)}
        assert owing == {2 * (room % 3), 2 * (room % 3) + 1}


def test_both_sides_views_are_cuts_of_the_same_plan() -> None:
    inputs = inputs_of(Side(dp=2, tp=16), Side(dp=2, tp=4))
    for room, decode_dp in product(range(8), range(2)):
        every = shares(inputs, room, decode_dp)
        by_writer = [s for rank in range(32) for s in shares_of_writer(inputs, room, decode_dp, rank)]
        by_reader = [s for tp in range(4) for s in shares_to_reader(inputs, room, decode_dp * 4 + tp)]
        assert set(by_writer) == set(by_reader) == set(every)
        assert len(by_writer) == len(by_reader) == len(every)


def test_the_aux_row_has_one_writer_that_owes_kv_anyway_and_rooms_take_turns() -> None:
    inputs = inputs_of(Side(tp=4), Side(dp=2, tp=2))
    seen = set()
    for room, reader in product(range(200), range(4)):
        owing = sorted(s.writer for s in shares_to_reader(inputs, room, reader))
        elected = aux_writer(inputs, room, reader)
        assert elected == owing[(mix64(room) + reader) % len(owing)]
        seen.add((reader, elected))
    assert seen == {(reader, writer) for reader in range(4) for writer in (reader % 2 * 2, reader % 2 * 2 + 1)}


def test_rooms_of_one_geometry_share_one_plan() -> None:
    plain = inputs_of(Side(tp=4), Side(dp=4))
    assert shares(plain, 1, 0) is shares(plain, 2**63, 0)
    replicated = inputs_of(Side(tp=32), Side())
    assert len({id(shares(replicated, room, 0)) for room in range(500)}) == 4


@settings(deadline=None)
@given(
    heads=st.integers(1, 128),
    data=st.data(),
    room=st.integers(0, 2**64 - 1),
    dps=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_at_any_size_each_decode_rank_gets_its_heads_once_in_order(
    heads: int, data: st.DataObject, room: int, dps: tuple[int, int]
) -> None:
    tps = st.sampled_from(legal_tps(heads, 512))
    prefill, decode = Side(dp=dps[0], tp=data.draw(tps)), Side(dp=dps[1], tp=data.draw(tps))
    inputs = inputs_of(prefill, decode, replace(SHAPE, num_kv_heads=heads))
    decode_dp = data.draw(st.integers(0, decode.dp - 1))
    for tp in range(decode.tp):
        owed = shares_to_reader(inputs, room, decode_dp * decode.tp + tp)
        got = [head for s in owed for head in range(s.dst_head, s.dst_head + s.heads)]
        assert got == list(range(max(1, heads // decode.tp)))
        assert all(s.src_head >= 0 and s.src_head + s.heads <= s.src_pool_heads for s in owed)
        assert len({s.writer for s in owed}) == len(owed)


# --- Bytes. ---


def test_a_parts_staging_is_its_payload_aligned_to_256() -> None:
    (share, *_) = shares(inputs_of(Side(tp=4), Side()), 0, 0)
    assert share.payload_bytes(SHAPE, 1024) == 32 * 1024 * 2 * 512
    assert share.part_bytes(SHAPE, 1024) == 32 * 1024 * 2 * 512
    assert share.part_bytes(SHAPE, 16, layers=4) == 4 * 16 * 2 * 512
    odd = ModelShape(num_layers=1, num_kv_heads=1, k_dim=3, v_dim=2, dtype_bytes=1)
    (share,) = shares(inputs_of(Side(), Side(), odd), 0, 0)
    assert [share.part_bytes(odd, tokens) for tokens in (0, 1, 51, 52)] == [0, 256, 256, 512]


@pytest.mark.parametrize(
    ("prefill", "decode", "whole"),
    [(4, 4, True), (4, 1, False), (1, 4, False), (16, 8, True), (8, 16, True), (16, 32, True)],
)
def test_whole_rows_are_recognised_also_between_replicated_sides(prefill: int, decode: int, whole: bool) -> None:
    assert {s.whole_rows for s in shares(inputs_of(Side(tp=prefill), Side(tp=decode)), 5, 0)} == {whole}


# --- Refusals. ---


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prefill": Side(tp=3)}, "prefill tp=3: 8 KV heads cannot be laid out over tp 3: 8 % 3 = 2 and 3 % 8 = 3"),
        ({"decode": Side(tp=12)}, "decode tp=12: 8 KV heads cannot be laid out over tp 12: 8 % 12 = 8 and 12 % 8 = 4"),
        ({"decode": Side(cp=2)}, "decode cp=2: decode has no context parallelism; start the decode instance with cp=1"),
        ({"prefill": Side(cp=2)}, "prefill cp=2: context parallelism is not supported yet by this version"),
        ({"prefill": Side(pp=2)}, "prefill pp=2: pipeline stages are not supported yet by this version"),
        ({"decode": Side(pp=4)}, "decode pp=4: pipeline stages are not supported yet by this version"),
        ({"cp_mode": "all"}, "cp_mode 'all' is not supported yet by this version; use 'rank0'"),
        ({"page_size": 0}, "page_size is 0: it must be a whole number from 1"),
        ({"chunk_pages": -1}, "chunk_pages is -1: it must be a whole number from 1"),
        ({"plan_version": 0}, "plan_version is 0: it must be a whole number from 1"),
    ],
)
def test_what_cannot_be_planned_is_refused_and_the_factor_named(change: dict[str, object], text: str) -> None:
    with pytest.raises(LayoutError) as refused:
        replace(inputs_of(Side(), Side()), **change)  # type: ignore[arg-type]
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda i: shares(i, 0, 2), "dp=2 is outside an instance with dp size 2"),
        (lambda i: shares(i, 0, -1), "dp=-1 is outside an instance with dp size 2"),
        (lambda i: shares_of_writer(i, 0, 0, 4), "rank 4 is not one of the 4 ranks"),
        (lambda i: shares_to_reader(i, 0, 2), "rank 2 is not one of the 2 ranks"),
        (lambda i: aux_writer(i, 0, -1), "rank -1 is not one of the 2 ranks"),
    ],
)
def test_ranks_that_do_not_exist_are_refused(ask: Callable[[PlanInputs], object], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        ask(inputs_of(Side(tp=4), Side(dp=2)))


# --- Inputs on the wire, and their differences. ---

BASE = inputs_of(Side(dp=2, tp=4), Side(dp=4), page_size=64)
CHANGES: dict[str, PlanInputs] = {
    "plan_version": replace(BASE, plan_version=2),
    "shape.num_layers": replace(BASE, shape=replace(SHAPE, num_layers=16)),
    "shape.num_kv_heads": replace(BASE, shape=replace(SHAPE, num_kv_heads=4)),
    "shape.k_dim": replace(BASE, shape=replace(SHAPE, k_dim=64)),
    "shape.v_dim": replace(BASE, shape=replace(SHAPE, v_dim=64)),
    "shape.dtype_bytes": replace(BASE, shape=replace(SHAPE, dtype_bytes=1)),
    "page_size": replace(BASE, page_size=32),
    "chunk_pages": replace(BASE, chunk_pages=16),
    "prefill.dp": replace(BASE, prefill=Side(tp=4)),
    "prefill.tp": replace(BASE, prefill=Side(dp=2, tp=8)),
    "decode.dp": replace(BASE, decode=Side(dp=2)),
    "decode.tp": replace(BASE, decode=Side(dp=4, tp=2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_names_its_factor_and_nothing_else(name: str) -> None:
    (factor,) = BASE.diff(CHANGES[name])
    assert factor.name == name
    assert (factor.mine, factor.theirs) == (BASE.to_wire()[name], CHANGES[name].to_wire()[name])


def test_a_factor_reads_as_in_the_message_of_a_refusal() -> None:
    assert [str(factor) for factor in BASE.diff(CHANGES["page_size"])] == ["page_size 64 ≠ 32"]


def test_equal_inputs_do_not_differ_and_several_differences_are_all_named() -> None:
    assert BASE.diff(replace(BASE)) == ()
    other = replace(BASE, page_size=32, decode=Side(dp=8))
    assert [str(factor) for factor in BASE.diff(other)] == ["page_size 64 ≠ 32", "decode.dp 4 ≠ 8"]


def test_every_field_travels_flat_and_comes_back_equal() -> None:
    wire = json.loads(json.dumps(BASE.to_wire()))
    assert wire == {
        "plan_version": PLAN_VERSION,
        "shape.num_layers": 32,
        "shape.num_kv_heads": 8,
        "shape.k_dim": 128,
        "shape.v_dim": 128,
        "shape.dtype_bytes": 2,
        "shape.kind": "mha",
        "page_size": 64,
        "chunk_pages": 8,
        "prefill.dp": 2,
        "prefill.pp": 1,
        "prefill.cp": 1,
        "prefill.tp": 4,
        "decode.dp": 4,
        "decode.pp": 1,
        "decode.cp": 1,
        "decode.tp": 1,
        "cp_mode": "rank0",
    }
    for inputs in (BASE, *CHANGES.values()):
        assert PlanInputs.from_wire(inputs.to_wire()) == inputs


@pytest.mark.parametrize("name", BASE.to_wire())
@pytest.mark.parametrize("value", [None, 1.0, True, [], -1, 0, b"x"])
def test_a_malformed_field_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(LayoutError, match=f"plan input '{name}' is "):
        PlanInputs.from_wire(BASE.to_wire() | {name: value})


def test_missing_and_unknown_fields_are_refused_by_name() -> None:
    wire = BASE.to_wire()
    with pytest.raises(LayoutError, match=r"plan input 'decode\.tp' is missing"):
        PlanInputs.from_wire({name: value for name, value in wire.items() if name != "decode.tp"})
    with pytest.raises(LayoutError, match="plan input 'spin' is unknown"):
        PlanInputs.from_wire(wire | {"spin": 1})


def test_a_peers_impossible_layout_is_refused_as_our_own_would_be() -> None:
    with pytest.raises(LayoutError, match="decode cp=2"):
        PlanInputs.from_wire(BASE.to_wire() | {"decode.cp": 2})
    with pytest.raises(LayoutError, match="at most 65536"):
        PlanInputs.from_wire(BASE.to_wire() | {"decode.tp": 2**30})


def test_a_refusal_never_repeats_a_peers_flood() -> None:
    with pytest.raises(LayoutError) as refused:
        PlanInputs.from_wire(BASE.to_wire() | {"cp_mode": "x" * 10_000})
    assert len(str(refused.value)) < 200


def test_inputs_of_another_plan_version_are_named_as_such_and_never_planned() -> None:
    newer = BASE.to_wire() | {"plan_version": 2, "ring_attention": 1}
    with pytest.raises(LayoutError, match="plan_version 1 ≠ 2: run the same release on both sides"):
        PlanInputs.from_wire(newer)
    with pytest.raises(LayoutError, match="plan_version 1 ≠ 2"):
        shares(CHANGES["plan_version"], 0, 0)
    assert BASE.diff(CHANGES["plan_version"]) == (Factor("plan_version", 1, 2),)
