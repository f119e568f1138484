"""Content as a function of (seed, room, segment, layer, plane, row, head, byte), so that decode ranks verify alone.

One 64-bit word w of the row of (row, head) is `base(room, row, head) * constant(sheet, w)` modulo 2^64, both odd; a
sheet is one plane of one layer. Multiplying by an odd number is a bijection, so two rows that share a place in another
token, head, layer, room or pool differ in every word, and a row that landed in the wrong place can be traced back to
where it belongs. The outer product runs at memory speed in cache-sized pieces, far above what any transport here moves.

Rows are counted through all pages (of a state: items) of a room, in the prompt's order. Heads and layers are the
model's numbers, so that a rank that mistakes its share cannot verify, and replicas hold the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvctl_agent.layout.parallel import mix64

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Pages = npt.NDArray[np.int64]

POISON = 0xDB
"""Every byte of a decode page before a run: what still reads so was never written."""

_PIECE_BYTES = 256 << 10
_ROW_STEP = 0x9E3779B97F4A7C15
_HEAD_STEP = 0xD1B54A32D192ED03
_AUX_STEP = 0xAEF17502108EF2D9
_MASK = 2**64 - 1


class PlaneId(NamedTuple):
    """One plane of one layer of one segment, by the model's numbers."""

    segment: int
    layer: int
    plane: int


class Rows(NamedTuple):
    """Geometry of one plane on one rank: `per_page` rows of global heads [head_lo, head_lo + heads) each.

    `row_bytes` are those of one head, `element_bytes` what a difference is shown in.
    """

    per_page: int
    head_lo: int
    heads: int
    row_bytes: int
    element_bytes: int

    @property
    def page_bytes(self) -> int:
        return self.per_page * self.heads * self.row_bytes


class Wrong(NamedTuple):
    """The first element that is not what the pattern says: the row of the room, the global head."""

    at: int
    head: int
    dim: int
    expected: bytes
    found: bytes
    row: bytes  # the whole row found, to trace where it came from


class Source(NamedTuple):
    """Where a row found in the wrong place belongs."""

    room: int
    sheet: PlaneId
    at: int
    head: int


def row_bases(seed: int, room: int, rows: int, head_lo: int, heads: int) -> Words:
    """One odd word per (row, head) of a room, row-major, uint64 `[rows * heads]`."""
    start = np.uint64(_room_word(seed, room))
    row_part = np.arange(rows, dtype=np.uint64) * np.uint64(_ROW_STEP)
    head_part = np.arange(head_lo, head_lo + heads, dtype=np.uint64) * np.uint64(_HEAD_STEP)
    mixed: Words = _mix64(start + row_part[:, None] + head_part[None, :]).reshape(-1)
    return mixed | np.uint64(1)


@lru_cache(maxsize=1024)
def constants(sheet: PlaneId, words: int) -> Words:
    """One odd word per 8 bytes of a row of this sheet, uint64 `[words]`."""
    first = np.uint64(mix64(((sheet.segment << 32 | sheet.layer) << 8 | sheet.plane) + 1))
    out: Words = _mix64(first + np.arange(words, dtype=np.uint64) * np.uint64(_ROW_STEP)) | np.uint64(1)
    out.setflags(write=False)
    return out


def aux_row(seed: int, room: int, nbytes: int) -> Bytes:
    """The aux row of a room, uint8 `[nbytes]`; the same whichever rank is elected to write it."""
    start = np.uint64(_room_word(seed, room) ^ _AUX_STEP)
    words = _mix64(start + np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(_AUX_STEP))
    return words.view(np.uint8)[:nbytes]


