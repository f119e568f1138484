"""Splits requests whose tables are too large for one upload, for example thousands of pages of one token each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvctl_agent.device.base import Batch, BlockRanges, PageIds

RANGE_BYTES = 6 * 8
_BLOCK_BYTES = 5 * 8
_PAGE_ID_BYTES = 4


def table_bytes(batches: Sequence[Batch | BlockRanges], pages: PageIds) -> int:
    """Return the bytes to upload for these launches."""
    nbytes = len(pages) * _PAGE_ID_BYTES
    for each in batches:
        nbytes += len(each[1]) * (RANGE_BYTES if isinstance(each, BlockRanges) else _BLOCK_BYTES)
    return nbytes


def split(batches: Sequence[Batch | BlockRanges], pages: PageIds, nbytes: int) -> Iterator[tuple[Batch, PageIds]]:
    """Yield batches with page lists of their own that together make the same copies.

    Args:
        batches: The batches and block ranges of the request.
        pages: Page list of the request.
        nbytes: Maximum bytes of the tables of one batch.
    """
    rows = max(1, nbytes // 2 // _BLOCK_BYTES)
    window = max(1, nbytes // 2 // _PAGE_ID_BYTES // 2)  # Each page may be listed for both sides.
    for each in batches:
        geometry, blocks = each.batch() if isinstance(each, BlockRanges) else each
        paged = geometry.src_paged, geometry.dst_paged
        for lo in range(0, int(blocks[:, 4].max()), window):
            rest = blocks[blocks[:, 4] > lo].copy()
            rest[:, 4] = np.minimum(rest[:, 4] - lo, window)
            for side in (0, 1):
                if paged[side]:
                    rest[:, 2 + side] += lo
                else:
                    rest[:, side] += lo * geometry.rows * geometry.width
                    rest[:, 2 + side] = 0
            for alike in np.unique(rest[:, 2:], axis=0):
                group = rest[(rest[:, 2:] == alike).all(axis=1)]
                begins, count = alike[:2].tolist(), int(alike[2])
                listed = [pages[at : at + count] for at, is_paged in zip(begins, paged, strict=True) if is_paged]
                group[:, 2] = 0
                group[:, 3] = count if all(paged) else 0
                for at in range(0, len(group), rows):
                    yield Batch(geometry, group[at : at + rows]), np.concatenate(listed)
