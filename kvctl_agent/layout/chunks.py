"""Division of a prompt's pages into numbered chunks of fixed size, and token-to-page arithmetic.

A chunk is one cell of a grid that starts at page 0 of the prompt. It is numbered by its position on the grid, never by
order of arrival. A prefix hit, or a prompt sent in other portions, changes which cells exist but not the number of any
cell, so both sides always use the same numbers.

The pages that are counted here are *transfer pages*: the longest runs of tokens that lie in one page on both sides and,
if decode ranks share a prompt by context parallelism, on one decode rank. A page of an engine consists of one or more
transfer pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.sizes import check_size

PageIndices = npt.NDArray[np.int32]
"""Indices of pages in a pool, int32 `[n]`."""


class Stripe(NamedTuple):
    """The pages of a prompt that are on one of several context-parallel decode ranks: `run` consecutive pages in turn.

    The rank numbers its pages from 0 on, in the order of the prompt.

    Attributes:
        run: Consecutive pages on one rank.
        ranks: Number of ranks that share the prompt.
        rank: The rank, from 0 on.
    """

    run: int
    ranks: int
    rank: int

    def before(self, page: int) -> int:
        """Returns the number of this rank's pages among the first `page` pages of the prompt."""
        rounds, rest = divmod(page, self.run * self.ranks)
        return rounds * self.run + min(max(rest - self.rank * self.run, 0), self.run)

    def position(self, own: int) -> int:
        """Returns the position in the prompt of this rank's page number `own`."""
        rounds, rest = divmod(own, self.run)
        return (rounds * self.ranks + self.rank) * self.run + rest


WHOLE = Stripe(1, 1, 0)
"""Stripe of a decode rank that has all pages of a prompt."""


class Chunk(NamedTuple):
    """`count` pages of a prompt from page `first` on, in cell `index` of the grid.

    Pages are numbered from the start of the prompt, including a cached prefix. The chunk has only pages of `stripe`,
    and `first` is one of them.
    """

    # The fields hide tuple.index and tuple.count, which have no use on three numbers.
    index: int  # type: ignore[assignment]
    first: int
    count: int  # type: ignore[assignment]
    stripe: Stripe = WHOLE

    @property
    def end(self) -> int:
        """Page of the prompt that follows the last page of the chunk."""
        stripe = self.stripe
        if stripe.ranks == 1:
            return self.first + self.count
        return stripe.position(stripe.before(self.first) + self.count - 1) + 1

    def source(self, pages: PageIndices, split: int) -> PageIndices:
        """Returns the chunk's transfer pages in the pool of a prefill rank, which has all pages of the prompt.

        Args:
            pages: The engine's pages of the prompt, as indices into the pool.
            split: Number of transfer pages in a page of the engine.
        """
        if self.stripe.ranks == split == 1:
            return pages[self.first : self.first + self.count]
        run, ranks, rank = self.stripe
        own = np.arange(self.count) + self.stripe.before(self.first)
        return _transfer_pages(pages, (own // run * ranks + rank) * run + own % run, split)

    def target(self, pages: PageIndices, split: int, prefix_pages: int) -> PageIndices:
        """Returns the chunk's transfer pages in the pool of a decode rank, which has the pages of the stripe.

        Args:
            pages: The engine's pages after the prefix, as indices into the pool.
            split: Number of transfer pages in a page of the engine.
            prefix_pages: Transfer pages of the prefix, over all ranks.
        """
        first = self.first - prefix_pages
        if self.stripe.ranks > 1:
            first = self.stripe.before(self.first) - self.stripe.before(prefix_pages)
        if split == 1:
            return pages[first : first + self.count]
        return _transfer_pages(pages, np.arange(first, first + self.count), split)

    def of_stripe(self, stripe: Stripe) -> Chunk:
        """Returns the pages of this chunk, which has whole cells, that are in `stripe`; the count may be 0."""
        if stripe.ranks == 1:
            return self
        first = stripe.before(self.first)
        return Chunk(self.index, stripe.position(first), stripe.before(self.first + self.count) - first, stripe)


def _transfer_pages(pages: PageIndices, wanted: npt.NDArray[np.int64], split: int) -> PageIndices:
    """Returns the transfer pages `wanted`, counted from the first of `pages`; each of these has `split` of them."""
    found: PageIndices = pages[wanted // split] * np.int32(split)
    return found + (wanted % split).astype(np.int32)


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
