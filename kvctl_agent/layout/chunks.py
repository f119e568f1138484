"""Pages, prefix and the fixed chunk grid, so that both sides name the same cells however the prompt was sent.

A cell is numbered by its place on a grid that starts at page 0 of the prompt, never by arrival: a prefix hit or another
split of the sends changes which cells exist, not what a number means.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.sizes import check_size


class Chunk(NamedTuple):
    """One cell of the grid: `count` pages from page `first` of the prompt (0 is its first page, cached or not)."""

    # The fields hide tuple.index and tuple.count, which nobody needs on three numbers.
    index: int  # type: ignore[assignment]
    first: int
    count: int  # type: ignore[assignment]


def page_count(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens; the last may be partly filled.

    Raises:
        LayoutError: a negative token count or a page size below 1.
    """
    tokens, page_size = check_size("tokens", tokens, minimum=0), check_size("page_size", page_size)
    return -(-tokens // page_size)


def prefix_pages(prefix_tokens: int, page_size: int) -> int:
    """Whole pages of a prefix that the decode side already has.

    Raises:
        LayoutError: the prefix ends inside a page; this room fails, no other does.
    """
    prefix_tokens = check_size("prefix_tokens", prefix_tokens, minimum=0)
    page_size = check_size("page_size", page_size)
    pages, over = divmod(prefix_tokens, page_size)
    if over:
        raise LayoutError(
            f"a prefix of {prefix_tokens} tokens is not page-aligned: {prefix_tokens} % {page_size} = {over}; "
            f"round it down to {pages * page_size}"
        )
    return pages


def chunk_pages(chunk_tokens: int, page_size: int) -> int:
    """Pages per grid cell: as many whole pages as fit `chunk_tokens`, at least one.

    Raises:
        LayoutError: a size below 1.
    """
    chunk_tokens, page_size = check_size("chunk_tokens", chunk_tokens), check_size("page_size", page_size)
    return max(1, chunk_tokens // page_size)


def grid(total_pages: int, prefix_pages: int, chunk_pages: int) -> tuple[Chunk, ...]:
    """The cells of a room, in order.

    A cell wholly inside the prefix is absent and its number is not reused; the cell that holds the end of the prefix
    starts there. Nothing left to send gives no cells.

    Raises:
        LayoutError: the prefix is longer than the prompt, or a size is out of range.
    """
    check_size("total_pages", total_pages, minimum=0)
    check_size("prefix_pages", prefix_pages, minimum=0)
    check_size("chunk_pages", chunk_pages)
    _check_prefix(prefix_pages, total_pages)
    return tuple(_cells(prefix_pages, total_pages, chunk_pages))


def full_pages(fed: int, last: bool, chunk_pages: int) -> int:
    """How many of the `fed` first pages of a prompt may be sent: up to the last full grid line, or all of the last.

    The tail of what is not the last is held back and rides with what follows, so that no cell goes in two pieces.
    """
    return fed if last else fed - fed % chunk_pages


def _cells(first: int, end: int, chunk_pages: int) -> Iterator[Chunk]:
    while first < end:
        index = first // chunk_pages
        stop = min((index + 1) * chunk_pages, end)
        yield Chunk(index, first, stop - first)
        first = stop


def _check_prefix(prefix_pages: int, total_pages: int) -> None:
    if prefix_pages > total_pages:
        raise LayoutError(
            f"a cached prefix of {prefix_pages} pages is longer than the prompt of {total_pages}: "
            f"the two sides disagree on the prompt"
        )
