"""The kernel and numpy agree: parts of every dtype, head slice, page size and kind of attention, there and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from interpreted import launch

from kvctl_agent.device.base import Batch, Places, Strips
from kvctl_agent.device.rows import DEFAULT
from kvctl_agent.layout.holding import Held
from kvctl_agent.layout.shape import Plane, Segment
from kvctl_agent.memory.copier import Landed
from kvctl_agent.memory.crew import CopyCrew
from kvctl_agent.memory.device_copier import DeviceCopier
from kvctl_agent.memory.host_copier import HostCopier
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.region import Stretch
from kvctl_agent.memory.rows import RowIndex
from kvctl_agent.memory.segment import SegmentMemory

DTYPES = {"fp8": 1, "int8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
LAYERS, SLOTS = 2, 6
PAGES = np.array([4, 0, 1, 5, 3])

# (heads, head, count, elements of K, of V); no V is a latent.
MODELS = {
    "all heads": (4, 0, 4, 16, 16),
    "two of eight": (8, 6, 2, 16, 16),
    "three of five": (5, 1, 3, 10, 10),
    "K wider than V": (4, 1, 2, 24, 16),
    "latent": (1, 0, 1, 576, 0),
}


class Interpreted:
    """`Copies` that happen at once."""

    def begin(self, batches: Sequence[Batch | Strips], pages: Places, **_: Any) -> SimpleNamespace:
        for batch in batches:
            # Wide enough that the interpreter takes a block in one go.
            launch(batch, pages, DEFAULT.bounded, programs=1)
        return SimpleNamespace(done=lambda: True)


@contextmanager
def filled(model: str, page_size: int, dtype: str, seed: int) -> Iterator[SegmentMemory]:
    heads, *_, k, v = MODELS[model]
    planes = tuple(Plane(name, page_size, size * DTYPES[dtype]) for name, size in (("k", k), ("v", v)) if size)
    pool = KVPool.allocate((Held(Segment(0, "kv", 0, LAYERS, heads, planes), 0, LAYERS, 0, heads),), page_size, SLOTS)
    (memory,) = pool.segments
    random = np.random.default_rng(seed)
    for layer in memory.blocks:
        for block in layer:
            block.array()[:] = random.integers(0, 256, block.nbytes, np.uint8)
    yield memory
    pool.close()


def stretch(array: np.ndarray) -> Stretch:
    return Stretch(int(array.ctypes.data), array.nbytes, array)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_there_and_back(model: str, dtype: str, page_size: int) -> None:
    _, head, heads, *_ = MODELS[model]
    numpy, kernel = HostCopier(CopyCrew(1)), DeviceCopier(Interpreted())
    with filled(model, page_size, dtype, 1) as source:
        part = source.part_layout(0, LAYERS, len(PAGES), heads)
        rows = RowIndex(source, PAGES, head, heads)
        (whole,) = part.pieces(part.nbytes)
        wanted, found = (np.zeros(part.region_bytes, np.uint8) for _ in range(2))
        numpy.gather(rows, [whole], [stretch(wanted)])
        kernel.gather(rows, [whole], [stretch(found)])
    assert wanted.any()
    assert np.array_equal(wanted, found)
    images = []
    for copier in (numpy, kernel):
        with filled(model, page_size, dtype, 2) as target:
            back = RowIndex(target, PAGES[::-1], head, heads)
            copier.scatter([Landed(back, part, stretch(wanted))])
            images.append([block.array().copy() for layer in target.blocks for block in layer])
    assert all(map(np.array_equal, *images))
