"""One plane of one segment on a rank, over all the layers it holds: what content is written to and checked in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from kvctl.lab.ranks.pattern import POISON, Bytes, Pages, PlaneId, Rows, Words, Writer, Wrong
from kvctl_agent.device.base import Device
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.layout.shape import Plane
from kvctl_agent.memory.pool import KVPool


@dataclass(frozen=True, slots=True)
class PlaneView:
    """A plane in every layer here.

    Attributes:
        held: which layers and heads of the segment.
        index, plane: of the plane in a layer.
        writer: writes and checks rows of its geometry.
    """

    pool: KVPool
    held: LocalShard
    index: int
    plane: Plane
    writer: Writer

    @property
    def num_slots(self) -> int:
        """Pages (of a state: items) of each layer."""
        return self.pool.segments[self.held.segment.index].num_slots

    @property
    def rows(self) -> Rows:
        return self.writer.rows

    @property
    def name(self) -> str:
        """What a mismatch calls it: "k", "latent", "draft k", a state component's name."""
        return f"draft {self.plane.name}" if self.held.segment.name == "draft" else self.plane.name

    def sheets(self) -> Iterator[tuple[PlaneId, Bytes]]:
        """Each layer's bytes, flat, in page order; of a pool in host memory."""
        memory = self.pool.segments[self.held.segment.index]
        for layer in range(self.held.layer_lo, self.held.layer_hi):
            yield self._sheet(layer), memory.block(layer, self.index)

    def places(self) -> Iterator[tuple[PlaneId, int]]:
        """Each layer's address of page 0, wherever the pool is."""
        bases = self.pool.segments[self.held.segment.index].addresses.bases
        for layer, planes in enumerate(bases, self.held.layer_lo):
            yield self._sheet(layer), planes[self.index]

    def _sheet(self, layer: int) -> PlaneId:
        return PlaneId(self.held.segment.index, layer, self.index)


def plane_views(pool: KVPool, dtype_bytes: int) -> list[PlaneView]:
    """Every plane of every segment that a pool has layers of.

    Args:
        dtype_bytes: of an element of KV.
    """
    return [
        PlaneView(pool, memory.shard, index, plane, Writer(_rows(memory.shard, plane, dtype_bytes)))
        for memory in pool.segments
        if memory.shard.num_layers
        for index, plane in enumerate(memory.shard.segment.planes)
    ]


def _rows(here: LocalShard, plane: Plane, dtype_bytes: int) -> Rows:
    # Scales and state have elements of their own size; bytes say enough there.
    paged = not here.segment.state and plane.head_bytes % dtype_bytes == 0 and "scale" not in plane.name
    return Rows(
        per_page=plane.rows,
        head_lo=here.head_lo,
        heads=here.heads,
        row_bytes=plane.head_bytes,
        element_bytes=dtype_bytes if paged else 1,
    )


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
