"""Chooses the path of a part: the configured path, or the cheapest by a cost model calibrated on this machine.

The model adds up the costs of a part at both ends, in µs:

- bulk, slice: one write of n descriptors (`ConnectionCost.write_us`).
- staged: gather, one contiguous write and scatter, plus the round trip for the grant and the start of the scatter.
- direct, to a peer whose memory is mapped: one kernel, with a fixed cost and a cost per MiB (`DirectCost`).

The stages are added because on one host they compete for the same cores, and path staged is chosen only if it is
predicted to be clearly cheaper: see `_STAGED_FACTOR`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.choices import BULK, DIRECT, SLICE, STAGED
from kvctl_agent.contract.connection_cost import ConnectionCost
from kvctl_agent.layout.page_indices import count_runs
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import ModelShape, segments
from kvctl_agent.paths.contiguous_runs import PlaneRuns, contiguous_runs, whole_pages

AUTO = "auto"
# Request and grant over the control channel, and waking the scatter, measured between idle processes on one host.
_STAGED_FIXED_US = 250.0


# Beside other parts the copies miss caches that they hit while they are measured, and the scatter takes the reader's
# core. On two cores, where path bulk was predicted to cost 1.4 times as much, it was 5 to 10 % faster (TP1 to TP1).
_STAGED_FACTOR = 1.5


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Cost of row copies on this machine, in µs per MiB for ascending row sizes.

    A row size that was not measured has the cost of the next smaller measured one.
    """

    row_bytes: tuple[int, ...]
    gather_us_per_mib: tuple[float, ...]
    scatter_us_per_mib: tuple[float, ...]

    def gather_us(self, nbytes: int, row_bytes: int) -> float:
        """Returns the predicted time of a gather of `nbytes` bytes in rows of `row_bytes` bytes, in µs."""
        return nbytes / (1 << 20) * self.gather_us_per_mib[self._place(row_bytes)]

    def scatter_us(self, nbytes: int, row_bytes: int) -> float:
        """Returns the predicted time of a scatter of `nbytes` bytes in rows of `row_bytes` bytes, in µs."""
        return nbytes / (1 << 20) * self.scatter_us_per_mib[self._place(row_bytes)]

    def _place(self, row_bytes: int) -> int:
        return max(0, bisect_right(self.row_bytes, row_bytes) - 1)


@dataclass(frozen=True, slots=True)
class DirectCost:
    """Cost of sending a part on path direct.

    Attributes:
        us_per_part: µs to launch the kernels and to detect that they have ended.
        us_per_mib: µs per MiB, when the kernels use as many multiprocessors as they may.
    """

    us_per_part: float
    us_per_mib: float

    def us(self, nbytes: int) -> float:
        """Returns the predicted time for a part of `nbytes` bytes, in µs."""
        return self.us_per_part + nbytes / (1 << 20) * self.us_per_mib


class PathChooser:
    """Chooses paths for one agent; `path` may be changed at run time.

    Args:
        shape: The model.
        page_size: Tokens per page.
        path: bulk, slice, staged, direct or auto.
        staging: off, on or auto. off excludes path staged, on prefers it.

    Attributes:
        connection: Cost of writes; None until measured. Until then the choice is direct for peers whose memory is
            mapped, and staged for others if it is allowed.
        copy: Cost of gathers and scatters; None until measured.
        direct: Cost of path direct; None until measured.
    """

    def __init__(self, shape: ModelShape, page_size: int, path: str, staging: str) -> None:
        self._segments = segments(shape, page_size)
        self.path = path
        self.staging = staging
        self.connection: ConnectionCost | None = None
        self.copy: CopyCost | None = None
        self.direct: DirectCost | None = None

    def choose(
        self,
        ring_bytes: int,
        share: TransferSlice,
        layers: int,
        dst_pages: npt.NDArray[np.int32],
        direct: bool = False,
        runs: tuple[PlaneRuns, ...] = (),
    ) -> str:
        """Returns the path of a part of KV.

        The cost model uses the reader's page runs for both sides, because the local pages are not known yet.

        Args:
            ring_bytes: Size of the peer's ring; 0 if it has none.
            share: The part's transfer slice.
            layers: Number of layers of the part.
            dst_pages: The reader's pages.
            direct: Whether the peer's memory is mapped.
            runs: Contiguous runs of each plane; if empty, both pools are assumed to be contiguous.
        """
        if self.path == BULK and not self._whole_pages(share, runs):
            return SLICE
        if self.path != AUTO:
            return self.path
        staged = ring_bytes > 0 and self.staging != "off"
        if staged and self.staging == "on":
            return STAGED
        if not staged and not direct:
            return self.without_ring(share, runs=runs)
        if self.connection is None or self.copy is None or (direct and self.direct is None):
            return DIRECT if direct else STAGED
        costs = self.costs(share, layers, dst_pages, direct, runs)
        if not staged:
            del costs[STAGED]
        return min(costs, key=lambda path: costs[path])

    def without_ring(self, share: TransferSlice, direct: bool = False, runs: tuple[PlaneRuns, ...] = ()) -> str:
        """Returns the path of a part that has no ring region, such as state, which is small and scattered.

        `direct` says whether the peer's memory is mapped; `runs` is as for `choose`.
        """
        if self.path == DIRECT or (self.path == AUTO and direct):
            return DIRECT
        return BULK if self.path != SLICE and self._whole_pages(share, runs) else SLICE

    def _whole_pages(self, share: TransferSlice, runs: tuple[PlaneRuns, ...]) -> bool:
        """Returns whether path bulk is possible: it sends the same heads of both sides, in whole pages."""
        return share.whole_rows and whole_pages(runs)

    def costs(
        self,
        share: TransferSlice,
        layers: int,
        dst_pages: npt.NDArray[np.int32],
        direct: bool = False,
        runs: tuple[PlaneRuns, ...] = (),
    ) -> dict[str, float]:
        """Returns the predicted cost of a part on each path, in µs; the arguments are those of `choose`."""
        assert self.connection is not None
        assert self.copy is not None
        pages, cells = len(dst_pages), layers * len(dst_pages)
        runs = runs or contiguous_runs(self._segments[share.segment].planes, share)
        nbytes = share.payload_bytes(pages, layers)
        staged = self.connection.write_us(1, nbytes)
        for plane in runs:
            staged += self.copy.gather_us(cells * plane.page_bytes, plane.gather_bytes)
            staged += self.copy.scatter_us(cells * plane.page_bytes, plane.scatter_bytes)
        costs = {STAGED: staged * _STAGED_FACTOR + _STAGED_FIXED_US}
        if self._whole_pages(share, runs):
            each = count_runs(dst_pages) if any(plane.adjacent for plane in runs) else pages
            descriptors = layers * sum(each if plane.adjacent else pages for plane in runs)
            costs[BULK] = self.connection.write_us(descriptors, nbytes)
        else:
            costs[SLICE] = self.connection.write_us(sum(plane.per_page for plane in runs) * cells, nbytes)
        if direct and self.direct is not None:
            costs[DIRECT] = self.direct.us(nbytes)
            # The kernels of a gather and a scatter are launched and awaited too. Without this, a rank whose GPU was
            # shared while the costs were measured staged small parts, which took longer.
            costs[STAGED] += 2 * self.direct.us_per_part
        return costs
