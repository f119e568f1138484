from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl_agent.errors import LayoutError, LocalProtocolError
from kvctl_agent.layout.chunks import Chunk, ChunkCutter, chunk_pages, grid, page_count, prefix_pages


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
        lambda: ChunkCutter(-1, 4),
        lambda: ChunkCutter(0, 0),
        lambda: ChunkCutter(0, 4).feed(-1, last=False),
    ],
)
def test_sizes_out_of_range_are_refused(bad: object) -> None:
    with pytest.raises(LayoutError, match="it must be a whole number from"):
        bad()  # type: ignore[operator]


def test_cells_are_numbered_by_place_and_the_last_may_be_short() -> None:
    assert grid(10, 0, 4) == (Chunk(0, 0, 4), Chunk(1, 4, 4), Chunk(2, 8, 2))


def test_a_prefix_removes_whole_cells_and_trims_the_one_it_ends_in_without_renumbering() -> None:
    assert grid(14, 5, 4) == (Chunk(1, 5, 3), Chunk(2, 8, 4), Chunk(3, 12, 2))
    assert grid(14, 8, 4) == (Chunk(2, 8, 4), Chunk(3, 12, 2))


def test_nothing_to_send_has_no_cells() -> None:
    assert grid(0, 0, 4) == ()
    assert grid(7, 7, 4) == ()


def test_a_prefix_longer_than_the_prompt_is_refused_on_both_sides() -> None:
    text = "prefix of 5 pages is longer than the prompt of 4"
    with pytest.raises(LayoutError, match=text):
        grid(4, 5, 4)
    cutter = ChunkCutter(5, 4)
    cutter.feed(4, last=False)
    with pytest.raises(LayoutError, match=text):
        cutter.feed(0, last=True)


def test_a_send_is_cut_at_lines_and_its_tail_held_back_for_the_next() -> None:
    cutter = ChunkCutter(0, 4)
    assert cutter.feed(3, last=False) == []
    assert cutter.feed(6, last=False) == [Chunk(0, 0, 4), Chunk(1, 4, 4)]
    assert cutter.fed == 9
    assert cutter.feed(2, last=True) == [Chunk(2, 8, 3)]


def test_an_empty_last_send_releases_what_was_held_back() -> None:
    cutter = ChunkCutter(0, 4)
    cutter.feed(2, last=False)
    assert cutter.feed(0, last=True) == [Chunk(0, 0, 2)]


def test_a_send_that_ends_inside_the_prefix_yields_nothing() -> None:
    cutter = ChunkCutter(6, 4)
    assert cutter.feed(5, last=False) == []
    assert cutter.feed(3, last=False) == [Chunk(1, 6, 2)]
    assert cutter.feed(0, last=True) == []


def test_pages_after_the_last_send_are_a_caller_error() -> None:
    cutter = ChunkCutter(0, 4)
    cutter.feed(4, last=True)
    with pytest.raises(LocalProtocolError, match="2 pages sent after the last ones"):
        cutter.feed(2, last=True)


sends = st.lists(st.integers(0, 40), min_size=1, max_size=12)


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


@settings(deadline=None)
@given(sends=sends, data=st.data(), chunk=st.integers(1, 50))
def test_however_a_prompt_is_sent_the_writer_cuts_exactly_the_grid(
    sends: list[int], data: st.DataObject, chunk: int
) -> None:
    total = sum(sends)
    prefix = data.draw(st.integers(0, total))
    cutter = ChunkCutter(prefix, chunk)
    got: list[Chunk] = []
    for i, pages in enumerate(sends):
        got += cutter.feed(pages, last=i == len(sends) - 1)
        # Only computed pages may leave, and nothing that could leave whole is held back.
        assert all(cell.first + cell.count <= cutter.fed for cell in got)
        complete = [c for c in grid(total, prefix, chunk) if (c.index + 1) * chunk <= cutter.fed]
        assert got[: len(complete)] == complete
    assert tuple(got) == grid(total, prefix, chunk)
    assert cutter.fed == total
