"""Measures the cost of row copies in host memory at start, for the cost model; takes a few milliseconds."""

from __future__ import annotations

import time

import numpy as np

from kvctl_agent.memory.huge_pages import Bytes
from kvctl_agent.paths.path_chooser import CopyCost

_ROWS = (256, 512, 1024, 2048, 8192, 32768)
_PIECE = 1 << 20  # so that seconds are seconds per MiB
_ROUNDS = 6


def measure_copies(memory: Bytes) -> CopyCost:
    """Measure gathers of random rows into a piece that stays in cache, and scatters from it.

    Each row size is measured once per round, and the best round counts.

    Args:
        memory: uint8 array, faulted in before and overwritten here. It must be larger than the caches, so that its rows
            are as cold as those of a pool.
    """
    random = np.random.default_rng(0)
    hot, cold = memory[:_PIECE], memory[_PIECE:]
    gather = [float("inf")] * len(_ROWS)
    scatter = [float("inf")] * len(_ROWS)
    for _ in range(_ROUNDS):
        for index, row_bytes in enumerate(_ROWS):
            row = np.dtype((np.void, row_bytes))
            rows, piece = cold[: cold.nbytes // row_bytes * row_bytes].view(row), hot.view(row)
            sources, targets = random.integers(len(rows), size=(2, len(piece)))  # other rows: those read are in cache
            since = time.perf_counter()
            np.take(rows, sources, out=piece, mode="clip")
            between = time.perf_counter()
            rows[targets] = piece
            gather[index] = min(gather[index], between - since)
            scatter[index] = min(scatter[index], time.perf_counter() - between)
    return CopyCost(_ROWS, tuple(seconds * 1e6 for seconds in gather), tuple(seconds * 1e6 for seconds in scatter))
