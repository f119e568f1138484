"""Page indices of short and of long arrays give the same answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl_agent.layout.page_indices import FEW, all_below, count_runs, extent, packed, single, unpacked

LENGTHS = (1, 2, FEW, FEW + 1, 3 * FEW)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
def test_the_extent_is_found_wherever_it_lies(length: int, kind: type[np.integer[Any]]) -> None:
    for least_at, most_at in ((0, -1), (-1, 0), (length // 2, length // 3)):
        pages = np.full(length, 7, kind)
        pages[least_at] = 3
        pages[most_at] = 9  # in an array of one index, the same place
        found = extent(pages)
        assert found == (int(pages.min()), int(pages.max()))
        assert [type(each) for each in found] == [int, int]


def runs_of(pages: list[int]) -> int:
    return sum(page - 1 not in pages for page in pages)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40, unique=True))
def test_runs_are_counted_whatever_their_order(pages: list[int]) -> None:
    assert count_runs(np.array(pages, np.int32)) == runs_of(pages)


@pytest.mark.parametrize("length", LENGTHS)
def test_long_lists_have_as_many_runs_as_short_ones(length: int) -> None:
    random = np.random.default_rng(length)
    pages: npt.NDArray[np.int32] = random.permutation(2 * length)[:length].astype(np.int32)
    assert count_runs(pages) == runs_of(pages.tolist())


def test_indices_are_sent_little_endian() -> None:
    assert packed(np.array([1, 0x01020304], np.int32)) == bytes([1, 0, 0, 0, 4, 3, 2, 1])
    assert packed(np.array([5, 9, 7], ">i4")[::2]) == bytes([5, 0, 0, 0, 7, 0, 0, 0])
    assert unpacked(packed(np.array([3, 2, 1], np.int32))).tolist() == [3, 2, 1]
    with pytest.raises(ValueError, match="multiple of element size"):
        unpacked(b"\0\0\0")


@pytest.mark.parametrize("length", LENGTHS)
def test_all_indices_are_compared_with_both_limits(length: int) -> None:
    for place in {0, length // 2, length - 1}:
        pages = np.full(length, 7, np.int32)
        assert [all_below(pages, limit) for limit in (7, 8, 1 << 40)] == [False, True, True]
        pages[place] = 9
        assert [all_below(pages, limit) for limit in (9, 10)] == [False, True]
        pages[place] = -1
        assert not all_below(pages, 1 << 40)


def test_no_index_is_below_any_limit() -> None:
    assert all_below(np.empty(0, np.int32), 0)


def test_a_single_index_is_kept_and_cannot_be_changed() -> None:
    row = single(5)
    assert row is single(5)
    assert (row.dtype, row.tolist()) == (np.int32, [5])
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 6
