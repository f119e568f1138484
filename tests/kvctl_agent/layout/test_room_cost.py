from __future__ import annotations

from dataclasses import replace

import pytest

from kvctl_agent.contract.choices import CP_MODES
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.layout.room_cost import room_cost
from kvctl_agent.layout.shape import ModelShape

SHAPE = ModelShape(num_layers=32, num_kv_heads=8, k_dim=128, v_dim=128, dtype_bytes=2)


def inputs_of(
    prefill: ParallelConfig, decode: ParallelConfig, page_size: int = 64, chunk_pages: int = 512
) -> PlanInputs:
    return PlanInputs(shape=SHAPE, page_size=page_size, chunk_pages=chunk_pages, prefill=prefill, decode=decode)


def test_the_reference_room_costs_what_was_measured() -> None:
    # 1,024 tokens, TP4 to attention TP 1: 128 MiB, 262,144 slice descriptors, 4 staged writes.
    cost = room_cost(inputs_of(ParallelConfig(tp=4), ParallelConfig(dp=4)), total_pages=16)
    assert cost.payload_bytes == cost.staging_bytes == 128 * 2**20
    assert cost.slice_descriptors == 262_144
    assert cost.bulk_descriptors is None
    assert (cost.writers, cost.readers, cost.cells, cost.parts) == (4, 1, 1, 4)
    assert cost.largest_part_bytes == 32 * 2**20


def test_equal_heads_on_both_sides_can_move_as_whole_pages() -> None:
    assert room_cost(inputs_of(ParallelConfig(tp=4), ParallelConfig(tp=4)), total_pages=16).bulk_descriptors == 4_096


def test_a_prefix_and_the_grid_are_counted() -> None:
    cost = room_cost(
        inputs_of(ParallelConfig(tp=2), ParallelConfig(), page_size=16, chunk_pages=4), total_pages=10, prefix_pages=5
    )
    assert (cost.cells, cost.parts) == (2, 4)
    assert cost.payload_bytes == 5 * 16 * SHAPE.token_bytes
    assert cost.largest_part_bytes == 3 * 16 * SHAPE.token_bytes // 2


def test_replicated_decode_ranks_each_cost_a_copy() -> None:
    one = room_cost(inputs_of(ParallelConfig(), ParallelConfig(tp=8)), total_pages=4)
    two = room_cost(inputs_of(ParallelConfig(), ParallelConfig(tp=16)), total_pages=4)
    assert two.payload_bytes == 2 * one.payload_bytes


def test_alignment_shows_in_staging_only() -> None:
    odd = ModelShape(num_layers=1, num_kv_heads=2, k_dim=3, v_dim=2, dtype_bytes=1)
    inputs = PlanInputs(shape=odd, page_size=1, chunk_pages=1, prefill=ParallelConfig(tp=2), decode=ParallelConfig())
    cost = room_cost(inputs, total_pages=3)
    assert cost.payload_bytes == 3 * 2 * 5
    assert cost.staging_bytes == 6 * 256


def test_a_room_with_nothing_to_send_costs_nothing() -> None:
    cost = room_cost(inputs_of(ParallelConfig(tp=4), ParallelConfig()), total_pages=4, prefix_pages=4)
    assert (cost.writers, cost.readers, cost.parts, cost.payload_bytes, cost.largest_part_bytes) == (0, 0, 0, 0, 0)


def test_a_decode_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(LayoutError, match="dp=1 is outside"):
        room_cost(inputs_of(ParallelConfig(), ParallelConfig()), total_pages=1, decode_dp=1)


def test_every_way_to_split_a_room_over_cp_ranks_moves_the_same_bytes() -> None:
    for cp in (2, 4):
        base = inputs_of(ParallelConfig(cp=cp, tp=4), ParallelConfig(dp=4), page_size=16, chunk_pages=8)
        costs = {mode: room_cost(replace(base, cp_mode=mode), total_pages=41, prefix_pages=3) for mode in CP_MODES}
        assert {cost.payload_bytes for cost in costs.values()} == {38 * 16 * SHAPE.token_bytes}
        assert {cost.slice_descriptors for cost in costs.values()} == {38 * 16 * 32 * 2 * 4}
        assert costs["rank0"].writers == costs["room-hash"].writers == 4
        assert costs["all"].writers == costs["all-chunk"].writers == 4 * cp
        # Cut inside every cell, cp times as many parts; cut once, only where a cut meets a cell.
        assert costs["rank0"].parts == costs["room-hash"].parts == 6 * 4
        assert costs["rank0"].parts < costs["all"].parts <= (6 + cp - 1) * 4
        assert costs["all-chunk"].parts > costs["all"].parts
        assert costs["all-chunk"].largest_part_bytes == 8 // cp * 16 * SHAPE.token_bytes // 4


def test_pipeline_stages_cut_parts_but_not_bytes() -> None:
    whole = room_cost(inputs_of(ParallelConfig(tp=4), ParallelConfig()), total_pages=16)
    cut = room_cost(inputs_of(ParallelConfig(pp=2, tp=4, stages=(20, 12)), ParallelConfig(pp=2)), total_pages=16)
    assert cut.payload_bytes == whole.payload_bytes
    # Layers [0, 16) and [16, 20) of the first stage, [20, 32) of the second.
    assert (cut.writers, cut.readers, cut.parts) == (8, 2, 12)
    assert cut.largest_part_bytes == whole.largest_part_bytes // 2


def test_scales_and_draft_layers_are_counted_and_a_latent_is_one_row_a_token() -> None:
    draft = ModelShape(num_layers=1, num_kv_heads=4, k_dim=64, v_dim=64, dtype_bytes=2)
    full = replace(SHAPE, dtype_bytes=1, k_scale_bytes=4, v_scale_bytes=2, draft=draft)
    cost = room_cost(replace(inputs_of(ParallelConfig(tp=4), ParallelConfig()), shape=full), total_pages=3)
    scales = 3 * 32 * 8 * (4 + 2)
    assert cost.payload_bytes == 3 * 64 * (full.token_bytes + draft.token_bytes) + scales
    # K and V rows, and one row of each scale a page, for each of 4 writers and, of the draft, 4 writers of one head.
    assert cost.slice_descriptors == 4 * 3 * (32 * (64 * 2 + 2) + 64 * 2)
    latent = ModelShape(num_layers=32, num_kv_heads=1, k_dim=576, v_dim=0, dtype_bytes=2, kind="mla")
    cost = room_cost(replace(inputs_of(ParallelConfig(tp=8), ParallelConfig(dp=8)), shape=latent), total_pages=3)
    assert (cost.writers, cost.payload_bytes, cost.slice_descriptors) == (1, 3 * 64 * 32 * 1152, 3 * 64 * 32)
    assert cost.bulk_descriptors == 3 * 32
