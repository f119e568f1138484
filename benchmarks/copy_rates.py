"""Print how fast the gather and scatter kernels run, as ratios of this machine's memcpy floor in the same run.

Usage: python benchmarks/copy_rates.py [--piece-kib 256 1024 4096]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np

from kvctl_agent.memory.buffers import RingMemory, StagingBuffers
from kvctl_agent.memory.copy import gather_piece, scatter_piece
from kvctl_agent.memory.crew import CopyCrew, copy_threads
from kvctl_agent.memory.floor import memcpy_gb_per_s
from kvctl_agent.memory.parts import PartLayout, Piece
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.rows import RowIndex

PAGE_SIZE = 16
POOL_HEADS = 8
ROUND_BYTES = 64 << 20
REPEATS = 5


def case_pool(row_bytes: int) -> KVPool:
    """A pool of one layer, 2 x 96 MiB: six times the cache, so that random pages miss."""
    pages = (96 << 20) // (PAGE_SIZE * POOL_HEADS * row_bytes)
    return KVPool.allocate(1, pages, PAGE_SIZE, POOL_HEADS, POOL_HEADS, row_bytes // 2, row_bytes // 2, 2)


def gb_per_s(nbytes: int, work: Callable[[], None]) -> float:
    """Median rate of `REPEATS` rounds after one to warm up."""
    work()
    rates = []
    for _ in range(REPEATS):
        start = time.perf_counter_ns()
        work()
        rates.append(nbytes / (time.perf_counter_ns() - start))
    return median(rates)


def measure(pool: KVPool, heads: int, contiguous: bool, piece_bytes: int, threads: int) -> tuple[float, float, float]:
    """(gather, scatter, gather + copy to the ring + scatter) in GB/s of payload."""
    row_bytes = pool.k_dim * pool.dtype_bytes
    count = min(pool.num_pages, ROUND_BYTES // (2 * PAGE_SIZE * heads * row_bytes))
    order = np.arange(count) if contiguous else np.random.default_rng(0).permutation(pool.num_pages)[:count]
    rows = RowIndex(pool, order, head=0 if heads == POOL_HEADS else 1, heads=heads)
    part = PartLayout(0, 1, count, PAGE_SIZE, heads, row_bytes, row_bytes)
    pieces = part.pieces(piece_bytes)
    buffers = StagingBuffers(threads, max(piece.nbytes for piece in pieces))
    ring = RingMemory(part.region_bytes)
    crew = CopyCrew(threads)

    def gathered(piece: Piece) -> None:
        buffer = buffers.acquire()
        assert buffer is not None
        gather_piece(piece, rows, buffer.array)
        buffers.release(buffer)

    def scattered(piece: Piece) -> None:
        buffer = buffers.acquire()
        assert buffer is not None
        scatter_piece(piece, rows, buffer.array)
        buffers.release(buffer)

    def sent(piece: Piece) -> None:
        buffer = buffers.acquire()
        assert buffer is not None
        gather_piece(piece, rows, buffer.array)
        np.copyto(ring.view(piece.offset, piece.nbytes), buffer.array[: piece.nbytes])
        buffers.release(buffer)
        scatter_piece(piece, rows, ring.view(piece.offset, piece.nbytes))

    def over(step: Callable[[Piece], None]) -> float:
        jobs = [partial(step, piece) for piece in pieces]
        return gb_per_s(part.nbytes, lambda: crew.run(jobs))

    try:
        return over(gathered), over(scattered), over(sent)
    finally:
        crew.close()
        buffers.close()
        ring.close()


def main() -> None:
    """Print one table; a few seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--piece-kib", type=int, nargs="+", default=[1024])
    options = parser.parse_args()
    floor = memcpy_gb_per_s()
    print(f"memcpy floor, one thread: {floor:.1f} GB/s; below: GB/s (ratio to the floor)")
    print(f"{'case':<34}{'piece':>9}{'threads':>8}{'gather':>15}{'scatter':>15}{'through ring':>15}")
    cases = [
        ("256 B rows (1 of 8 heads)", 256, 1, False),
        ("512 B rows (2 of 8 heads)", 256, 2, False),
        ("768 B rows (3 of 8 heads)", 256, 3, False),
        ("1 KiB rows (4 of 8 heads)", 256, 4, False),
        ("whole 32 KiB pages", 256, 8, False),
        ("512 B rows, pages in one run", 256, 2, True),
        ("whole pages in one run", 256, 8, True),
    ]
    for name, row_bytes, heads, contiguous in cases:
        pool = case_pool(row_bytes)
        for piece_kib in options.piece_kib:
            for threads in range(1, copy_threads() + 1):
                rates = measure(pool, heads, contiguous, piece_kib << 10, threads)
                cells = "".join(f"{rate:>8.1f} ({rate / floor:4.2f})" for rate in rates)
                print(f"{name:<34}{piece_kib:>5} KiB{threads:>8}{cells}", flush=True)
        pool.close()


if __name__ == "__main__":
    main()
