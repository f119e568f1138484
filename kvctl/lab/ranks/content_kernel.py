"""One kernel writes the pattern of `pattern`, compares with it, or looks for what is not poison.

Only Triton's compiler and its interpreter read this file. Nothing here may refer to a module's variable: the compiler
allows none.
"""

# mypy: disable-error-code="no-untyped-def"
# No `from __future__ import annotations`: Triton reads the annotations themselves.

import triton.language as tl


def content(
    places_at,
    bases_at,
    pages_at,
    firsts_at,
    items,
    tiles,
    units,
    TASK: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    WORD: tl.constexpr,
    POISON: tl.constexpr,
    TILE: tl.constexpr,
):
    """Goes over a stretch of a room's pages in every layer; a program does every so many-th tile.

    Args:
        places_at: address of int64 `[layers, 2 + words of a row]`: of page 0; where the stretch begins among the pages;
            constants of the layer's sheet.
        bases_at: address of the room's bases, one for each row and head, int64; unused where poison is looked for.
        pages_at: address of the pages, int32.
        firsts_at: address of int32 `[layers]`: becomes the first unit of the stretch that is wrong, if that is less.
        items: layers x tiles.
        tiles: of a layer.
        units: of a layer's stretch.
        TASK: "fill", "check", or "poison" to look for what is not.
        PAGE_ROWS: rows of a page, each head's for itself.
        ROW_UNITS: units of a row.
        UNIT: bytes of what a lane writes or compares, at most 8; WORD is an integer type of that size.
        POISON: eight bytes of it.
        TILE: units of a tile, a power of two.
    """
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        place = places_at.to(tl.pointer_type(tl.int64)) + item // tiles * (2 + (ROW_UNITS * UNIT + 7) // 8)
        unit = item % tiles * TILE + tl.arange(0, TILE)
        live = unit < units
        row = unit // ROW_UNITS
        inside = unit % ROW_UNITS * UNIT
        first = tl.load(place + 1)
        listed = pages_at.to(tl.pointer_type(tl.int32)) + first + row // PAGE_ROWS
        page = tl.load(listed, mask=live, other=0).to(tl.int64)
        address = tl.load(place) + (page * PAGE_ROWS + row % PAGE_ROWS) * (ROW_UNITS * UNIT) + inside
        bytes_at = address.to(tl.pointer_type(WORD))
        if TASK == "poison":
            wanted = tl.full([TILE], POISON, tl.int64).to(WORD)
        else:
            bases = bases_at.to(tl.pointer_type(tl.int64)) + first * PAGE_ROWS + row
            word = tl.load(bases, mask=live, other=0) * tl.load(place + 2 + inside // 8)
            wanted = (word >> (inside % 8 * 8).to(tl.int64)).to(WORD)
        if TASK == "fill":
            tl.store(bytes_at, wanted, mask=live)
        else:
            found = tl.load(bytes_at, mask=live, other=0)
            # Every lane for itself: where all is well, which is what must be fast, none does it.
            first_at = firsts_at.to(tl.pointer_type(tl.int32)) + item // tiles + unit * 0
            tl.atomic_min(first_at, unit, mask=live & (found != wanted))
