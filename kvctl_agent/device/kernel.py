"""The one kernel: copies rows between pages and packed memory, or from pages to pages.

Only Triton's compiler and its interpreter read this file. Nothing here may refer to a module's variable: the compiler
allows none, and the source is what its cache goes by.
"""

# mypy: disable-error-code="no-untyped-def"
# No `from __future__ import annotations`: Triton reads the annotations themselves.

import triton.language as tl


def copy_rows(
    blocks_at,
    pages_at,
    items,
    tiles,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    UNIT: tl.constexpr,
    SRC_ROW: tl.constexpr,
    DST_ROW: tl.constexpr,
    SRC_PAGED: tl.constexpr,
    DST_PAGED: tl.constexpr,
    ALIGN: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    TILE_UNITS: tl.constexpr,
):
    """Copies all units of all blocks; a program does every so many-th tile, so any number of them does it all.

    Args:
        blocks_at: address of `Batch.blocks`.
        pages_at: address of the list of pages, int32.
        items: blocks x tiles.
        tiles: of the block that has most.
        ROWS: of a page.
        SPLIT: units of a row.
        UNIT: bytes that are contiguous on both sides, a power of two.
        SRC_ROW, DST_ROW: bytes from one row to the next of a paged side.
        SRC_PAGED, DST_PAGED: which sides are paged.
        ALIGN: bytes that every unit's address on both sides is a multiple of, at most 16.
        WORD: what is loaded and stored, an integer type of WORD_BYTES; two of 8 bytes become one access of 16.
        TILE_UNITS: of a tile, a power of two.
    """
    words = tl.arange(0, UNIT // WORD_BYTES)[None, :]
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        block = blocks_at.to(tl.pointer_type(tl.int64)) + item // tiles * 5
        pages = tl.load(block + 4).to(tl.int32)
        units = pages * (ROWS * SPLIT)
        first = item % tiles * TILE_UNITS
        if first < units:  # Blocks of a launch differ in pages.
            unit = first + tl.arange(0, TILE_UNITS)
            live = unit < units
            row = unit // SPLIT
            inside = unit % SPLIT * UNIT
            listed = pages_at.to(tl.pointer_type(tl.int32)) + row // ROWS
            if SRC_PAGED:
                page = tl.load(listed + tl.load(block + 2), mask=live, other=0).to(tl.int64)
                source = tl.load(block) + (page * ROWS + row % ROWS) * SRC_ROW + inside
            else:
                source = tl.load(block) + unit.to(tl.int64) * UNIT
            if DST_PAGED:
                page = tl.load(listed + tl.load(block + 3), mask=live, other=0).to(tl.int64)
                target = tl.load(block + 1) + (page * ROWS + row % ROWS) * DST_ROW + inside
            else:
                target = tl.load(block + 1) + unit.to(tl.int64) * UNIT
            # What the compiler cannot know: without it, every word would be an access of its own.
            sources = tl.multiple_of(source.to(tl.pointer_type(WORD)), ALIGN)[:, None] + words
            targets = tl.multiple_of(target.to(tl.pointer_type(WORD)), ALIGN)[:, None] + words
            tl.store(targets, tl.load(sources, mask=live[:, None]), mask=live[:, None])
