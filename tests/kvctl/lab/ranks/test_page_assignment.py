"""Page indices of a lot: disjoint, never page 0, scattered or in runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.lab.ranks.content import assign_pages, unused_pages

counts_strategy = st.lists(st.integers(0, 12), min_size=1, max_size=8)


@given(
    counts=counts_strategy,
    spare=st.integers(1, 5),
    seed=st.integers(0, 5),
    order=st.sampled_from(["random", "contiguous"]),
)
def test_every_room_gets_its_own_pages_and_the_rest_is_unused(counts: list[int], spare: int, seed: int, order: str):
    total = sum(counts) + spare
    pages = assign_pages(counts, total, order, seed)
    assert [len(each) for each in pages] == counts
    used = np.concatenate(pages).tolist()
    assert len(set(used)) == len(used)
    assert all(0 < page < total for page in used)
    assert sorted([*used, *unused_pages(pages, total).tolist()]) == list(range(total))


def test_contiguous_rooms_are_ascending_runs():
    assert [each.tolist() for each in assign_pages([2, 3], 6, "contiguous", 0)] == [[1, 2], [3, 4, 5]]


def test_random_rooms_are_scattered_and_every_rank_differently():
    first, second = (np.concatenate(assign_pages([64, 64], 129, "random", seed)) for seed in (1, 2))
    assert np.count_nonzero(np.diff(first) == 1) < 16
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("order", ["random", "contiguous"])
def test_the_same_seed_gives_the_same_pages(order: str):
    assert [each.tolist() for each in assign_pages([5, 6], 20, order, 3)] == [
        each.tolist() for each in assign_pages([5, 6], 20, order, 3)
    ]
