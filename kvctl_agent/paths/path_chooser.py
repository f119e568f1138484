"""Chooses the path of a part: the configured path, or the cheapest by the model measured on this machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvctl_agent.contract.choices import BULK, DIRECT, SLICE, STAGED
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import ModelShape, segments
from kvctl_agent.paths.connection_model import ConnectionModel
from kvctl_agent.paths.contiguous_runs import PlaneRuns, bulk_is_possible, contiguous_runs

AUTO = "auto"


class PathChooser:
    """Chooses paths for one agent; `path` may be changed at run time.

    Args:
        shape: The model.
        page_size: Tokens per page.
        path: bulk, slice, staged, direct or auto.
        staging: off, on or auto. off excludes path staged, on prefers it.

    Attributes:
        model: Predicts the time of parts; None until measured. Until then the choice is direct for peers whose memory
            is mapped, and staged for others if it is allowed.
    """

    def __init__(self, shape: ModelShape, page_size: int, path: str, staging: str) -> None:
        self._segments = segments(shape, page_size)
        self.path = path
        self.staging = staging
        self.model: ConnectionModel | None = None

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

        Args:
            ring_bytes: Size of the peer's ring; 0 if it has none.
            share: The part's transfer slice.
            layers: Number of layers of the part.
            dst_pages: The reader's pages.
            direct: Whether the peer's memory is mapped.
            runs: Contiguous runs of each plane; if empty, both pools are assumed to be contiguous.
        """
        if self.path == BULK and not bulk_is_possible(share, runs):
            return SLICE
        if self.path != AUTO:
            return self.path
        staged = ring_bytes > 0 and self.staging != "off"
        if staged and self.staging == "on":
            return STAGED
        if not staged and not direct:
            return self.without_ring(share, runs=runs)
        costs = self.costs(share, layers, dst_pages, direct, runs)
        if not costs:
            return DIRECT if direct else STAGED
        if not staged:
            del costs[STAGED]
        return min(costs, key=lambda path: costs[path])

    def costs(
        self,
        share: TransferSlice,
        layers: int,
        dst_pages: npt.NDArray[np.int32],
        direct: bool = False,
        runs: tuple[PlaneRuns, ...] = (),
    ) -> dict[str, float]:
        """Returns the predicted time of a part on each possible path, in µs; empty until it is measured.

        The arguments are those of `choose`.
        """
        if self.model is None or (direct and self.model.direct is None):
            return {}
        runs = runs or contiguous_runs(self._segments[share.segment].planes, share)
        return self.model.part_us(share, layers, dst_pages, runs, direct)

    def without_ring(self, share: TransferSlice, direct: bool = False, runs: tuple[PlaneRuns, ...] = ()) -> str:
        """Returns the path of a part that has no ring region, such as state, which is small and scattered.

        `direct` says whether the peer's memory is mapped; `runs` is as for `choose`.
        """
        if self.path == DIRECT or (self.path == AUTO and direct):
            return DIRECT
        return BULK if self.path != SLICE and bulk_is_possible(share, runs) else SLICE
