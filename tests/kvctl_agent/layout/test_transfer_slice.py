from __future__ import annotations

from dataclasses import replace

import pytest

from kvctl_agent.layout.transfer_slice import TransferSlice

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
