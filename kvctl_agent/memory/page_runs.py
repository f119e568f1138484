"""Runs of adjacent pages, which path bulk sends with one descriptor for each layer and plane.

numpy releases the GIL to sort, and in loops over more than 500 elements. Beside an engine's thread that runs Python
each release may cost a wait of 5 ms, and the descriptors of a room of 1,024 tokens took up to seven of them. The native
code keeps the GIL (`kvctl_agent/native/row_copies.c`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvctl_agent.memory.addresses import Indices, PageSteps
from kvctl_agent.native import row_copies

Pages = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class RunDescriptors(NamedTuple):
    """Descriptors of page runs: local addresses, the peer's addresses, and bytes, uint64 `[blocks * runs]` each."""

    local: Words
    remote: Words
    sizes: Words


def run_descriptors(
    src: Pages,
    dst: Pages,
    src_steps: PageSteps,
    dst_steps: PageSteps,
    page_bytes: int,
    local: Indices,
    remote: Indices,
) -> RunDescriptors:
    """Returns the descriptors that move pages `src` to pages `dst`, in every block (a plane of a layer).

    Args:
        src, dst: Transfer pages, int32 or int64 `[pages]`.
        src_steps, dst_steps: Their distances in a block.
        page_bytes: Bytes of a page; pages at this distance on both sides are adjacent.
        local, remote: Addresses of the blocks, int64 `[blocks]`.
    """
    packed = row_copies.page_descriptors(src, dst, src_steps, dst_steps, page_bytes, local, remote)
    return RunDescriptors(*(np.frombuffer(words, np.uint64) for words in packed))
