"""Content of a pool on a device, made and checked in host memory, page by page: slow, and needs no kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvctl.lab.ranks.content_store import Written
from kvctl.lab.ranks.page_assignment import Pages
from kvctl.lab.ranks.pattern import POISON, Bytes, PlaneId, Words, Wrong
from kvctl.lab.ranks.plane_view import PlaneView
from kvctl_agent.device.base import Device


class MirrorStore:
    """Pages go through a dense copy, where they follow each other."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def fill(self, deck: PlaneView, pages: Pages, bases: Words) -> None:
        dense, places = _dense(deck, len(pages)), np.arange(len(pages))
        for sheet, base in deck.places():
            deck.writer.fill(dense.reshape(-1), places, bases, sheet)
            self._upload(base, pages, dense)

    def check(
        self, deck: PlaneView, pages: Pages, bases: Words, firsts: Sequence[int], count: int
    ) -> tuple[PlaneId, Wrong] | None:
        for (sheet, base), first in zip(deck.places(), firsts, strict=True):
            wrong = self.look(deck, sheet, base, pages[first : first + count], bases, first)
            if wrong is not None:
                return sheet, wrong
        return None

    def poison(self, deck: PlaneView, pages: Pages | None = None) -> None:
        page_bytes = deck.rows.page_bytes
        for _, base in deck.places():
            if pages is None:
                self._device.fill(base, deck.num_slots * page_bytes, POISON)
            for page in () if pages is None else pages.tolist():
                self._device.fill(base + page * page_bytes, page_bytes, POISON)

    def written(self, deck: PlaneView, quiet: Pages) -> Iterator[Written]:
        for sheet, base in deck.places():
            found = self.first_written(deck, sheet, base, quiet)
            if found is not None:
                yield found

    def look(self, deck: PlaneView, sheet: PlaneId, base: int, pages: Pages, bases: Words, first: int) -> Wrong | None:
        """The first wrong element of these pages of one layer, of which the first is page `first` of the room."""
        dense = self._download(deck, base, pages)
        return deck.writer.check(dense.reshape(-1), np.arange(len(pages)), bases, sheet, first_page=first)

    def first_written(self, deck: PlaneView, sheet: PlaneId, base: int, quiet: Pages) -> Written | None:
        """The first quiet page of one layer that is not all poison."""
        for at in range(len(quiet)):
            (found,) = self._download(deck, base, quiet[at : at + 1])
            if (found != POISON).any():
                return Written(sheet, int(quiet[at]), found)
        return None

    def _upload(self, base: int, pages: Pages, dense: Bytes) -> None:
        for page, found in zip(pages.tolist(), dense, strict=True):
            self._device.upload(base + page * dense.shape[1], found)

    def _download(self, deck: PlaneView, base: int, pages: Pages) -> Bytes:
        dense = _dense(deck, len(pages))
        for page, found in zip(pages.tolist(), dense, strict=True):
            self._device.download(base + page * dense.shape[1], found)
        return dense


def _dense(deck: PlaneView, pages: int) -> Bytes:
    return np.empty((pages, deck.rows.page_bytes), np.uint8)
