from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import chunk_pages, grid, page_count, prefix_pages


def test_a_partly_filled_page_counts() -> None:
    assert [page_count(tokens, 16) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_prefix_is_whole_pages() -> None:
    assert prefix_pages(0, 16) == 0
    assert prefix_pages(48, 16) == 3
    with pytest.raises(LayoutError, match=r"40 tokens is not page-aligned: 40 % 16 = 8; round it down to 32"):
        prefix_pages(40, 16)


def test_a_cell_has_at_least_one_page() -> None:
    assert chunk_pages(8192, 16) == 512
    assert chunk_pages(100, 16) == 6
    assert chunk_pages(8, 16) == 1


@pytest.mark.parametrize(
    "bad",
    [
        lambda: page_count(-1, 16),
        lambda: page_count(1, 0),
        lambda: prefix_pages(-16, 16),
        lambda: prefix_pages(16, 0),
        lambda: chunk_pages(0, 16),
        lambda: chunk_pages(64, 0),
        lambda: grid(-1, 0, 4),
        lambda: grid(4, -1, 4),
        lambda: grid(4, 0, 0),
    ],
)
def test_sizes_out_of_range_are_refused(bad: object) -> None:
    with pytest.raises(LayoutError, match="it must be a whole number from"):
        bad()  # type: ignore[operator]


def test_a_prefix_longer_than_the_prompt_is_refused() -> None:
    with pytest.raises(LayoutError, match="prefix of 5 pages is longer than the prompt of 4"):
        grid(4, 5, 4)


@settings(deadline=None)
@given(total=st.integers(0, 200), data=st.data(), chunk=st.integers(1, 50))
def test_the_grid_covers_every_page_after_the_prefix_once_and_no_cell_crosses_a_line(
    total: int, data: st.DataObject, chunk: int
) -> None:
    prefix = data.draw(st.integers(0, total))
    cells = grid(total, prefix, chunk)
    assert [page for cell in cells for page in range(cell.first, cell.first + cell.count)] == list(range(prefix, total))
    assert all({page // chunk for page in range(c.first, c.first + c.count)} == {c.index} for c in cells)
    assert len({cell.index for cell in cells}) == len(cells)
