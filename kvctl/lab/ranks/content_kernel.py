"""Triton kernel that fills pages with the test pattern of `pattern`, checks pages for it, or finds non-poison bytes.

Only Triton's compiler and interpreter load this file. The kernel must not refer to module variables: the compiler does
not allow it.
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
    HEADS: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    WORD: tl.constexpr,
    POISON: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes or compares a range of a room's pages in every layer.

    A unit is the 1, 2, 4 or 8 bytes that one lane writes or compares; a tile is the `TILE` units that a program
    processes at a time.

    Args:
        places_at: address of int64 `[layers, 2 + words of a row]`. A row holds the address of page 0 of the layer, the
            start of the layer's range within `pages_at`, and the constants of the layer's plane.
        bases_at: address of `pattern.row_bases` of the room, int64, one per row and head; 0 for rows of poison. Unused
            for task "poison".
        pages_at: address of the room's page indices, int32.
        firsts_at: address of int32 `[layers]`; the kernel lowers an entry to the layer's first wrong unit.
        items: number of layers times `tiles`.
        tiles: number of tiles of one layer's range.
        units: number of units of one layer's range.
        TASK: "fill" writes the pattern; "check" finds units that differ from it; "poison" finds units that differ from
            poison.
        PAGE_ROWS: rows per page, counting one row per token and head.
        HEADS: heads per token.
        PAGE_STRIDE, ROW_STRIDE, HEAD_STRIDE: bytes between consecutive pages, tokens and heads.
        ROW_UNITS: units per row.
        UNIT: bytes per unit.
        WORD: integer type of `UNIT` bytes.
        POISON: eight bytes of poison as one integer.
        TILE: units per tile, a power of two.
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
        in_page = row % PAGE_ROWS // HEADS * ROW_STRIDE + row % HEADS * HEAD_STRIDE + inside
        address = tl.load(place) + page * PAGE_STRIDE + in_page
        bytes_at = address.to(tl.pointer_type(WORD))
        wanted = tl.full([TILE], POISON, tl.int64).to(WORD)
        if TASK != "poison":
            base = tl.load(bases_at.to(tl.pointer_type(tl.int64)) + first * PAGE_ROWS + row, mask=live, other=0)
            word = base * tl.load(place + 2 + inside // 8)
            wanted = tl.where(base == 0, wanted, (word >> (inside % 8 * 8).to(tl.int64)).to(WORD))
        if TASK == "fill":
            tl.store(bytes_at, wanted, mask=live)
        else:
            found = tl.load(bytes_at, mask=live, other=0)
            # One atomic per wrong lane: correct content, which must be checked fast, needs none.
            first_at = firsts_at.to(tl.pointer_type(tl.int32)) + item // tiles + unit * 0
            tl.atomic_min(first_at, unit, mask=live & (found != wanted))
