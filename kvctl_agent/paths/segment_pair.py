"""Page addresses of one segment in the local pool, in a peer's pool, and in a mapping of the peer's memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.values import layer_range
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.addresses import SegmentAddresses
from kvctl_agent.paths.mapped_memory import MappedMemory

Numbers = npt.NDArray[np.int64]


class SegmentPair:
    """One segment in the local pool and in a peer's pool, which may hold different layers and heads of it.

    Attributes:
        ours, theirs: Addresses in the local pool and in the peer's pool.
        page_bytes: Bytes of a page of each plane in the peer's pool, int64 `[planes]`.
    """

    def __init__(self, ours: SegmentAddresses, theirs: SegmentAddresses, mapping: MappedMemory | None = None) -> None:
        """Collect the addresses of both sides.

        Args:
            ours, theirs: Addresses in the local pool and in the peer's pool.
            mapping: Mapping of the peer's memory, if there is one.

        Raises:
            DeviceError: a page of the peer lies outside the mapped memory.
        """
        self.ours = ours
        self.theirs = theirs
        planes = len(theirs.shard.segment.planes)
        self.page_bytes = np.array([theirs.page_bytes(plane) for plane in range(planes)], np.int64)
        self._ours = np.array(ours.bases, np.int64).reshape(-1, planes)
        self._theirs = np.array(theirs.bases, np.int64).reshape(-1, planes)
        self._mapped = None if mapping is None else self._translated(mapping)

    @property
    def common_layers(self) -> tuple[int, int]:
        """The layers [lo, hi) that both sides hold; empty if lo >= hi."""
        ours, theirs = self.ours.shard, self.theirs.shard
        return max(ours.layer_lo, theirs.layer_lo), min(ours.layer_hi, theirs.layer_hi)

    def bases(self, lo: int, hi: int) -> tuple[Numbers, Numbers]:
        """Return the local and the peer's addresses of page 0 in layers [lo, hi), each int64 `[hi - lo, planes]`.

        Raises:
            MemoryLayoutError: as for `check_layers`.
        """
        self.check_layers(lo, hi)
        ours, theirs = self.ours.shard.layer_lo, self.theirs.shard.layer_lo
        return self._ours[lo - ours : hi - ours], self._theirs[lo - theirs : hi - theirs]

    def mapped_bases(self, lo: int, hi: int) -> Numbers:
        """Return the peer's addresses of `bases` in the mapping; the peer's memory must be mapped."""
        assert self._mapped is not None
        first = self.theirs.shard.layer_lo
        return self._mapped[lo - first : hi - first]

    def check_layers(self, lo: int, hi: int) -> None:
        """Raise MemoryLayoutError unless both sides hold layers [lo, hi)."""
        for shard in (self.ours.shard, self.theirs.shard):
            if not shard.layer_lo <= lo < hi <= shard.layer_hi:
                raise MemoryLayoutError(
                    f"{shard.segment.name}: layers {layer_range(lo, hi)} are not all on a rank that has "
                    f"{layer_range(shard.layer_lo, shard.layer_hi)}"
                )

    def _translated(self, mapping: MappedMemory) -> Numbers:
        if not self._theirs.size:
            return self._theirs
        return mapping.translate_all(self._theirs, self.theirs.num_slots * self.page_bytes)
