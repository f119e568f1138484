"""The one seam between what moves parts and where memory is: gathers and scatters that are begun and then done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvctl_agent.memory.part_layout import PartLayout, Piece
from kvctl_agent.memory.region import MemorySpan
from kvctl_agent.memory.row_index import RowIndex
from kvctl_agent.memory.segment import SegmentMemory

__all__ = ["Copier", "LandedPart", "MemorySpan", "PendingCopy"]


class PendingCopy(Protocol):
    """A copy that was begun."""

    def done(self) -> bool:
        """Whether it is through; never waits. True for ever after.

        Raises:
            KvctlError: it failed, and touches nothing any more.
        """
        ...


class LandedPart(NamedTuple):
    """A part in the ring, and the pages it belongs in."""

    rows: RowIndex
    layout: PartLayout
    region: MemorySpan


class Copier(Protocol):
    """Copies between a pool's pages and staging; belongs to one thread.

    Attributes:
        piece_bytes: largest piece that a part should be cut into.
        pieces_at_once: pieces that are worth gathering together.
        parts_at_once: parts that are worth scattering together.
    """

    @property
    def piece_bytes(self) -> int: ...

    @property
    def pieces_at_once(self) -> int: ...

    @property
    def parts_at_once(self) -> int: ...

    def gather(self, rows: RowIndex, pieces: Sequence[Piece], into: Sequence[MemorySpan]) -> PendingCopy:
        """Begin to copy pieces of one part, each to the start of its stretch.

        Raises:
            MemoryLayoutError: a piece lies outside the rank's layers or its stretch.
            DeviceError: it could not be begun.
        """
        ...

    def scatter(self, landed: Sequence[LandedPart]) -> PendingCopy:
        """Begin to copy parts to their pages; raises as `gather` does."""
        ...

    def prepare(self, memory: SegmentMemory, head: int, heads: int) -> None:
        """Compile ahead what scatters to these local heads need, and wait for it; nothing on the host.

        Raises:
            DeviceError: it does not compile.
        """
        ...

    def close(self) -> None:
        """Wait for what was begun, and let go of what was held for it; idempotent."""
        ...
