"""Prints the rates of the copier for host memory as ratios of this machine's memcpy rate in the same run.

Usage: python benchmarks/copy_rates.py
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np

from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, local_shards
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.allocations import RingMemory, StagingBuffers
from kvctl_agent.memory.copier import Copier, LandedPart, PendingCopy
from kvctl_agent.memory.host_copier import CopyPool, HostCopier
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.segment import RowIndex
from kvctl_agent.paths.calibration import memcpy_gb_per_s

PAGE_SIZE = 16
POOL_BYTES = 192 << 20  # six times the cache, so that random pages miss
ROUND_BYTES = 64 << 20
REPEATS = 5

PLAIN = ModelShape(num_layers=1, num_kv_heads=8, k_dim=128, v_dim=128, dtype_bytes=2)
DEEP = replace(PLAIN, num_layers=32)


class Case(NamedTuple):
    """Case of the benchmark: copies of a range of heads of some pages.

    Attributes:
        name: label in the table.
        shape: model whose KV cache is copied.
        heads: number of heads copied.
        contiguous: whether the pages are consecutive instead of random.
        pages: number of pages; None for as many as `ROUND_BYTES` contain.
        layout: layout of the pool.
    """

    name: str
    shape: ModelShape
    heads: int
    contiguous: bool = False
    pages: int | None = None  # None: as many as ROUND_BYTES contain
    layout: str = "nhd"


CASES = (
    Case("256 B rows (1 of 8 heads)", PLAIN, 1),
    Case("512 B rows (2 of 8 heads)", PLAIN, 2),
    Case("768 B rows (3 of 8 heads)", PLAIN, 3),
    Case("1 KiB rows (4 of 8 heads)", PLAIN, 4),
    Case("whole 32 KiB pages", PLAIN, 8),
    Case("512 B rows, pages in one run", PLAIN, 2, contiguous=True),
    Case("whole pages in one run", PLAIN, 8, contiguous=True),
    Case("4 pages of 32 layers, 2 of 8 heads", DEEP, 2, pages=4),
    Case("4 pages of 32 layers, whole", DEEP, 8, pages=4),
    Case("K 192, V 128, scales, 2 of 8 heads", replace(PLAIN, k_dim=192, k_scale_bytes=4, v_scale_bytes=4), 2),
    Case("latents of 1,152 B", ModelShape(1, 1, 576, 0, 2, kind="mla"), 1),
    Case("4 pages of 32 layers of latents", ModelShape(32, 1, 576, 0, 2, kind="mla"), 1, pages=4),
    Case("HND, 2 of 8 heads", PLAIN, 2, layout="hnd"),
    Case("HND, K and V fused, whole", PLAIN, 8, layout="fused"),
    Case("HND, K and V fused, 2 of 8 heads", PLAIN, 2, layout="fused"),
)


def case_pool(shape: ModelShape, layout: str) -> KVPool:
    """Allocates a pool of about `POOL_BYTES` for a model in one of `POOL_LAYOUTS`."""
    whole = local_shards(shape, PAGE_SIZE, ParallelConfig(), RankCoord(0, 0, 0, 0))
    page_bytes = shape.num_layers * shape.num_kv_heads * whole[0].segment.page_head_bytes
    return KVPool.allocate(whole, PAGE_SIZE, POOL_BYTES // page_bytes, layout=layout)


def gb_per_s(nbytes: int, work: Callable[[], None]) -> float:
    """Returns the median rate of `REPEATS` calls of `work` in GB/s, after one call that is not counted.

    Args:
        nbytes: bytes that one call copies.
        work: copies them.
    """
    work()
    rates = []
    for _ in range(REPEATS):
        start = time.perf_counter_ns()
        work()
        rates.append(nbytes / (time.perf_counter_ns() - start))
    return median(rates)


def measure(pool: KVPool, case: Case, copier: Copier, threads: int) -> tuple[float, float]:
    """Returns the rates of gathers into buffers that stay in cache and of scatters from a ring, in GB/s of payload."""
    (memory,) = pool.segments
    layers, total, heads = memory.shard.num_layers, memory.num_slots, case.heads
    each = layers * heads * memory.shard.segment.page_head_bytes
    count = case.pages or min(total, ROUND_BYTES // each)
    order = np.arange(count) if case.contiguous else np.random.default_rng(0).permutation(total)[:count]
    rows = RowIndex(memory, order, head=0 if heads == memory.shard.heads else 1, heads=heads)
    part = memory.part_layout(0, layers, count, heads)
    pieces = part.pieces(copier.piece_bytes)
    at_once = max(1, threads)
    buffers = StagingBuffers(at_once, max(piece.nbytes for piece in pieces))
    ring = RingMemory(part.region_bytes)
    spans = [buffer.span for number in range(at_once) if (buffer := buffers.acquire(str(number))) is not None]

    def gathered() -> None:
        for first in range(0, len(pieces), at_once):
            group = pieces[first : first + at_once]
            finish(copier.gather(rows, group, spans[: len(group)]))

    def scattered() -> None:
        finish(copier.scatter([LandedPart(rows, part, ring.view(0, part.region_bytes))]))

    try:
        return gb_per_s(part.nbytes, gathered), gb_per_s(part.nbytes, scattered)
    finally:
        buffers.close()
        ring.close()


def finish(copy: PendingCopy) -> None:
    """Polls a copy until it has ended, as the control loop does."""
    while not copy.done():
        time.sleep(20e-6)


def main() -> None:
    """Measures all cases and prints the table; takes a few seconds."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    floor = memcpy_gb_per_s()
    print(f"memcpy floor, one thread: {floor:.1f} GB/s; below: GB/s (ratio to the floor)")
    print(f"{'case':<36}{'threads':>8}{'gather':>15}{'scatter':>15}")
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
    for case in CASES:
        pool = case_pool(case.shape, case.layout)
        for threads in range(min(4, len(os.sched_getaffinity(0))) + 1):
            copies = CopyPool(threads, wake_fd).start()
            rates = measure(pool, case, HostCopier(copies), threads)
            cells = "".join(f"{rate:>8.1f} ({rate / floor:4.2f})" for rate in rates)
            print(f"{case.name:<36}{threads:>8}{cells}", flush=True)
            copies.close()
        pool.close()
    os.close(wake_fd)


if __name__ == "__main__":
    main()
