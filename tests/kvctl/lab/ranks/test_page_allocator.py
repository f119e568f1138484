"""Page indices: disjoint, never page 0, scattered or in runs, used again once released."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.lab.ranks.content import PageAllocator

counts_strategy = st.lists(st.integers(0, 12), min_size=1, max_size=8)


def pages(counts: list[int], total: int, order: str, seed: int) -> list[list[int]]:
    allocator = PageAllocator(total, order, seed)
    return [allocator.allocate(count).tolist() for count in counts]


@given(
    counts=counts_strategy,
    spare=st.integers(1, 5),
    seed=st.integers(0, 5),
    order=st.sampled_from(["random", "contiguous"]),
)
def test_every_room_gets_its_own_pages_and_the_rest_is_free(counts: list[int], spare: int, seed: int, order: str):
    total = sum(counts) + spare
    allocator = PageAllocator(total, order, seed)
    owned = [allocator.allocate(count) for count in counts]
    assert [len(each) for each in owned] == counts
    used = np.concatenate(owned).tolist()
    assert len(set(used)) == len(used)
    assert sorted([0, *used, *allocator.free.tolist()]) == list(range(total))
    with pytest.raises(MemoryError, match=f"{spare} pages are needed, {spare - 1} are free"):
        allocator.allocate(spare)
    for each in owned:
        allocator.release(each)
    assert sorted(allocator.free.tolist()) == list(range(1, total))


def test_contiguous_rooms_are_ascending_runs():
    assert pages([2, 3], 6, "contiguous", 0) == [[1, 2], [3, 4, 5]]


def test_random_rooms_are_scattered_and_every_rank_differently():
    first, second = (np.concatenate(pages([64, 64], 129, "random", seed)) for seed in (1, 2))
    assert np.count_nonzero(np.diff(first) == 1) < 16
    assert not np.array_equal(first, second)


def test_pages_that_were_released_are_scattered_again():
    allocator = PageAllocator(129, "random", 1)
    before = allocator.allocate(128)
    allocator.release(before)
    assert not np.array_equal(allocator.allocate(128), before)


@pytest.mark.parametrize("order", ["random", "contiguous"])
def test_the_same_seed_gives_the_same_pages(order: str):
    assert pages([5, 6], 20, order, 3) == pages([5, 6], 20, order, 3)
