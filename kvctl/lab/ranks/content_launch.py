"""What a launch of the content kernel is told: its form for a deck, and its tables. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvctl.lab.ranks.page_assignment import Pages
from kvctl.lab.ranks.pattern import POISON, Bytes, Words, constants
from kvctl.lab.ranks.plane_view import PlaneView

ARGUMENTS = {
    **dict.fromkeys(("places_at", "bases_at", "pages_at", "firsts_at"), "i64"),
    **dict.fromkeys(("items", "tiles", "units"), "i32"),
}
"""The kernel's, in order."""

FILL, CHECK, QUIET = "fill", "check", "poison"
TILE = 2048
WARPS = 8
_WORD = 8


class Form(NamedTuple):
    """The kernel's constants, as `content` says."""

    task: str
    page_rows: int
    row_units: int
    unit: int

    @property
    def page_units(self) -> int:
        return self.page_rows * self.row_units

    def constants(self) -> dict[str, Any]:
        """By the kernel's own names."""
        from triton import language

        return {
            "TASK": self.task,
            "PAGE_ROWS": self.page_rows,
            "ROW_UNITS": self.row_units,
            "UNIT": self.unit,
            "WORD": language.dtype(f"int{8 * self.unit}"),
            "POISON": int.from_bytes(bytes([POISON]) * _WORD, "little", signed=True),
            "TILE": TILE,
        }


class Launch(NamedTuple):
    """One launch.

    Attributes:
        form: of the kernel.
        tables: all of them, one behind the other: bytes to upload.
        bases_at, pages_at, firsts_at: where they begin in the tables; the places come first.
        layers: as many firsts there are.
        units: of a layer's stretch; a first that is less is the first wrong one.
    """

    form: Form
    tables: Bytes
    bases_at: int
    pages_at: int
    firsts_at: int
    layers: int
    units: int

    @property
    def tiles(self) -> int:
        return -(-self.units // TILE)

    def arguments(self, at: int) -> tuple[int, ...]:
        """The kernel's, where the tables are at address `at`."""
        where = (at, at + self.bases_at, at + self.pages_at, at + self.firsts_at)
        return (*where, self.layers * self.tiles, self.tiles, self.units)

    def firsts(self, tables: Bytes) -> npt.NDArray[np.int32]:
        """What became of the firsts, given the bytes behind `firsts_at`."""
        return tables[: 4 * self.layers].view(np.int32)


def launch(task: str, deck: PlaneView, pages: Pages, bases: Words | None, firsts: Sequence[int], count: int) -> Launch:
    """A launch over a stretch of `count` pages of each layer.

    Args:
        pages: all of the room.
        bases: of all of its rows; None where poison is looked for.
        firsts: for each layer, where among the pages its stretch begins.
    """
    rows, places = deck.rows, list(deck.places())
    bits = rows.row_bytes | _WORD
    for _, base in places:
        bits |= base
    unit = bits & -bits
    form = Form(task, rows.page_bytes // rows.row_bytes, rows.row_bytes // unit, unit)
    words = -(-rows.row_bytes // _WORD)
    table = np.zeros((len(places), 2 + words), np.int64)
    table[:, 0] = [base for _, base in places]
    table[:, 1] = firsts
    if bases is not None:
        table[:, 2:] = [constants(sheet, words).view(np.int64) for sheet, _ in places]
    units = count * form.page_units
    parts = [
        table.reshape(-1).view(np.uint8),
        np.empty(0, np.uint8) if bases is None else np.ascontiguousarray(bases).view(np.uint8),
        pages.astype(np.int32).view(np.uint8),
        np.full(len(places), units, np.int32).view(np.uint8),
    ]
    _, bases_at, pages_at, firsts_at = np.cumsum([0, *(part.nbytes for part in parts[:3])]).tolist()
    return Launch(form, np.concatenate(parts), bases_at, pages_at, firsts_at, len(places), units)
