"""Triton kernel that writes the pattern of `pattern`, compares with it, or looks for bytes that are not poison.

Only Triton's compiler and interpreter read this file. The kernel may not refer to module variables, which the compiler
does not allow.
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
    """Processes a range of a room's pages in every layer, tile by tile.

    Args:
        places_at: address of int64 `[layers, 2 + words of a row]`: address of page 0, start of the range in the pages,
            constants of the layer's plane.
        bases_at: address of the room's bases, int64, one per row and head; unused when looking for poison.
        pages_at: address of the pages, int32.
        firsts_at: address of int32 `[layers]`; lowered to the first wrong unit of the range.
        items: layers x tiles.
        tiles: tiles of a layer.
        units: units of a layer's range.
        TASK: "fill", "check", or "poison" to look for other bytes than poison.
        PAGE_ROWS: rows of a page, counting each head.
        ROW_UNITS: units of a row.
        UNIT: bytes that one lane writes or compares, at most 8; WORD is an integer type of that size.
        POISON: eight bytes of poison.
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
            # One atomic per wrong lane: correct content, the case that must be fast, needs none.
            first_at = firsts_at.to(tl.pointer_type(tl.int32)) + item // tiles + unit * 0
            tl.atomic_min(first_at, unit, mask=live & (found != wanted))
