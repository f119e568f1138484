"""How fast this machine copies memory: the floor every transfer rate is held against."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from kvctl_agent.memory.huge_pages import Bytes, HugePageMemory

_MIN_COPIES = 3


def memcpy_gb_per_s(nbytes: int = 128 << 20, seconds: float = 0.5) -> float:
    """One thread's memcpy rate in GB/s (1e9 bytes copied per second), the median over `seconds`.

    Args:
        nbytes: size of a copy; larger than the last-level cache, or the cache is measured. Both sides are
            pre-touched huge pages.
        seconds: how long to measure; at least three copies are made.
    """
    source, target = HugePageMemory(nbytes), HugePageMemory(nbytes)
    rates: list[float] = []
    try:
        deadline = time.perf_counter() + seconds
        while len(rates) < _MIN_COPIES or time.perf_counter() < deadline:
            start = time.perf_counter_ns()
            np.copyto(target.array, source.array)
            rates.append(nbytes / (time.perf_counter_ns() - start))
    finally:
        source.close()
        target.close()
    return median(rates)


def halves_gb_per_s(memory: Bytes) -> float:
    """One thread's memcpy rate in GB/s from one half of `memory` to the other, the best of a few: takes milliseconds.

    Args:
        memory: touched before, overwritten; larger than the caches, or those are measured.
    """
    source, target = np.array_split(memory[: len(memory) // 2 * 2], 2)
    took: list[int] = []
    for _ in range(_MIN_COPIES):
        start = time.perf_counter_ns()
        np.copyto(target, source)
        took.append(time.perf_counter_ns() - start)
    return source.nbytes / max(1, min(took))
