"""Splits a room's pages over the context-parallel (cp) ranks of a prefill instance.

Every cp rank holds the KV of the whole prompt, so any split is valid and moves the same bytes; the modes differ in
which ranks are busy at what time. Both sides compute the split from the same inputs, so the decode side knows which
ranks send nothing.
"""

from __future__ import annotations

from kvctl_agent.contract.choices import ALL, ALL_CHUNK, CP_MODES, RANK0, ROOM_HASH
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.chunks import Chunk, grid
from kvctl_agent.layout.parallel import mix64


def sole_cp_sender(mode: str, cp: int, room: int) -> int | None:
    """Returns the cp rank that sends all pages of a room, or None if the cp ranks share the pages.

    Args:
        mode: One of `CP_MODES`.
        cp: Number of cp ranks.
        room: The room's number.
    """
    if mode == RANK0:
        return 0
    if mode == ROOM_HASH:
        # Hashed twice: the plan uses the first hash to choose a head replica, and the two choices must be independent.
        return mix64(mix64(room)) % cp
    return None


def owned_cells(
    mode: str, cp: int, rank: int, room: int, total_pages: int, prefix_pages: int, chunk_pages: int
) -> tuple[Chunk, ...]:
    """Returns the chunks of a room that one cp rank sends, clipped to its own pages; empty if it sends nothing.

    Args:
        mode: One of `CP_MODES`.
        cp: Number of cp ranks of the prefill instance.
        rank: The cp rank.
        room: The room's number, which selects the sender in mode room-hash.
        total_pages: Pages of the prompt.
        prefix_pages: Leading pages that the decode side already has.
        chunk_pages: Pages per chunk.

    Raises:
        LayoutError: an unknown mode, or as for `grid`.
    """
    cells = grid(total_pages, prefix_pages, chunk_pages)
    sender = sole_cp_sender(mode, cp, room)
    if sender is not None:
        return cells if rank == sender else ()
    if cp == 1:
        return cells
    if mode == ALL_CHUNK:
        narrowed = [_narrowed(cell, *_split(cell.first, cell.count, cp, rank)) for cell in cells]
    elif mode == ALL:
        lo, hi = _split(prefix_pages, total_pages - prefix_pages, cp, rank)
        narrowed = [_narrowed(cell, lo, hi) for cell in cells]
    else:
        raise LayoutError(f"cp_mode {mode!r} is not one of {', '.join(CP_MODES)}")
    return tuple(cell for cell in narrowed if cell.count > 0)


def _split(first: int, count: int, cp: int, rank: int) -> tuple[int, int]:
    """Returns positions [lo, hi) of `rank` when `count` positions from `first` are split over `cp` ranks.

    The first `count % cp` ranks get one position more.
    """
    quotient, remainder = divmod(count, cp)
    lo = first + rank * quotient + min(rank, remainder)
    return lo, lo + quotient + (rank < remainder)


def _narrowed(cell: Chunk, lo: int, hi: int) -> Chunk:
    """Returns the part of a chunk that lies in pages [lo, hi); its count is 0 if they do not overlap."""
    first = max(cell.first, lo)
    return Chunk(cell.index, first, max(0, min(cell.first + cell.count, hi) - first))
