"""Test pattern of KV pages: every byte is a function of seed, room, segment, layer, plane, row, head and position.

So a decode rank verifies received pages without a copy of the source. The 64-bit word w of (row, head) is
`base(room, row, head) * constant(plane, w)` modulo 2^64, both factors odd. Multiplication by an odd number is a
bijection, so rows of different tokens, heads, layers, rooms or pools differ in every word, and a row that landed in the
wrong place can be traced to its source. The outer product runs at memory speed in cache-sized blocks, far above the
rate of any transport here.

Rows are counted through all pages of a room, or all its items of a state component, in the prompt's order. Heads and
layers are numbered over the whole model: a rank that sends the wrong heads fails verification, and replicated heads
have the same content on all ranks.
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
"""Value of every byte of a decode rank's pool before a run; a byte that still has this value was never written."""

_BLOCK_BYTES = 256 << 10
_ROW_STEP = 0x9E3779B97F4A7C15
_HEAD_STEP = 0xD1B54A32D192ED03
_AUX_STEP = 0xAEF17502108EF2D9
_MASK = 2**64 - 1
_POISON_WORD = np.uint64(int.from_bytes(bytes([POISON]) * 8, "little"))


class PlaneId(NamedTuple):
    """Identifies one plane of one layer of one segment; layers are numbered over the whole model."""

    segment: int
    layer: int
    plane: int


class Rows(NamedTuple):
    """Geometry of one plane on one rank.

    Attributes:
        per_page: rows (tokens) per page; each row holds all heads of this rank.
        head_lo, heads: the rank holds the global heads [head_lo, head_lo + heads).
        row_bytes: bytes of one head in one row.
        element_bytes: size of an element, the unit in which a mismatch is shown.
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
    """The first wrong element found in a range of pages.

    Attributes:
        row: all bytes found in this row and head, to trace where they come from.
    """

    at: int
    head: int
    dim: int
    expected: bytes
    found: bytes
    row: bytes


class Source(NamedTuple):
    """The position to which a misplaced row belongs: room index, plane, row in the room (`at`) and global head."""

    room: int
    plane: PlaneId
    at: int
    head: int


def row_bases(seed: int, room: int, rows: int, head_lo: int, heads: int) -> Words:
    """Returns the base words of a room: one odd word per (row, head), row-major, uint64 `[rows * heads]`.

    Args:
        room: index of the room in the load.
        rows: number of rows, counted from the start of the room.
        head_lo, heads: selects the global heads [head_lo, head_lo + heads).
    """
    start = np.uint64(_room_word(seed, room))
    row_part = np.arange(rows, dtype=np.uint64) * np.uint64(_ROW_STEP)
    head_part = np.arange(head_lo, head_lo + heads, dtype=np.uint64) * np.uint64(_HEAD_STEP)
    mixed: Words = _mix64(start + row_part[:, None] + head_part[None, :]).reshape(-1)
    return mixed | np.uint64(1)


@lru_cache(maxsize=1024)
def constants(plane: PlaneId, words: int) -> Words:
    """Returns the constants of a plane: one odd word per 8 bytes of a row, uint64 `[words]`."""
    first = np.uint64(mix64(((plane.segment << 32 | plane.layer) << 8 | plane.plane) + 1))
    out: Words = _mix64(first + np.arange(words, dtype=np.uint64) * np.uint64(_ROW_STEP)) | np.uint64(1)
    out.setflags(write=False)
    return out


def aux_row(seed: int, room: int, nbytes: int) -> Bytes:
    """Returns the pattern of a room's aux row, uint8 `[nbytes]`; the same on every rank that may have to write it."""
    start = np.uint64(_room_word(seed, room) ^ _AUX_STEP)
    words = _mix64(start + np.arange(-(-nbytes // 8), dtype=np.uint64) * np.uint64(_AUX_STEP))
    return words.view(np.uint8)[:nbytes]


class Writer:
    """Writes and checks the test pattern in planes of one geometry in host memory, with cache-sized scratch buffers."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self._words = -(-rows.row_bytes // 8)
        self._pages = max(1, _BLOCK_BYTES // rows.page_bytes)
        count = self._pages * rows.per_page * rows.heads
        self._product = np.empty((count, self._words), dtype=np.uint64)
        # Rows that are not whole words need a second, dense copy.
        self._dense: Bytes | None = None
        if rows.row_bytes % 8:
            self._dense = np.empty((count, rows.row_bytes), dtype=np.uint8)

    def fill(self, dense: Bytes, bases: Words, plane: PlaneId) -> None:
        """Writes the test pattern of a room.

        Args:
            dense: all pages, or state items, of the room in this plane on this rank, in the prompt's order, uint8
                `[pages, page_bytes]`.
            bases: `row_bases` of the room for this rank's heads and all rows of these pages; 0: poison.
        """
        for first, end in self._blocks(len(dense)):
            dense[first:end] = self._expected(bases, first, end, plane).reshape(end - first, -1)

    def check(self, dense: Bytes, bases: Words, plane: PlaneId, first_page: int = 0) -> Wrong | None:
        """Compares consecutive pages of a room with the test pattern; returns the first wrong element, or None.

        Args:
            bases: `row_bases` of the room for this rank's heads, from the start of the room; 0: poison.
            first_page: position of the first of the pages in the room.
        """
        for first, end in self._blocks(len(dense)):
            expected, found = self._expected(bases, first_page + first, first_page + end, plane), dense[first:end]
            if not np.array_equal(found.reshape(-1), expected):
                return self._locate(found.reshape(-1), expected, first_page + first)
        return None

    def _blocks(self, pages: int) -> Iterator[tuple[int, int]]:
        for first in range(0, pages, self._pages):
            yield first, min(first + self._pages, pages)

    def _expected(self, bases: Words, first_page: int, end_page: int, plane: PlaneId) -> Bytes:
        """Returns the expected bytes of pages [first_page, end_page) of the room, flat, in a buffer that is reused."""
        per_page = self.rows.per_page * self.rows.heads
        part = bases[first_page * per_page : end_page * per_page]
        product = self._product[: len(part)]
        np.multiply(part[:, None], constants(plane, self._words), out=product)
        if not part.all():
            product[part == 0] = _POISON_WORD
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


def trace(row: bytes, seed: int, rooms: Mapping[int, int], heads: int, planes: Iterable[PlaneId]) -> Source | None:
    """Finds the position to which a row of the test pattern belongs, by inverting the product.

    Args:
        rooms: number of rows of each candidate room, by room index.

    Returns:
        The position; None if the row belongs to no candidate or has fewer than 8 bytes.
    """
    if len(row) < 8:
        return None
    word = int.from_bytes(row[:8], "little")
    wanted = {word * pow(int(constants(plane, 1)[0]), -1, 1 << 64) & _MASK: plane for plane in planes}
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
    """Applies `mix64` of `kvctl_agent.layout.parallel` to every element."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
