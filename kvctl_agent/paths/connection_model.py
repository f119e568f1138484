"""Measured model of a connection: predicts the time of a part on each path, for `auto` and for `kvctl peers cost`.

It adds up the costs of a part at both ends, in µs:

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
from kvctl_agent.layout.page_indices import count_runs
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.paths.contiguous_runs import PlaneRuns, bulk_is_possible
from kvctl_agent.transport.cost_probe import ConnectionCost

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


@dataclass(frozen=True, slots=True)
class ConnectionModel:
    """Costs of parts over one connection, as measured on this machine.

    Attributes:
        write: cost of writes.
        copy: cost of gathers and scatters.
        direct: cost of path direct; None if the peer's memory is not mapped.
    """

    write: ConnectionCost
    copy: CopyCost
    direct: DirectCost | None = None

    def part_us(
        self,
        share: TransferSlice,
        layers: int,
        dst_pages: npt.NDArray[np.int32],
        runs: tuple[PlaneRuns, ...],
        direct: bool = False,
    ) -> dict[str, float]:
        """Returns the predicted time of a part on each possible path, in µs.

        The reader's page runs count for both sides, because the local pages are not known when a path is chosen.

        Args:
            share: The part's transfer slice.
            layers: Number of layers of the part.
            dst_pages: The reader's pages.
            runs: Contiguous runs of each plane.
            direct: Whether the peer's memory is mapped.
        """
        pages, cells = len(dst_pages), layers * len(dst_pages)
        nbytes = share.payload_bytes(pages, layers)
        staged = self.write.write_us(1, nbytes)
        for plane in runs:
            staged += self.copy.gather_us(cells * plane.page_bytes, plane.gather_bytes)
            staged += self.copy.scatter_us(cells * plane.page_bytes, plane.scatter_bytes)
        costs = {STAGED: staged * _STAGED_FACTOR + _STAGED_FIXED_US}
        if bulk_is_possible(share, runs):
            each = count_runs(dst_pages) if any(plane.adjacent for plane in runs) else pages
            descriptors = layers * sum(each if plane.adjacent else pages for plane in runs)
            costs[BULK] = self.write.write_us(descriptors, nbytes)
        else:
            costs[SLICE] = self.write.write_us(sum(plane.per_page for plane in runs) * cells, nbytes)
        if direct and self.direct is not None:
            costs[DIRECT] = self.direct.us(nbytes)
            # The kernels of a gather and a scatter are launched and awaited too. Without this, a rank whose GPU was
            # shared while the costs were measured staged small parts, which took longer.
            costs[STAGED] += 2 * self.direct.us_per_part
        return costs
