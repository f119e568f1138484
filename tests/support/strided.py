"""Segments whose planes share one tensor with its axes in any order."""

from __future__ import annotations

import math

import numpy as np

from kvctl_agent.contract.choices import HOST
from kvctl_agent.layout.parallel import LocalShard
from kvctl_agent.memory.addresses import PlaneStrides
from kvctl_agent.memory.region import Region
from kvctl_agent.memory.segment import SegmentMemory

ORDERS = ("lkpth", "plkth", "lphtk", "lpkht", "plthk", "klpht")
"""Some orders of layer, page, row (t), head and plane (k): NHD apart, block-outer, vLLM's fused HND, ..."""


def strided(
    shard: LocalShard, pages: int, order: str, split: int = 1, seed: int = 0
) -> tuple[SegmentMemory, np.ndarray]:
    """Returns a segment of random bytes in host memory, in transfer pages, and the tensor, which the caller must keep.

    Args:
        shard: The layers and heads; all planes have the same rows and head bytes.
        pages: Pages of the engine.
        order: Order of the axes; the bytes of a head come last.
        split: Transfer pages in a page.
    """
    _, rows, head_bytes = shard.segment.planes[0]
    sizes = {"l": shard.num_layers, "k": len(shard.segment.planes), "p": pages, "t": rows, "h": shard.heads}
    shape = [sizes[axis] for axis in order]
    tensor = np.random.default_rng(seed).integers(0, 256, (*shape, head_bytes), np.uint8)
    at = {axis: tensor.strides[order.index(axis)] for axis in order}
    strides = PlaneStrides(at["p"], at["t"], at["h"])
    extent = sum((sizes[axis] - 1) * at[axis] for axis in "pth") + head_bytes
    first = tensor.ctypes.data
    blocks = [
        tuple(Region(first + layer * at["l"] + plane * at["k"], extent, HOST) for plane in range(sizes["k"]))
        for layer in range(sizes["l"])
    ]
    assert tensor.nbytes == math.prod(shape) * head_bytes
    memory = SegmentMemory(shard, pages, blocks, Region.array, (strides,) * sizes["k"])
    return memory.at(split) if split > 1 else memory, tensor
