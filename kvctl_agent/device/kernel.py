"""The Triton kernel that copies rows between pages and packed memory, or from pages to pages, or sums them up.

Only Triton's compiler and interpreter load this module. The kernel must not refer to module variables: the compiler
does not allow them, and its cache key is the source of the function.
"""

# mypy: disable-error-code="no-untyped-def"
# No `from __future__ import annotations`: Triton reads the annotations themselves.

import triton.language as tl


def copy_rows(
    blocks_at,
    ranges_at,
    pages_at,
    items,
    tiles,
    most,
    sum_at,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT: tl.constexpr,
    SRC_PAGED: tl.constexpr,
    SRC_PAGE: tl.constexpr,
    SRC_ROW: tl.constexpr,
    SRC_HEAD: tl.constexpr,
    SRC_SPLIT: tl.constexpr,
    SRC_SUB: tl.constexpr,
    DST_PAGED: tl.constexpr,
    DST_PAGE: tl.constexpr,
    DST_ROW: tl.constexpr,
    DST_HEAD: tl.constexpr,
    DST_SPLIT: tl.constexpr,
    DST_SUB: tl.constexpr,
    ALIGN: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    TILE_UNITS: tl.constexpr,
    RANGES: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Copies all units of all blocks, or computes their checksum.

    Programs take tiles in turn, so any number of programs covers all of them.

    Args:
        blocks_at: Address of `Batch.blocks`; for a table, of pairs of `paged` and `before`, int64.
        ranges_at: Address of the block ranges, int64; unused for a batch.
        pages_at: Address of the page list, int32.
        items: blocks * tiles; for a table, ranges * most * tiles.
        tiles: Largest number of tiles in a block.
        most: Largest number of blocks in a block range; unused for a batch.
        sum_at: Address of the checksum, uint32, to which that of the units is added; unused for a copy.
        ROWS: Rows of a page.
        HEADS: Heads of a row.
        UNITS: Units of a head.
        UNIT: Bytes that are contiguous on both sides, a power of two.
        SRC_PAGED, DST_PAGED: Whether each side is paged.
        SRC_PAGE to SRC_SUB, DST_PAGE to DST_SUB: `PageStrides` of a paged side.
        ALIGN: Alignment in bytes of every unit's address on both sides, at most 16.
        WORD: Integer type of WORD_BYTES that is loaded and stored; two words of 8 bytes become one access of 16.
        TILE_UNITS: Units of a tile, a power of two.
        RANGES: Whether to copy block ranges of a table; otherwise a batch.
        CHECK: 0 for a copy. For a checksum the bytes of its words, which are at least WORD_BYTES; nothing is stored,
            and the addresses on the destination side are positions in the part. See `memory.checksum`.
    """
    if CHECK:
        words = tl.arange(0, UNIT // CHECK)[None, :]
        total = tl.full((TILE_UNITS, UNIT // CHECK), 0, tl.uint32)
    else:
        words = tl.arange(0, UNIT // WORD_BYTES)[None, :]
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        # No branch, so that independent loads are issued together: each wait is a large part of a tile's time.
        if RANGES:
            entry = ranges_at.to(tl.pointer_type(tl.int64)) + item // tiles // most * 6
            number = tl.load(entry) + item // tiles % most
            mine = number < tl.load(entry + 1)  # The ranges of a launch differ in their number of blocks.
            block = blocks_at.to(tl.pointer_type(tl.int64)) + number * 2
            pages = tl.load(entry + 4).to(tl.int32)
            paged = tl.load(entry + 2) + tl.load(block, mask=mine, other=0)
            packed = tl.load(entry + 3) + tl.load(block + 1, mask=mine, other=0) * pages
            source_block = paged if SRC_PAGED else packed
            target_block = paged if DST_PAGED else packed
            source_pages = tl.load(entry + 5)
            target_pages = source_pages
            units = tl.where(mine, pages * (ROWS * HEADS * UNITS), 0)
        else:
            block = blocks_at.to(tl.pointer_type(tl.int64)) + item // tiles * 5
            source_block = tl.load(block)
            target_block = tl.load(block + 1)
            source_pages = tl.load(block + 2)
            target_pages = tl.load(block + 3)
            units = tl.load(block + 4).to(tl.int32) * (ROWS * HEADS * UNITS)
        unit = item % tiles * TILE_UNITS + tl.arange(0, TILE_UNITS)
        live = unit < units  # Blocks differ in their number of pages.
        row = unit // (HEADS * UNITS)
        head = unit // UNITS % HEADS
        inside = unit % UNITS * UNIT
        listed = pages_at.to(tl.pointer_type(tl.int32)) + row // ROWS
        if SRC_PAGED:
            page = tl.load(listed + source_pages, mask=live, other=0).to(tl.int64)
            if SRC_SPLIT > 1:
                source = source_block + page // SRC_SPLIT * SRC_PAGE + page % SRC_SPLIT * SRC_SUB
                source += row % ROWS * SRC_ROW + head * SRC_HEAD + inside
            elif SRC_PAGE == ROWS * SRC_ROW:  # Fewer registers than the general form.
                source = source_block + (page * ROWS + row % ROWS) * SRC_ROW + head * SRC_HEAD + inside
            else:
                source = source_block + page * SRC_PAGE + row % ROWS * SRC_ROW + head * SRC_HEAD + inside
        else:
            source = source_block + unit.to(tl.int64) * UNIT
        if DST_PAGED:
            page = tl.load(listed + target_pages, mask=live, other=0).to(tl.int64)
            if DST_SPLIT > 1:
                target = target_block + page // DST_SPLIT * DST_PAGE + page % DST_SPLIT * DST_SUB
                target += row % ROWS * DST_ROW + head * DST_HEAD + inside
            elif DST_PAGE == ROWS * DST_ROW:  # Fewer registers than the general form.
                target = target_block + (page * ROWS + row % ROWS) * DST_ROW + head * DST_HEAD + inside
            else:
                target = target_block + page * DST_PAGE + row % ROWS * DST_ROW + head * DST_HEAD + inside
        else:
            target = target_block + unit.to(tl.int64) * UNIT
        # The compiler cannot derive the alignment; without it, every word would be a separate access.
        sources = tl.multiple_of(source.to(tl.pointer_type(WORD)), ALIGN)[:, None]
        if CHECK:
            mixed = target.to(tl.uint32)[:, None] + (words * CHECK).to(tl.uint32)
            mixed *= 0x9E3779B1
            for part in tl.static_range(CHECK // WORD_BYTES):
                word = tl.load(sources + (words * (CHECK // WORD_BYTES) + part), mask=live[:, None], other=0)
                mixed ^= word.to(tl.uint32) << (8 * WORD_BYTES * part)
            mixed ^= mixed >> 16
            mixed *= 0x21F0AAAD
            mixed ^= mixed >> 15
            mixed *= 0x735A2D97
            mixed ^= mixed >> 15
            total += tl.where(live[:, None], mixed, 0)
        else:
            targets = tl.multiple_of(target.to(tl.pointer_type(WORD)), ALIGN)[:, None] + words
            tl.store(targets, tl.load(sources + words, mask=live[:, None]), mask=live[:, None])
    if CHECK:
        checksum = tl.sum(tl.sum(total, axis=1), axis=0)
        # An empty launch has no address.
        tl.atomic_add(sum_at.to(tl.pointer_type(tl.uint32)), checksum, mask=items > 0, sem="relaxed")
