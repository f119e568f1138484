"""The one kernel: copies rows between pages and packed memory, or from pages to pages.

Only Triton's compiler and its interpreter read this file. Nothing here may refer to a module's variable: the compiler
allows none, and the source is what its cache goes by.
"""

# mypy: disable-error-code="no-untyped-def"
# No `from __future__ import annotations`: Triton reads the annotations themselves.

import triton.language as tl


def copy_rows(
    blocks_at,
    strips_at,
    pages_at,
    items,
    tiles,
    most,
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
    STRIPS: tl.constexpr,
):
    """Copies all units of all blocks; a program does every so many-th tile, so any number of them does it all.

    Args:
        blocks_at: address of `Batch.blocks`; of a table, pairs of `paged` and `before`, int64.
        strips_at: address of the strips, int64; unused for a batch.
        pages_at: address of the list of pages, int32.
        items: blocks x tiles; of a table, strips x most x tiles.
        tiles: of the block that has most.
        most: blocks of the strip that has most; unused for a batch.
        ROWS: of a page.
        SPLIT: units of a row.
        UNIT: bytes that are contiguous on both sides, a power of two.
        SRC_ROW, DST_ROW: bytes from one row to the next of a paged side.
        SRC_PAGED, DST_PAGED: which sides are paged.
        ALIGN: bytes that every unit's address on both sides is a multiple of, at most 16.
        WORD: what is loaded and stored, an integer type of WORD_BYTES; two of 8 bytes become one access of 16.
        TILE_UNITS: of a tile, a power of two.
        STRIPS: whether it copies strips of a table; else a batch.
    """
    words = tl.arange(0, UNIT // WORD_BYTES)[None, :]
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        # No branch: what needs no other's result is loaded together, for each wait is a good part of a tile's time.
        if STRIPS:
            strip = strips_at.to(tl.pointer_type(tl.int64)) + item // tiles // most * 6
            number = tl.load(strip) + item // tiles % most
            mine = number < tl.load(strip + 1)  # Strips of a launch differ in blocks,
            block = blocks_at.to(tl.pointer_type(tl.int64)) + number * 2
            pages = tl.load(strip + 4).to(tl.int32)
            paged = tl.load(strip + 2) + tl.load(block, mask=mine, other=0)
            packed = tl.load(strip + 3) + tl.load(block + 1, mask=mine, other=0) * pages
            source_block = paged if SRC_PAGED else packed
            target_block = paged if DST_PAGED else packed
            source_pages = tl.load(strip + 5)
            target_pages = source_pages
            units = tl.where(mine, pages * (ROWS * SPLIT), 0)
        else:
            block = blocks_at.to(tl.pointer_type(tl.int64)) + item // tiles * 5
            source_block = tl.load(block)
            target_block = tl.load(block + 1)
            source_pages = tl.load(block + 2)
            target_pages = tl.load(block + 3)
            units = tl.load(block + 4).to(tl.int32) * (ROWS * SPLIT)
        unit = item % tiles * TILE_UNITS + tl.arange(0, TILE_UNITS)
        live = unit < units  # and blocks in pages.
        row = unit // SPLIT
        inside = unit % SPLIT * UNIT
        listed = pages_at.to(tl.pointer_type(tl.int32)) + row // ROWS
        if SRC_PAGED:
            page = tl.load(listed + source_pages, mask=live, other=0).to(tl.int64)
            source = source_block + (page * ROWS + row % ROWS) * SRC_ROW + inside
        else:
            source = source_block + unit.to(tl.int64) * UNIT
        if DST_PAGED:
            page = tl.load(listed + target_pages, mask=live, other=0).to(tl.int64)
            target = target_block + (page * ROWS + row % ROWS) * DST_ROW + inside
        else:
            target = target_block + unit.to(tl.int64) * UNIT
        # What the compiler cannot know: without it, every word would be an access of its own.
        sources = tl.multiple_of(source.to(tl.pointer_type(WORD)), ALIGN)[:, None] + words
        targets = tl.multiple_of(target.to(tl.pointer_type(WORD)), ALIGN)[:, None] + words
        tl.store(targets, tl.load(sources, mask=live[:, None]), mask=live[:, None])
