from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.contract.choices import CP_MODES
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import Chunk, grid
from kvctl_agent.layout.context_parallel import owned_cells, sole_cp_sender
from kvctl_agent.layout.parallel import mix64


def pages_of(cells: tuple[Chunk, ...]) -> list[int]:
    return [page for cell in cells for page in range(cell.first, cell.first + cell.count)]


def test_by_default_rank_0_sends_everything() -> None:
    assert owned_cells("rank0", 2, 0, 7, 10, 0, 4) == grid(10, 0, 4)
    assert owned_cells("rank0", 2, 1, 7, 10, 0, 4) == ()


def test_all_splits_the_positions_of_a_room_contiguously() -> None:
    # 14 pages without the first 3: 11 = 6 + 5 positions. A cell in which the cut falls is shared, the others are not.
    assert owned_cells("all", 2, 0, 7, 14, 3, 4) == (Chunk(0, 3, 1), Chunk(1, 4, 4), Chunk(2, 8, 1))
    assert owned_cells("all", 2, 1, 7, 14, 3, 4) == (Chunk(2, 9, 3), Chunk(3, 12, 2))


def test_all_chunk_splits_inside_each_cell_so_that_all_send_at_the_same_time() -> None:
    assert owned_cells("all-chunk", 2, 0, 7, 11, 0, 4) == (Chunk(0, 0, 2), Chunk(1, 4, 2), Chunk(2, 8, 2))
    assert owned_cells("all-chunk", 2, 1, 7, 11, 0, 4) == (Chunk(0, 2, 2), Chunk(1, 6, 2), Chunk(2, 10, 1))


def test_a_rank_without_pages_in_a_cell_lacks_that_cell() -> None:
    assert owned_cells("all-chunk", 4, 3, 7, 6, 0, 4) == (Chunk(0, 3, 1),)
    assert owned_cells("all", 4, 3, 7, 3, 0, 4) == ()


def test_room_hash_gives_whole_rooms_and_spreads_them() -> None:
    hits = Counter(sole_cp_sender("room-hash", 4, room) for room in range(4000))
    assert set(hits) == {0, 1, 2, 3}
    assert min(hits.values()) > 850
    for room, rank in product(range(20), range(4)):
        whole = grid(9, 2, 4) if rank == sole_cp_sender("room-hash", 4, room) else ()
        assert owned_cells("room-hash", 4, rank, room, 9, 2, 4) == whole


def test_the_cp_rank_of_a_room_does_not_follow_from_its_replica() -> None:
    # Both are chosen by hash; if they moved together, half of the (cp, tp) pairs would never send.
    pairs = Counter((sole_cp_sender("room-hash", 2, room), mix64(room) % 2) for room in range(4000))
    assert len(pairs) == 4
    assert min(pairs.values()) > 850


def test_one_cp_rank_sends_everything_in_every_mode() -> None:
    for mode in CP_MODES:
        assert owned_cells(mode, 1, 0, 7, 11, 3, 4) == grid(11, 3, 4)


def test_every_page_after_the_prefix_belongs_to_one_rank_for_all_small_sizes() -> None:
    for mode, cp, total, chunk in product(CP_MODES, (1, 2, 3, 4), range(9), (1, 2, 3, 8)):
        for prefix in range(total + 1):
            cells = [owned_cells(mode, cp, rank, 5, total, prefix, chunk) for rank in range(cp)]
            owned = [page for mine in cells for page in pages_of(mine)]
            assert sorted(owned) == list(range(prefix, total))
            assert all(cell.count > 0 and cell.first // chunk == cell.index for mine in cells for cell in mine)
            if mode == "all":
                assert [pages_of(mine) for mine in cells] == [
                    part.tolist() for part in np.array_split(np.arange(prefix, total), cp)
                ]


@settings(deadline=None)
@given(
    mode=st.sampled_from(CP_MODES),
    cp=st.integers(1, 16),
    room=st.integers(0, 2**64 - 1),
    total=st.integers(0, 3000),
    data=st.data(),
    chunk=st.integers(1, 700),
)
def test_at_any_size_the_ranks_share_the_grid(
    mode: str, cp: int, room: int, total: int, data: st.DataObject, chunk: int
) -> None:
    prefix = data.draw(st.integers(0, total))
    owned = [owned_cells(mode, cp, rank, room, total, prefix, chunk) for rank in range(cp)]
    pieces = sorted(cell for mine in owned for cell in mine)
    for cell in grid(total, prefix, chunk):
        mine = [piece for piece in pieces if piece.index == cell.index]
        # In order, without a gap, from the cell's first page to its last.
        assert mine[0].first == cell.first
        assert all(a.first + a.count == b.first for a, b in pairwise(mine))
        assert sum(piece.count for piece in mine) == cell.count
    sizes = [len(pages_of(mine)) for mine in owned]
    assert sum(sizes) == total - prefix
    if mode == "all":
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("mode", CP_MODES)
def test_a_prefix_longer_than_the_prompt_is_refused_on_every_rank(mode: str) -> None:
    for rank in range(2):
        with pytest.raises(LayoutError, match="prefix of 5 pages is longer than the prompt of 4"):
            owned_cells(mode, 2, rank, 7, 4, 5, 4)
