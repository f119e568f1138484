"""One block of memory for all ranks of a process, registered once, so that combinations need no registration.

Every allocation of agents and pools is a `HugePageMemory`. Here it is taken from the arena instead of being mapped: all
bytes are in the same registered memory, and data of an earlier combination is overwritten before the next one
uses the memory.
"""

from __future__ import annotations

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.allocations import HugePageMemory
from kvctl_agent.memory.region import Region

ALIGN_BYTES = 4096
UNUSED = 0xA5


class Arena:
    """Memory that is allocated from its start and released all at once."""

    def __init__(self, nbytes: int) -> None:
        self._slab = HugePageMemory(nbytes)
        self._used = 0
        self._most = 0

    @property
    def region(self) -> Region:
        """The region that the engine registers."""
        return self._slab.region

    def install(self) -> None:
        """Takes every slab of this process from this arena from now on."""
        arena = self

        def take(slab: HugePageMemory, nbytes: int) -> None:
            slab.nbytes = nbytes
            first = arena._take(nbytes)
            slab.array = arena._slab.array[first : first + nbytes]
            slab.array[:] = 0
            slab.addr = arena._slab.addr + first
            slab.region = Region(slab.addr, nbytes)
            slab._closed = False

        def leave(slab: HugePageMemory) -> None:
            slab._closed = True

        HugePageMemory.__init__ = take  # type: ignore[method-assign, assignment]
        HugePageMemory.close = leave  # type: ignore[method-assign, assignment]

    def reset(self) -> None:
        """Releases everything; no write to it may be in flight."""
        self._most = max(self._most, self._used)
        self._slab.array[: self._used] = UNUSED
        self._used = 0

    def strays(self) -> int:
        """Bytes written outside the memory allocated since the last reset, where earlier combinations were."""
        return int((self._slab.array[self._used : self._most] != UNUSED).sum())

    def _take(self, nbytes: int) -> int:
        first = self._used
        self._used += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        if self._used > self._slab.nbytes:
            raise MemoryLayoutError(f"{self._used} bytes of slabs do not fit an arena of {self._slab.nbytes}")
        return first
