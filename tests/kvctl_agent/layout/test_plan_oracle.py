"""The plan against a brute-force oracle: every (segment, layer, page, head) that a decode rank must hold, one by one.

The oracle computes the layers and heads of each rank independently of the code: with lists instead of bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import count, product
from typing import NamedTuple

import numpy as np
import pytest

from kvctl_agent.contract.choices import CP_MODES
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, mix64
from kvctl_agent.layout.plan import TransferSlice, aux_writer, state_slices_to_reader, transfer_slices, writer_cells
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.layout.shape import ModelShape, StateShape

LAYERS, PAGE = 5, 2
TPS = {1: (1, 2, 3, 4), 2: (1, 2, 4, 6), 3: (1, 3, 6), 4: (1, 2, 4, 8), 6: (1, 2, 3, 6), 8: (1, 2, 4, 8, 16)}
PREFILL_STAGES = ((), (3, 2), (1, 4), (2, 1, 2))
DECODE_STAGES = ((), (1, 4), (2, 2, 1))
ROOMS = (0, 7, 2**64 - 1, 12345)
PAGES = tuple((total, prefix) for total in range(8) for prefix in range(total + 1))


class Seg(NamedTuple):
    """A segment of the oracle: its layers, each with the KV layer whose stage holds it."""

    name: str
    layers: tuple[tuple[int, int], ...]
    heads: int


class Case(NamedTuple):
    inputs: PlanInputs
    room: int
    decode_dp: int
    total: int
    prefix: int

    def __str__(self) -> str:
        inputs = self.inputs
        return (
            f"{inputs.shape} {inputs.prefill} → {inputs.decode} {inputs.cp_mode} cells of {inputs.chunk_pages}: "
            f"room {self.room} to dp {self.decode_dp}, {self.prefix} of {self.total} pages cached"
        )


def model(heads: int, sharded: int, kind: str) -> ModelShape:
    """A model with everything: scales, a draft of other heads, a replicated and a sharded state with layers of both."""
    if kind == "mla":
        shape = ModelShape(LAYERS, 1, 6, 0, 1, kind="mla", k_scale_bytes=4)
        draft = ModelShape(1, 1, 6, 0, 1, kind="mla")
    else:
        shape = ModelShape(LAYERS, heads, 3, 2, 1, k_scale_bytes=2)
        draft = ModelShape(2, heads, 2, 2, 1)
    states = (StateShape("conv", (0, 2, 2, 4), 3, 1, 5), StateShape("ssm", (1, 4), 2, sharded, 7))
    return ModelShape(
        LAYERS, shape.num_kv_heads, shape.k_dim, shape.v_dim, 1, kind, shape.k_scale_bytes, 0, draft, states
    )


def oracle_segments(shape: ModelShape) -> list[Seg]:
    last = shape.num_layers - 1
    found = [Seg("kv", tuple((layer, layer) for layer in range(shape.num_layers)), shape.num_kv_heads)]
    assert shape.draft is not None
    drafts = range(shape.num_layers, shape.num_layers + shape.draft.num_layers)
    found.append(Seg("draft", tuple((layer, last) for layer in drafts), shape.draft.num_kv_heads))
    return found + [Seg(state.name, tuple(enumerate(state.layers)), state.heads) for state in shape.states]


@cache
def stage_lists(side: ParallelConfig) -> list[list[int]]:
    """The KV layers of each stage: by the given sizes, or divided evenly by numpy."""
    cuts = np.cumsum(side.stages)[:-1] if side.stages else side.pp
    return [part.tolist() for part in np.array_split(np.arange(LAYERS), cuts)]


@cache
def holding(segment: Seg, side: ParallelConfig, at: RankCoord) -> tuple[list[int], list[int]]:
    """The layers and heads of a segment in one rank's memory, as lists in memory order."""
    mine = stage_lists(side)[at.pp]
    layers = [layer for layer, beside in segment.layers if beside in mine]
    copies = max(1, side.tp // segment.heads)
    heads = np.split(np.repeat(np.arange(segment.heads), copies), side.tp)[at.tp]
    return layers, heads.tolist()


def page_owners(inputs: PlanInputs, total: int, prefix: int) -> dict[int, int] | None:
    """For each page the cp rank that sends it; None where a hash chooses one rank for the whole room."""
    pages, cp = np.arange(prefix, total), inputs.prefill.cp
    if inputs.cp_mode == "rank0":
        return dict.fromkeys(pages.tolist(), 0)
    if inputs.cp_mode == "room-hash":
        return None
    whole = [pages]
    if inputs.cp_mode == "all-chunk":
        whole = [pages[pages // inputs.chunk_pages == cell] for cell in range(total)]
    return {
        page: rank for cell in whole for rank, part in enumerate(np.array_split(cell, cp)) for page in part.tolist()
    }


def cases() -> Iterator[Case]:
    """Every pair of tensor-parallel sizes with every stage split and cp size; other values are cycled through."""
    turn = count()
    for heads, tps in [*TPS.items(), (24, (4, 6)), (12, (4, 6))]:
        for from_tp, to_tp in product(tps, repeat=2):
            for cp, have, want in product((1, 2, 3), PREFILL_STAGES, DECODE_STAGES):
                n = next(turn)
                # 13 and 37 share no factor with the other cycles, so that every value meets every other over time.
                total, prefix = PAGES[n * 13 % len(PAGES)]
                prefill = ParallelConfig(dp=1 + n % 2, pp=max(1, len(have)), cp=cp, tp=from_tp, stages=have)
                decode = ParallelConfig(dp=1 + n // 2 % 2, pp=max(1, len(want)), tp=to_tp, stages=want)
                shape = model(heads, heads, "mla" if n % 5 == 4 else "mha")
                mode = CP_MODES[n * 37 // 3 % 4] if cp > 1 else "rank0"
                inputs = PlanInputs(shape, PAGE, (1, 2, 3, 8)[n // 4 % 4], prefill, decode, mode)
                yield Case(inputs, ROOMS[n % 4] ^ n, n % decode.dp, total, prefix)


def test_every_element_a_decode_rank_must_hold_is_written_once_by_a_rank_that_has_it() -> None:
    seen = 0
    for case in cases():
        check_room(case)
        seen += 1
    assert seen > 3000


def check_room(case: Case) -> None:
    try:
        check_kv(case)
        check_states_and_aux(case)
    except AssertionError as error:
        error.add_note(f"in the case of {case}")
        raise


def check_kv(case: Case) -> None:
    inputs = case.inputs
    owners = page_owners(inputs, case.total, case.prefix)
    known = oracle_segments(inputs.shape)[:2]
    owed = transfer_slices(inputs, case.room, case.decode_dp)
    assert {inputs.decode.coord(share.reader).dp for share in owed} <= {case.decode_dp}
    cells: dict[int, list[tuple[int, int]]] = {}
    chosen: set[int] = set()
    for share in owed:
        mine = writer_cells(inputs, case.room, share.writer, share.reader, case.total, case.prefix)
        assert all(cell.count > 0 for cell in mine)
        assert len({cell.index for cell in mine}) == len(mine)
        pages = [(cell.index, page) for cell in mine for page in range(cell.first, cell.first + cell.count)]
        assert all(page // inputs.chunk_pages == index for index, page in pages)
        cells[share.writer] = pages
        if pages:
            chosen.add(inputs.prefill.coord(share.writer).cp)
    if owners is None:
        assert len(chosen) <= 1
    for reader, at in readers(inputs, case.decode_dp):
        for index, segment in enumerate(known):
            layers, heads = holding(segment, inputs.decode, at)
            written = np.zeros((len(layers), max(case.total, 1), len(heads)), dtype=np.int64)
            for share in owed:
                if (share.reader, share.segment) != (reader, index):
                    continue
                check_names(case, segment, share, layers, heads)
                for _, page in cells[share.writer]:
                    if owners is not None:
                        assert inputs.prefill.coord(share.writer).cp == owners[page]
                    rows = slice(layers.index(share.layer_lo), layers.index(share.layer_hi - 1) + 1)
                    written[rows, page, share.dst_head : share.dst_head + share.heads] += 1
            assert (written[:, case.prefix : case.total] == 1).all()
            assert not written[:, : case.prefix].any()


def check_states_and_aux(case: Case) -> None:
    inputs = case.inputs
    for reader, at in readers(inputs, case.decode_dp):
        owed = state_slices_to_reader(inputs, case.room, reader)
        assert {inputs.prefill.coord(share.writer).cp for share in owed} <= {0}
        for index, segment in enumerate(oracle_segments(inputs.shape)):
            layers, heads = holding(segment, inputs.decode, at)
            if index < 2:
                continue
            written = np.zeros((len(layers), len(heads)), dtype=np.int64)
            for share in owed:
                assert share.segment >= 2
                if share.segment == index:
                    check_names(case, segment, share, layers, heads)
                    rows = slice(layers.index(share.layer_lo), layers.index(share.layer_hi - 1) + 1)
                    written[rows, share.dst_head : share.dst_head + share.heads] += 1
            assert (written == 1).all()
        writer = inputs.prefill.coord(aux_writer(inputs, case.room, reader))
        assert (writer.dp, writer.pp, writer.cp) == (case.room % inputs.prefill.dp, inputs.prefill.pp - 1, 0)
        kv = oracle_segments(inputs.shape)[0]
        assert set(holding(kv, inputs.prefill, writer)[1]) & set(holding(kv, inputs.decode, at)[1])


def check_names(case: Case, segment: Seg, share: TransferSlice, layers: list[int], heads: list[int]) -> None:
    """Check that the writer has the layers and heads of a slice, and that both sides' offsets and strides agree."""
    inputs = case.inputs
    from_ = inputs.prefill.coord(share.writer)
    assert from_.dp == case.room % inputs.prefill.dp
    has_layers, has_heads = holding(segment, inputs.prefill, from_)
    owed = set(range(share.layer_lo, share.layer_hi))
    assert owed
    assert owed <= set(has_layers)
    assert owed <= set(layers)
    assert (share.src_pool_heads, share.dst_pool_heads) == (len(has_heads), len(heads))
    taken = has_heads[share.src_head : share.src_head + share.heads]
    assert len(taken) == share.heads > 0
    assert taken == heads[share.dst_head : share.dst_head + share.heads]
    # Of all ranks with these heads the counterpart of the reader, or if the tp sizes differ, in order, the one that the
    # hash of the room and the reader picks.
    able = siblings(segment, inputs.prefill, from_)
    reader = inputs.decode.coord(share.reader)
    picked = able[(mix64(case.room) + share.reader) % len(able)]
    assert from_.tp == (reader.tp if inputs.prefill.tp == inputs.decode.tp else picked)


@cache
def siblings(segment: Seg, side: ParallelConfig, at: RankCoord) -> list[int]:
    """The tp ranks that hold the same heads as `at`, itself among them."""
    mine = holding(segment, side, at)[1]
    return [tp for tp in range(side.tp) if holding(segment, side, at._replace(tp=tp))[1] == mine]


def readers(inputs: PlanInputs, decode_dp: int) -> list[tuple[int, RankCoord]]:
    at = [inputs.decode.coord(rank) for rank in range(inputs.decode.size)]
    return [(rank, coord) for rank, coord in enumerate(at) if coord.dp == decode_dp]


@pytest.mark.parametrize(("heads", "sharded"), [(2, 3), (3, 2)])
def test_segments_of_different_heads_each_spread_over_their_own_replicas(heads: int, sharded: int) -> None:
    # 6 ranks hold 2 heads three times and 3 heads twice: one remainder of the hash does not determine the other.
    ssm = StateShape("ssm", (1, 4), 2, sharded, 7)
    shape = replace(model(heads, sharded, "mha"), states=(ssm,))
    for room in range(64):
        check_room(Case(PlanInputs(shape, PAGE, 1, ParallelConfig(tp=6), ParallelConfig()), room, 0, total=2, prefix=0))