class Writer:
    """Writes and checks rows of one geometry; holds the scratch memory that makes this run in cache."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self._words = -(-rows.row_bytes // 8)
        self._pages = max(1, _PIECE_BYTES // rows.page_bytes)
        count = self._pages * rows.per_page * rows.heads
        self._product = np.empty((count, self._words), dtype=np.uint64)
        # Rows that are not whole words need a second, dense copy.
        self._dense: Bytes | None = None
        if rows.row_bytes % 8:
            self._dense = np.empty((count, rows.row_bytes), dtype=np.uint8)
        self._found = np.empty((self._pages, rows.page_bytes), dtype=np.uint8)

    def fill(self, block: Bytes, pages: Pages, bases: Words, sheet: PlaneId) -> None:
        """Write the rows of `bases` into `pages` of `block`.

        Args:
            block: all bytes of this sheet on this rank, flat, in page order.
            pages: index of every page (of a state: item) of the room, in the prompt's order.
            bases: `row_bases` of the room for this rank's heads, whole pages.
        """
        target = _as_pages(block, self.rows.page_bytes)
        for first, end in self._pieces(len(pages)):
            piece = self._expected(bases, first, end, sheet)
            target[pages[first:end]] = _as_pages(piece, self.rows.page_bytes)

    def check(self, block: Bytes, pages: Pages, bases: Words, sheet: PlaneId, first_page: int = 0) -> Wrong | None:
        """Compare `pages` of `block` with the pattern; `pages[0]` is page `first_page` of the room.

        Returns:
            The first wrong element, or None.
        """
        source = _as_pages(block, self.rows.page_bytes)
        for first, end in self._pieces(len(pages)):
            expected = self._expected(bases, first_page + first, first_page + end, sheet)
            found = self._found[: end - first].reshape(-1)
            np.take(source, pages[first:end], out=_as_pages(found, self.rows.page_bytes), mode="clip")
            if not _equal(found, expected):
                return self._locate(found, expected, first_page + first)
        return None

    def _pieces(self, pages: int) -> Iterator[tuple[int, int]]:
        for first in range(0, pages, self._pages):
            yield first, min(first + self._pages, pages)

    def _expected(self, bases: Words, first_page: int, end_page: int, sheet: PlaneId) -> Bytes:
        """Flat bytes of pages [first_page, end_page) of the room; overwritten by the next call."""
        per_page = self.rows.per_page * self.rows.heads
        part = bases[first_page * per_page : end_page * per_page]
        product = self._product[: len(part)]
        np.multiply(part[:, None], constants(sheet, self._words), out=product)
        as_bytes = product.view(np.uint8)
        if self._dense is None:
            return as_bytes.reshape(-1)
        dense = self._dense[: len(part)]
        np.copyto(dense, as_bytes[:, : self.rows.row_bytes])
        return dense.reshape(-1)

    def _locate(self, found: Bytes, expected: Bytes, first_page: int) -> Wrong:
        at = int(np.flatnonzero(found != expected)[0])
        row, in_row = divmod(at, self.rows.row_bytes)
        in_room, head = divmod(row, self.rows.heads)
        dim, in_element = divmod(in_row, self.rows.element_bytes)
        element = slice(at - in_element, at - in_element + self.rows.element_bytes)
        return Wrong(
            at=first_page * self.rows.per_page + in_room,
            head=self.rows.head_lo + head,
            dim=dim,
            expected=expected[element].tobytes(),
            found=found[element].tobytes(),
            row=found[row * self.rows.row_bytes : (row + 1) * self.rows.row_bytes].tobytes(),
        )


def trace(row: bytes, seed: int, rooms: Mapping[int, int], heads: int, sheets: Iterable[PlaneId]) -> Source | None:
    """Find which row of which room this is, by undoing the product; None for a row that is no one's.

    Args:
        row: a whole row, of at least 8 bytes.
        seed: the pattern's.
        rooms: rows of each room that may be its source.
        heads: over the whole model.
        sheets: those that may be its source.
    """
    if len(row) < 8:
        return None
    word = int.from_bytes(row[:8], "little")
    wanted = {word * pow(int(constants(sheet, 1)[0]), -1, 1 << 64) & _MASK: sheet for sheet in sheets}
    keys = np.fromiter(wanted, dtype=np.uint64, count=len(wanted))
    for room, count in rooms.items():
        bases = row_bases(seed, room, count, 0, heads)
        hits = np.flatnonzero(np.isin(bases, keys))
        if len(hits):
            at, head = divmod(int(hits[0]), heads)
            return Source(room, wanted[int(bases[hits[0]])], at, head)
    return None


def _room_word(seed: int, room: int) -> int:
    return mix64(mix64(seed) ^ mix64(room + 1))


def _mix64(x: Words) -> Words:
    """`layout.heads.mix64` of every element."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _as_pages(flat: Bytes, page_bytes: int) -> npt.NDArray[np.void]:
    """One opaque element per page: numpy copies those with memcpy, whatever their size."""
    return flat.view(np.dtype((np.void, page_bytes)))


def _equal(a: Bytes, b: Bytes) -> bool:
    # Eight bytes at a time where the size allows; scratch memory is aligned either way.
    if a.nbytes % 8 == 0:
        return bool(np.array_equal(a.view(np.uint64), b.view(np.uint64)))
    return bool(np.array_equal(a, b))
