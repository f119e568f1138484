"""One segment at both ends of a connection: page addresses here, at the peer, and in a mapping of its memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.layer_range import layer_range
from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.memory.addresses import SegmentAddresses
from kvctl_agent.paths.mapped_memory import MappedMemory

Numbers = npt.NDArray[np.int64]


class SegmentPair:
    """One segment of our pool and of a peer's, which hold different layers and heads of it, maybe.

    Attributes:
        ours, theirs: where each side's bytes are.
        page_bytes: of each plane, where both hold the same heads; int64 `[planes]`.
    """

    def __init__(self, ours: SegmentAddresses, theirs: SegmentAddresses, mapping: MappedMemory | None = None) -> None:
        """`mapping`: of the peer's memory, where there is one.

        Raises:
            DeviceError: some page of the peer's lies outside of what is mapped.
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
        """The layers [lo, hi) that both sides hold; none where lo >= hi."""
        ours, theirs = self.ours.shard, self.theirs.shard
        return max(ours.layer_lo, theirs.layer_lo), min(ours.layer_hi, theirs.layer_hi)

    def bases(self, lo: int, hi: int) -> tuple[Numbers, Numbers]:
        """Addresses of page 0 of every plane of layers [lo, hi), here and there, int64 `[hi - lo, planes]`.

        Raises:
            MemoryLayoutError: as `check_layers`.
        """
        self.check_layers(lo, hi)
        ours, theirs = self.ours.shard.layer_lo, self.theirs.shard.layer_lo
        return self._ours[lo - ours : hi - ours], self._theirs[lo - theirs : hi - theirs]

    def mapped_bases(self, lo: int, hi: int) -> Numbers:
        """The peer's addresses of `bases`, in our address space; only where its memory is mapped."""
        assert self._mapped is not None
        first = self.theirs.shard.layer_lo
        return self._mapped[lo - first : hi - first]

    def check_layers(self, lo: int, hi: int) -> None:
        """Raises MemoryLayoutError unless both sides hold layers [lo, hi)."""
        for held in (self.ours.shard, self.theirs.shard):
            if not held.layer_lo <= lo < hi <= held.layer_hi:
                raise MemoryLayoutError(
                    f"{held.segment.name}: layers {layer_range(lo, hi)} are not those of a rank that has "
                    f"{layer_range(held.layer_lo, held.layer_hi)}"
                )

    def _translated(self, mapping: MappedMemory) -> Numbers:
        if not self._theirs.size:
            return self._theirs
        return mapping.translate_all(self._theirs, self.theirs.num_slots * self.page_bytes)
