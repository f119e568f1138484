"""Prints the rates of the gather and scatter kernels as ratios of this machine's memcpy rate in the same run.

Usage: python benchmarks/copy_rates.py [--piece-kib 256 1024 4096]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np

from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, local_shards
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.allocations import RingMemory, StagingBuffers
from kvctl_agent.memory.host_copier import CopyPool, gather_piece, scatter_piece
from kvctl_agent.memory.part_layout import Piece
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
    """

    name: str
    shape: ModelShape
    heads: int
    contiguous: bool = False
    pages: int | None = None  # None: as many as ROUND_BYTES contain


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
)


def case_pool(shape: ModelShape) -> KVPool:
    """Allocates a pool of about `POOL_BYTES` for a model."""
    whole = local_shards(shape, PAGE_SIZE, ParallelConfig(), RankCoord(0, 0, 0, 0))
    page_bytes = shape.num_layers * shape.num_kv_heads * whole[0].segment.page_head_bytes
    return KVPool.allocate(whole, PAGE_SIZE, POOL_BYTES // page_bytes)


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


def measure(pool: KVPool, case: Case, piece_bytes: int, threads: int) -> tuple[float, float, float]:
    """Returns three rates in GB/s of payload: gather, scatter, and gather, copy to the ring and scatter together."""
    (memory,) = pool.segments
    layers, total, heads = memory.shard.num_layers, memory.num_slots, case.heads
    each = layers * heads * memory.shard.segment.page_head_bytes
    count = case.pages or min(total, ROUND_BYTES // each)
    order = np.arange(count) if case.contiguous else np.random.default_rng(0).permutation(total)[:count]
    rows = RowIndex(memory, order, head=0 if heads == memory.shard.heads else 1, heads=heads)
    part = memory.part_layout(0, layers, count, heads)
    pieces = part.pieces(piece_bytes)
    buffers = StagingBuffers(threads, max(piece.nbytes for piece in pieces))
    ring = RingMemory(part.region_bytes)
    landing = ring.view(0, part.region_bytes).array
    assert landing is not None
    pool_threads = CopyPool(threads).start()

    def gathered(piece: Piece) -> None:
        buffer = buffers.acquire()
        assert buffer is not None
        assert buffer.span.array is not None
        gather_piece(piece, rows, buffer.span.array)
        buffers.release(buffer)

    def scattered(piece: Piece) -> None:
        buffer = buffers.acquire()
        assert buffer is not None
        assert buffer.span.array is not None
        scatter_piece(piece, rows, buffer.span.array)
        buffers.release(buffer)

    def sent(piece: Piece) -> None:
        buffer = buffers.acquire()
        assert buffer is not None
        assert buffer.span.array is not None
        gather_piece(piece, rows, buffer.span.array)
        np.copyto(landing[piece.offset : piece.offset + piece.nbytes], buffer.span.array[: piece.nbytes])
        buffers.release(buffer)
        scatter_piece(piece, rows, landing[piece.offset : piece.offset + piece.nbytes])

    def over(step: Callable[[Piece], None]) -> float:
        jobs = [partial(step, piece) for piece in pieces]

        def copied() -> None:
            copy = pool_threads.begin(jobs, part.nbytes)
            while not copy.done():
                time.sleep(20e-6)

        return gb_per_s(part.nbytes, copied)

    try:
        return over(gathered), over(scattered), over(sent)
    finally:
        pool_threads.close()
        buffers.close()
        ring.close()


def main() -> None:
    """Measures all cases and prints the table; takes a few seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--piece-kib", type=int, nargs="+", default=[1024])
    options = parser.parse_args()
    floor = memcpy_gb_per_s()
    print(f"memcpy floor, one thread: {floor:.1f} GB/s; below: GB/s (ratio to the floor)")
    print(f"{'case':<36}{'piece':>9}{'threads':>8}{'gather':>15}{'scatter':>15}{'through ring':>15}")
    for case in CASES:
        pool = case_pool(case.shape)
        for piece_kib in options.piece_kib:
            for threads in range(1, min(4, len(os.sched_getaffinity(0))) + 1):
                rates = measure(pool, case, piece_kib << 10, threads)
                cells = "".join(f"{rate:>8.1f} ({rate / floor:4.2f})" for rate in rates)
                print(f"{case.name:<36}{piece_kib:>5} KiB{threads:>8}{cells}", flush=True)
        pool.close()


if __name__ == "__main__":
    main()
