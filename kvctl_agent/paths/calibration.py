"""Measures what row copies cost on this machine, for the cost model; a few milliseconds at start."""

from __future__ import annotations

import time

import numpy as np

from kvctl_agent.memory.slab import Bytes
from kvctl_agent.paths.chooser import CopyCost

_ROWS = (256, 512, 1024, 2048, 8192, 32768)
_PIECE = 1 << 20
_TRIES = 3


def measure_copies(source: Bytes, target: Bytes) -> CopyCost:
    """Time random-row gathers of several row sizes from `source` into a cache-sized `target`.

    Args:
        source: uint8 memory much larger than the caches' share, touched before; staging buffers at start will do.
        target: uint8, at least 1 MiB.
    """
    random = np.random.default_rng(0)
    costs: list[float] = []
    for row_bytes in _ROWS:
        row = np.dtype((np.void, row_bytes))
        rows = source[: source.nbytes // row_bytes * row_bytes].view(row)
        out = target[:_PIECE].view(row)
        best = float("inf")
        for _ in range(_TRIES):
            index = random.permutation(len(rows))[: len(out)]
            if len(index) < len(out):
                index = np.resize(index, len(out))
            since = time.perf_counter()
            np.take(rows, index, out=out, mode="clip")
            best = min(best, time.perf_counter() - since)
        costs.append(best * 1e6)
    return CopyCost(_ROWS, tuple(costs))
