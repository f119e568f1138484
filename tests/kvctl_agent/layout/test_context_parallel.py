from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest

from kvctl_agent.contract.choices import CP_MODES
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import Chunk, grid
from kvctl_agent.layout.context_parallel import owned_cells, sole_cp_sender
from kvctl_agent.layout.parallel import mix64


def pages_of(cells: tuple[Chunk, ...]) -> list[int]:
    return [page for cell in cells for page in range(cell.first, cell.first + cell.count)]


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


@pytest.mark.parametrize("mode", CP_MODES)
def test_a_prefix_longer_than_the_prompt_is_refused_on_every_rank(mode: str) -> None:
    for rank in range(2):
        with pytest.raises(LayoutError, match="prefix of 5 pages is longer than the prompt of 4"):
            owned_cells(mode, 2, rank, 7, 4, 5, 4)
