"""Measures the memcpy rate of this machine, against which transfer rates are compared."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from kvctl_agent.memory.allocations import Bytes, HugePageMemory

_MIN_COPIES = 3


def memcpy_gb_per_s(nbytes: int = 128 << 20, seconds: float = 0.5) -> float:
    """Return the memcpy rate of one thread in GB/s (1e9 bytes per second), the median of copies made over `seconds`.

    Source and target are huge pages that are faulted in before.

    Args:
        nbytes: Bytes of a copy. It must exceed the last-level cache, or the rate of the cache is measured.
        seconds: Duration of the measurement; at least three copies are made.
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


def memcpy_gb_per_s_within(memory: Bytes) -> float:
    """Return the memcpy rate of one thread in GB/s from one half of `memory` to the other, the best of three copies.

    Takes a few milliseconds.

    Args:
        memory: uint8 array, faulted in before; its second half is overwritten. It must exceed the caches, or their rate
            is measured.
    """
    source, target = np.array_split(memory[: len(memory) // 2 * 2], 2)
    durations_ns: list[int] = []
    for _ in range(_MIN_COPIES):
        start = time.perf_counter_ns()
        np.copyto(target, source)
        durations_ns.append(time.perf_counter_ns() - start)
    return source.nbytes / max(1, min(durations_ns))
