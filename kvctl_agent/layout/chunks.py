"""Division of a prompt's pages into numbered chunks of fixed size, and token-to-page arithmetic.

A chunk is one cell of a grid that starts at page 0 of the prompt. It is numbered by its position on the grid, never by
order of arrival. A prefix hit, or a prompt sent in other portions, changes which cells exist but not the number of any
cell, so both sides always use the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.sizes import check_size


class Chunk(NamedTuple):
    """`count` pages of a prompt from page `first` on, in cell `index` of the grid.

    Pages are numbered from the start of the prompt, including a cached prefix.
    """

    # The fields hide tuple.index and tuple.count, which have no use on three numbers.
    index: int  # type: ignore[assignment]
    first: int
    count: int  # type: ignore[assignment]


def page_count(tokens: int, page_size: int) -> int:
    """Returns the number of pages needed for `tokens` tokens; the last page may be partly filled.

    Raises:
        LayoutError: `tokens` is negative or `page_size` is below 1.
    """
    tokens, page_size = check_size("tokens", tokens, minimum=0), check_size("page_size", page_size)
    return -(-tokens // page_size)


def prefix_pages(prefix_tokens: int, page_size: int) -> int:
    """Returns the number of pages in a prefix of `prefix_tokens` tokens that the decode side already has.

    Raises:
        LayoutError: the prefix ends inside a page, or a size is out of range.
    """
    prefix_tokens = check_size("prefix_tokens", prefix_tokens, minimum=0)
    page_size = check_size("page_size", page_size)
    pages, remainder = divmod(prefix_tokens, page_size)
    if remainder:
        raise LayoutError(
            f"a prefix of {prefix_tokens} tokens is not page-aligned: {prefix_tokens} % {page_size} = {remainder}; "
            f"round it down to {pages * page_size}"
        )
    return pages


def chunk_pages(chunk_tokens: int, page_size: int) -> int:
    """Returns the pages per chunk: the number of whole pages that fit into `chunk_tokens` tokens, at least one.

    Raises:
        LayoutError: a size is below 1.
    """
    chunk_tokens, page_size = check_size("chunk_tokens", chunk_tokens), check_size("page_size", page_size)
    return max(1, chunk_tokens // page_size)


def grid(total_pages: int, prefix_pages: int, chunk_pages: int) -> tuple[Chunk, ...]:
    """Returns the chunks of a room in page order; empty if the prefix covers the whole prompt.

    A chunk that lies wholly inside the prefix is absent, and its number is not reused. The chunk in which the prefix
    ends starts at the end of the prefix.

    Args:
        total_pages: Pages of the prompt.
        prefix_pages: Leading pages that the decode side already has.
        chunk_pages: Pages per grid cell.

    Raises:
        LayoutError: the prefix is longer than the prompt, or a size is out of range.
    """
    check_size("total_pages", total_pages, minimum=0)
    check_size("prefix_pages", prefix_pages, minimum=0)
    check_size("chunk_pages", chunk_pages)
    _check_prefix(prefix_pages, total_pages)
    return tuple(_cells(prefix_pages, total_pages, chunk_pages))


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
