"""Memory of pools that wrap an engine's tensors in host memory."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import numpy as np

from kvctl_agent import Agent, KVPool, Rank
from kvctl_agent.memory.allocations import HUGE_PAGE_BYTES
from tests.support.process_memory import mapped_kib, needs_collapse

PAGES, PAGE_SIZE, HEADS, HEAD_DIM = 256, 16, 8, 128


@needs_collapse
def test_pool_of_an_engine_gets_huge_pages(socket_dir: Path, no_leaks: None) -> None:
    shape = (PAGES * PAGE_SIZE, HEADS, HEAD_DIM)
    # As torch allocates: numpy asks for huge pages itself.
    memory = [mmap.mmap(-1, 2 * math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in "kv"]
    k, v = (np.frombuffer(each, np.float16).reshape(shape) for each in memory)
    for tensor in (k, v):
        tensor[:] = np.arange(HEAD_DIM)
        assert mapped_kib(tensor.ctypes.data, "AnonHugePages") == 0
    pool = KVPool.from_tensors([k], [v], page_size=PAGE_SIZE, total_kv_heads=HEADS)
    agent = Agent(
        role="decode",
        rank=Rank(),
        pool=pool,
        name="decode-0",
        bootstrap=f"ipc://{socket_dir}/boot",
        transport="loopback",
        staging_ring_mb=1,
    )
    try:
        for tensor in (k, v):
            huge_kib = mapped_kib(tensor.ctypes.data, "AnonHugePages", tensor.nbytes)
            assert huge_kib is not None
            assert huge_kib >= (tensor.nbytes - 2 * HUGE_PAGE_BYTES) // 1024
            assert (tensor == np.arange(HEAD_DIM)).all()
    finally:
        agent.close()
        pool.close()
