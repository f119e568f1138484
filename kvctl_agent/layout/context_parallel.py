"""Which pages of a room each context-parallel rank of a prefill instance sends.

Every cp rank holds the whole prompt's KV, so any split is legal and moves the same bytes; the modes differ in who is
busy when. Both sides compute the split from the same inputs, so a rank that owes nothing is known to owe nothing.
"""

from __future__ import annotations

from kvctl_agent.layout.chunks import Chunk, grid
from kvctl_agent.layout.heads import mix64

CP_MODES = ("rank0", "all", "all-chunk", "room-hash")


def chosen_cp(mode: str, cp: int, room: int) -> int | None:
    """The one cp rank that sends a room, or None where all share it."""
    if mode == "rank0":
        return 0
    if mode == "room-hash":
        # Hashed twice: the first hash elects among replicas, and the two choices must not move together.
        return mix64(mix64(room)) % cp
    return None


def owned_cells(
    mode: str, cp: int, rank: int, room: int, total_pages: int, prefix_pages: int, chunk_pages: int
) -> tuple[Chunk, ...]:
    """The grid's cells, each narrowed to the pages that cp rank `rank` sends; cells of which it sends none are absent.

    Raises:
        LayoutError: as `grid`.
    """
    cells = grid(total_pages, prefix_pages, chunk_pages)
    chosen = chosen_cp(mode, cp, room)
    if chosen is not None:
        return cells if rank == chosen else ()
    if cp == 1:
        return cells
    if mode == "all-chunk":
        mine = [_narrowed(cell, *_split(cell.first, cell.count, cp, rank)) for cell in cells]
    else:
        lo, hi = _split(prefix_pages, total_pages - prefix_pages, cp, rank)
        mine = [_narrowed(cell, lo, hi) for cell in cells]
    return tuple(cell for cell in mine if cell.count > 0)


def _split(first: int, count: int, cp: int, rank: int) -> tuple[int, int]:
    """Rank `rank`'s contiguous part of `count` positions from `first`; the first ones take one more."""
    each, more = divmod(count, cp)
    lo = first + rank * each + min(rank, more)
    return lo, lo + each + (rank < more)


def _narrowed(cell: Chunk, lo: int, hi: int) -> Chunk:
    first = max(cell.first, lo)
    return Chunk(cell.index, first, max(0, min(cell.first + cell.count, hi) - first))
