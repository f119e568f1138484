"""Where content is: what writes it into a pool and compares it there. Here in host memory; `mirror`, `gpu_store`: not.

Pages of a state are its items. All calls are untimed parts of a bench, and wait until they have done it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvctl.lab.ranks.page_assignment import Pages
from kvctl.lab.ranks.pattern import POISON, Bytes, PlaneId, Words, Wrong
from kvctl.lab.ranks.plane_view import PlaneView

_PIECE_BYTES = 256 << 10


class Written(NamedTuple):
    """A page that should be poison all through, and all of its bytes."""

    sheet: PlaneId
    page: int
    found: Bytes


class Store(Protocol):
    """Content of one rank's pool."""

    def fill(self, deck: PlaneView, pages: Pages, bases: Words) -> None:
        """Writes the rows of `bases` into a room's `pages` in every layer."""
        ...

    def check(
        self, deck: PlaneView, pages: Pages, bases: Words, firsts: Sequence[int], count: int
    ) -> tuple[PlaneId, Wrong] | None:
        """Compares a stretch of a room's pages of every layer with the pattern.

        Args:
            pages: all of the room.
            firsts: for each layer, where in the room its stretch begins.
            count: pages of a stretch.

        Returns:
            The first layer that is wrong, and the first wrong element there.
        """
        ...

    def poison(self, deck: PlaneView, pages: Pages | None = None) -> None:
        """Overwrites these pages in every layer; None: all pages."""
        ...

    def written(self, deck: PlaneView, quiet: Pages) -> Iterator[Written]:
        """The first of the quiet pages that is not all poison, of every layer that has one."""
        ...


class HostStore:
    """In host memory, with numpy."""

    def fill(self, deck: PlaneView, pages: Pages, bases: Words) -> None:
        for sheet, block in deck.sheets():
            deck.writer.fill(block, pages, bases, sheet)

    def check(
        self, deck: PlaneView, pages: Pages, bases: Words, firsts: Sequence[int], count: int
    ) -> tuple[PlaneId, Wrong] | None:
        for (sheet, block), first in zip(deck.sheets(), firsts, strict=True):
            wrong = deck.writer.check(block, pages[first : first + count], bases, sheet, first_page=first)
            if wrong is not None:
                return sheet, wrong
        return None

    def poison(self, deck: PlaneView, pages: Pages | None = None) -> None:
        for _, block in deck.sheets():
            block.reshape(-1, deck.rows.page_bytes)[slice(None) if pages is None else pages] = POISON

    def written(self, deck: PlaneView, quiet: Pages) -> Iterator[Written]:
        for sheet, block in deck.sheets():
            rows = block.reshape(-1, deck.rows.page_bytes)
            page = _first_written(rows, quiet)
            if page is not None:
                yield Written(sheet, page, rows[page])


def _first_written(pages: Bytes, quiet: Pages) -> int | None:
    """The first of the quiet pages that is not all poison; many small pages are looked at in one go."""
    step = max(1, _PIECE_BYTES // pages.shape[1])
    for first in range(0, len(quiet), step):
        some = quiet[first : first + step]
        written = np.flatnonzero((pages[some] != POISON).any(axis=1))
        if len(written):
            return int(some[written[0]])
    return None
