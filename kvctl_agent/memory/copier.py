"""Interface of the copiers, which gather parts into staging buffers and scatter them from the staging ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvctl_agent.memory.part_layout import PartLayout, Piece
from kvctl_agent.memory.region import MemorySpan
from kvctl_agent.memory.segment import RowIndex


class PendingCopy(Protocol):
    """Handle of a copy that has been started."""

    def done(self) -> bool:
        """Returns whether the copy has ended; once True, the result stays True. The call may copy a piece itself.

        Raises:
            KvctlError: the copy failed; it no longer reads or writes any memory.
        """
        ...


class LandedPart(NamedTuple):
    """A part that has been written to the ring, to be scattered.

    Attributes:
        rows: The pages and heads to scatter to.
    """

    rows: RowIndex
    layout: PartLayout
    region: MemorySpan


class Copier(Protocol):
    """Interface of a copier between a pool's pages and staging. A copier is used by one thread only.

    Attributes:
        piece_bytes: Size of the largest piece into which a part should be divided.
        parts_at_once: Number of parts to pass to one `scatter` for the best rate.
    """

    piece_bytes: int
    parts_at_once: int

    @property
    def pieces_at_once(self) -> int:
        """Number of pieces to pass to one `gather` for the best rate at present."""
        ...

    def gather(self, rows: RowIndex, pieces: Sequence[Piece], into: Sequence[MemorySpan]) -> PendingCopy:
        """Starts to copy pieces of one part from the pool, `pieces[i]` to the start of `into[i]`.

        Raises:
            MemoryLayoutError: a piece lies outside the rank's layers or is larger than its span.
            DeviceError: the copy could not be started.
        """
        ...

    def scatter(self, landed: Sequence[LandedPart]) -> PendingCopy:
        """Starts to copy landed parts to their pages in the pool.

        Raises:
            MemoryLayoutError: a part lies outside the rank's layers or is larger than its region.
            DeviceError: the copy could not be started.
        """
        ...

    def close(self) -> None:
        """Waits for all started copies and frees the copier's resources; idempotent."""
        ...
