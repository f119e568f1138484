"""Which path a part takes: a fixed one, or the cheapest by a cost model that was calibrated on this machine.

The model adds up what a part costs both ends, in µs:

- bulk, slice: one write of n descriptors (`ConnectionCost.write_us`).
- staged: gather + one contiguous write + scatter, plus the round trip for the grant and the hand-over to the scatter.
- direct, to a peer whose memory is mapped here: one kernel, so much for itself and so much per MiB (`DirectCost`).

On one host all of this competes for the same cores, so the sum and not the longest stage is what counts.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.connection_cost import ConnectionCost
from kvctl_agent.layout.shape import ModelShape, segments
from kvctl_agent.layout.transfer_slice import TransferSlice
from kvctl_agent.paths.base import BULK, DIRECT, SLICE, STAGED

AUTO = "auto"
# Request and grant over the control channel, and waking the scatter: measured between idle processes on one host.
_STAGED_FIXED_US = 250.0


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Row copies on this machine: µs per MiB by row size, ascending; the rate of the nearest smaller row applies."""

    row_bytes: tuple[int, ...]
    gather_us_per_mib: tuple[float, ...]
    scatter_us_per_mib: tuple[float, ...]

    def gather_us(self, nbytes: int, row_bytes: int) -> float:
        return nbytes / (1 << 20) * self.gather_us_per_mib[self._place(row_bytes)]

    def scatter_us(self, nbytes: int, row_bytes: int) -> float:
        return nbytes / (1 << 20) * self.scatter_us_per_mib[self._place(row_bytes)]

    def _place(self, row_bytes: int) -> int:
        return max(0, bisect_right(self.row_bytes, row_bytes) - 1)


@dataclass(frozen=True, slots=True)
class DirectCost:
    """A part by kernels that write into the peer's pages.

    Attributes:
        us_per_part: to begin them, and to learn that they have ended.
        us_per_mib: for the bytes, with as many multiprocessors as such kernels may take.
    """

    us_per_part: float
    us_per_mib: float

    def us(self, nbytes: int) -> float:
        return self.us_per_part + nbytes / (1 << 20) * self.us_per_mib


class PathChooser:
    """The answer for one agent; `path` may be changed while running.

    Args:
        path: bulk, slice, staged, direct or auto.
        staging: off, on or auto; off removes staged from the choices, on prefers it.

    Attributes:
        connection: what writes cost; None until it is measured: until then parts go direct to peers whose memory is
            mapped, and staged to the others where that is allowed.
        copy: what gather and scatter cost.
        direct: what the direct path costs; None until it was measured.
    """

    def __init__(self, shape: ModelShape, page_size: int, path: str, staging: str) -> None:
        self._segments = segments(shape, page_size)
        self.path = path
        self.staging = staging
        self.connection: ConnectionCost | None = None
        self.copy: CopyCost | None = None
        self.direct: DirectCost | None = None

    def choose(
        self, ring_bytes: int, share: TransferSlice, layers: int, dst_pages: npt.NDArray[np.int32], direct: bool = False
    ) -> str:
        """The path of one part of KV; the reader's page runs stand for both sides, since ours are not known yet.

        Args:
            ring_bytes: of the peer's ring; 0: it has none.
            direct: the peer's memory is mapped here.
        """
        if self.path == BULK and not share.whole_rows:
            return SLICE  # bulk cannot serve these heads at all
        if self.path != AUTO:
            return self.path
        staged = ring_bytes > 0 and self.staging != "off"
        if staged and self.staging == "on":
            return STAGED
        if not staged and not direct:
            return self.without_ring(share)
        if self.connection is None or self.copy is None or (direct and self.direct is None):
            return DIRECT if direct else STAGED
        costs = self.costs(share, layers, dst_pages, direct)
        if not staged:
            del costs[STAGED]
        return min(costs, key=lambda path: costs[path])

    def without_ring(self, share: TransferSlice, direct: bool = False) -> str:
        """The path of a part that can have no ring region: state has none, since it is small and lies anywhere."""
        if self.path == DIRECT or (self.path == AUTO and direct):
            return DIRECT
        return BULK if share.whole_rows and self.path != SLICE else SLICE

    def costs(
        self, share: TransferSlice, layers: int, dst_pages: npt.NDArray[np.int32], direct: bool = False
    ) -> dict[str, float]:
        """Predicted µs of one part by path."""
        assert self.connection is not None
        assert self.copy is not None
        pages, cells = len(dst_pages), layers * len(dst_pages)
        planes = self._segments[share.segment].planes
        nbytes = share.payload_bytes(pages, layers)
        staged = self.connection.write_us(1, nbytes) + _STAGED_FIXED_US
        for plane in planes:
            row = share.heads * plane.head_bytes
            page = row * plane.rows
            staged += self.copy.gather_us(cells * page, page if share.heads == share.src_pool_heads else row)
            staged += self.copy.scatter_us(cells * page, page if share.heads == share.dst_pool_heads else row)
        costs = {STAGED: staged}
        if share.whole_rows:
            runs = 1 + int(np.count_nonzero(np.diff(np.sort(dst_pages)) != 1)) if pages else 1
            costs[BULK] = self.connection.write_us(len(planes) * layers * runs, nbytes)
        else:
            costs[SLICE] = self.connection.write_us(sum(plane.rows for plane in planes) * cells, nbytes)
        if direct and self.direct is not None:
            costs[DIRECT] = self.direct.us(nbytes)
        return costs
