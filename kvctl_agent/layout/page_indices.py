"""Short arrays of page indices, without numpy's machinery.

A call of numpy that takes 5 µs in a loop takes 60 where caches are cold, as they are for every room: the control loop
has slept, or an engine has computed on its core. Most rooms have few pages.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

_WIRE = np.dtype("<i4")  # made once: numpy parses such a text for 10 µs
FEW = 500
"""Longest array that is read as a list; in loops over more elements numpy releases the GIL as well."""


def extent(indices: npt.NDArray[np.integer[Any]]) -> tuple[int, int]:
    """Returns the smallest and the largest of one or more indices."""
    if len(indices) <= FEW:
        values = indices.tolist()
        return min(values), max(values)
    least, most = indices[indices.argmin()], indices[indices.argmax()]  # `min` and `max` take four times as long
    return int(least), int(most)


def all_below(indices: npt.NDArray[np.int32], limit: int) -> bool:
    """Returns whether all indices are from 0 to below `limit`; with many of them numpy releases the GIL once."""
    if not len(indices):
        return True
    if len(indices) <= FEW:
        least, most = extent(indices)
        return least >= 0 and most < limit
    # As unsigned numbers, negative ones are too large.
    return bool(np.maximum.reduce(indices.view(np.uint32)) < min(limit, 1 << 31))


def count_runs(pages: npt.NDArray[np.int32]) -> int:
    """Returns the number of runs of consecutive pages among one or more pages, whatever their order."""
    if len(pages) <= FEW:
        few: list[int] = sorted(pages.tolist())
        return 1 + sum([after - before != 1 for before, after in pairwise(few)])
    ordered = np.sort(pages)
    return 1 + int(np.count_nonzero(ordered[1:] - ordered[:-1] != 1))


def packed(indices: npt.NDArray[np.int32]) -> bytes:
    """Returns indices as they are sent to peers, little-endian."""
    return indices.astype(_WIRE, copy=False).tobytes()


def unpacked(data: bytes) -> npt.NDArray[np.int32]:
    """Returns the indices that a peer has sent; raises ValueError if these are not whole numbers of 4 bytes."""
    return np.frombuffer(data, _WIRE)


@lru_cache(4096)
def single(index: int) -> npt.NDArray[np.int32]:
    """Returns an array of one index, such as an aux row's, which must not be changed."""
    array = np.array([index], np.int32)
    array.flags.writeable = False
    return array
