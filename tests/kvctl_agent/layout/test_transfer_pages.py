"""Unequal pages, decode ranks that share a prompt, and KV groups: each token's slot, one by one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvctl_agent.contract.choices import CP_MODES
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.plan import transfer_slices, writer_cells
from kvctl_agent.layout.plan_inputs import PlanInputs, transfer_page
from kvctl_agent.layout.shape import KVGroup, ModelShape

SIZES = (1, 2, 4, 8, 16)
SHAPE = ModelShape(2, 2, 1, 1, 1)


def test_every_token_comes_once_and_from_its_own_slot() -> None:
    for seed in range(1500):
        check_tokens(random.Random(seed))


def check_tokens(dice: random.Random) -> None:
    source_page, target_page = dice.choice(SIZES), dice.choice(SIZES)
    ranks, cp = dice.choice((1, 2, 3, 4)), dice.choice((1, 2))
    interleave = dice.choice([size for size in SIZES if size <= target_page]) if ranks > 1 else 0
    page_size = transfer_page(source_page, target_page, interleave)
    cell = max(source_page, target_page) * dice.randint(1, 3)
    inputs = PlanInputs(
        shape=SHAPE,
        page_size=page_size,
        chunk_pages=cell // page_size,
        prefill=ParallelConfig(cp=cp),
        decode=ParallelConfig(cp=ranks),
        cp_mode=dice.choice(CP_MODES),
        prefill_split=source_page // page_size,
        decode_split=target_page // page_size,
        stripe_pages=interleave // page_size if ranks > 1 else 1,
    )
    together = target_page * ranks
    tokens = dice.randint(1, 5 * together)
    cached = dice.randint(0, (tokens - 1) // together)
    prefix, total = inputs.span(cached, -(-tokens // together), tokens)
    assert (prefix, total) == (cached * together // page_size, -(-tokens // page_size))
    room = dice.getrandbits(64)
    source = np.array(dice.sample(range(1000), -(-tokens // source_page)), np.int32)
    for reader in range(ranks):
        target = np.array(dice.sample(range(1000), -(-tokens // together) - cached), np.int32)
        moved: dict[int, int] = {}  # of tokens: the slot in decode's pool, and in that of prefill
        writers = {share.writer for share in transfer_slices(inputs, room, 0) if share.reader == reader}
        for writer in writers:
            for chunk in writer_cells(inputs, room, writer, reader, total, prefix):
                pages = chunk.source(source, inputs.prefill_split).tolist()
                places = chunk.target(target, inputs.decode_split, prefix).tolist()
                assert len(pages) == len(places) == chunk.count
                assert chunk.first // inputs.chunk_pages == (chunk.end - 1) // inputs.chunk_pages == chunk.index
                for page, place in zip(pages, places, strict=True):
                    for row in range(page_size):
                        assert place * page_size + row not in moved
                        moved[place * page_size + row] = page * page_size + row
        wanted: dict[int, int] = {}
        for position in range(cached * together, total * page_size):
            turn, inside = divmod(position, interleave * ranks) if ranks > 1 else (0, position)
            if ranks > 1 and inside // interleave != reader:
                continue
            here = turn * interleave + inside % interleave if ranks > 1 else position
            slot = int(target[here // target_page - cached]) * target_page + here % target_page
            wanted[slot] = int(source[position // source_page]) * source_page + position % source_page
        assert moved == wanted, f"{inputs} {tokens} tokens, {cached} pages cached, rank {reader}"


@pytest.mark.parametrize(
    ("prefill", "decode", "interleave", "text"),
    [
        (48, 64, 0, "page_size 48 ≠ 64"),
        (64, 48, 0, "page_size 64 ≠ 48"),
        (16, 16, 3, "cp_interleave 3: it must divide the decode page of 16 tokens"),
        (16, 16, 32, "cp_interleave 32: it must divide the decode page of 16 tokens"),
        (6, 12, 4, "and divide the prefill page of 6 tokens or be a multiple of it"),
    ],
)
def test_sizes_without_a_transfer_page_are_refused_by_name(
    prefill: int, decode: int, interleave: int, text: str
) -> None:
    with pytest.raises(LayoutError, match=text):
        transfer_page(prefill, decode, interleave)


def test_a_prompt_that_does_not_end_in_its_last_page_is_refused() -> None:
    inputs = PlanInputs(SHAPE, 4, 8, ParallelConfig(), ParallelConfig(), decode_split=4)
    assert inputs.span(1, 3) == (4, 12)
    assert inputs.span(1, 3, 33) == (4, 9)
    with pytest.raises(LayoutError, match="3 pages of 16 tokens do not end where a prompt of 32 does"):
        inputs.span(1, 3, 32)


class TestGroups:
    SHAPE = ModelShape(4, 2, 1, 1, 1, groups=(KVGroup("swa", ModelShape(2, 2, 1, 1, 1), (1, 2), 8),))

    def test_a_cell_has_the_same_tokens_in_every_table(self) -> None:
        inputs = PlanInputs(self.SHAPE, 4, 8, ParallelConfig(pp=2), ParallelConfig())
        assert (inputs.chunk_pages_of(0), inputs.chunk_pages_of(1)) == (8, 4)
        kv = writer_cells(inputs, 7, 0, 0, 20, 0)
        assert [(cell.index, cell.first, cell.count) for cell in kv] == [(0, 0, 8), (1, 8, 8), (2, 16, 4)]
        last = writer_cells(inputs, 7, 0, 0, 10, 7, table=1)  # only the window's pages are wanted
        assert [(cell.index, cell.first, cell.count) for cell in last] == [(1, 7, 1), (2, 8, 2)]

    def test_each_stage_sends_the_layers_beside_its_own(self) -> None:
        inputs = PlanInputs(self.SHAPE, 4, 8, ParallelConfig(pp=2), ParallelConfig())
        owed = [(share.writer, share.layer_lo, share.layer_hi, share.table) for share in transfer_slices(inputs, 7, 0)]
        assert owed == [(0, 0, 2, 0), (1, 2, 4, 0), (0, 4, 5, 1), (1, 5, 6, 1)]

    def test_what_groups_cannot_do_is_refused_by_name(self) -> None:
        with pytest.raises(LayoutError, match="chunk_tokens 12: it must be a multiple of the page of 8 tokens"):
            PlanInputs(self.SHAPE, 4, 3, ParallelConfig(), ParallelConfig())
        with pytest.raises(LayoutError, match="decode cp=2: decode ranks cannot share the pages of group swa"):
            PlanInputs(self.SHAPE, 4, 8, ParallelConfig(), ParallelConfig(cp=2))

    def test_scales_of_a_group_do_not_keep_kv_pages_from_being_divided(self) -> None:
        index = KVGroup("index", ModelShape(1, 1, 4, 0, 1, kind="mla", k_scale_bytes=4), (0,), 8)
        shape = ModelShape(4, 2, 1, 1, 1, groups=(index,))
        assert PlanInputs(shape, 4, 8, ParallelConfig(), ParallelConfig(), decode_split=4).decode_split == 4
