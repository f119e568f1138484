"""Pools of random bytes, with planes of many shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.layout.shape import Plane, Segment
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.segment import SegmentMemory

Planes = tuple[Plane, ...]

WIDE_K: Planes = (Plane("k", 4, 20), Plane("v", 4, 12))
PLANES: dict[str, Planes] = {
    "K and V alike": (Plane("k", 4, 12), Plane("v", 4, 12)),
    "K wider than V": WIDE_K,
    "with scales": (*WIDE_K, Plane("k_scale", 1, 4), Plane("v_scale", 1, 2)),
    "one row a page": (Plane("k", 1, 8), Plane("v", 1, 8)),
    "latent": (Plane("latent", 4, 18),),
    "latent with scales": (Plane("latent", 4, 18), Plane("scale", 1, 6)),
    "items of state": (Plane("conv", 3, 8),),
}


@contextmanager
def filled(layers: range, pages: int, heads: int, planes: Planes, seed: int = 1) -> Iterator[SegmentMemory]:
    """Memory of random bytes; `layers` are the segment's numbers."""
    segment = Segment(0, "kv", 0, layers.stop + 2, heads, planes)
    pool = KVPool.allocate((LocalShard(segment, layers.start, layers.stop, 0, heads),), planes[0].rows, pages)
    random = np.random.default_rng(seed)
    for layer in pool.segments[0].blocks:
        for block in layer:
            block.array()[:] = random.integers(0, 256, block.nbytes, dtype=np.uint8)
    try:
        yield pool.segments[0]
    finally:
        pool.close()
