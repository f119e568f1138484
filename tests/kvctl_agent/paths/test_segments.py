"""Latents, scales, K and V of different widths, drafts and state: every path, between any two layouts.

Descriptors are checked element by element: a transfer of bytes would not show those that are written twice, or read
from a neighbour with the same content.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvctl_agent.errors import MemoryLayoutError
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import ModelShape, StateShape
from kvctl_agent.memory.addresses import PoolAddresses, SegmentAddresses
from kvctl_agent.paths.bulk import BulkPath
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.paths.slice import SlicePath

CONV = StateShape("conv", (0, 2, 3), 3, 8, 4)  # cut over tp
INDEX = StateShape("index", (1, 4), 1, 1, 20)  # the same on every rank

MODELS = {
    "K wider than V, draft, state": ModelShape(5, 8, 6, 4, 2, draft=ModelShape(1, 4, 4, 6, 2), states=(CONV, INDEX)),
    "scales": ModelShape(5, 8, 8, 8, 1, k_scale_bytes=4, v_scale_bytes=2),
    "latent, latent draft, state": ModelShape(
        5, 1, 18, 0, 2, kind="mla", draft=ModelShape(2, 1, 18, 0, 2, kind="mla"), states=(INDEX,)
    ),
    "latent with scales": ModelShape(5, 1, 18, 0, 1, kind="mla", k_scale_bytes=4),
    "one of them with scales": ModelShape(
        5, 8, 8, 8, 1, v_scale_bytes=1, draft=ModelShape(1, 8, 8, 8, 1, k_scale_bytes=2)
    ),
}
SIDES = {
    "tp2 to tp1": (ParallelConfig(tp=2), ParallelConfig()),
    "tp1 to tp4 of dp2": (ParallelConfig(), ParallelConfig(dp=2, tp=4)),
    "tp8 to tp2": (ParallelConfig(tp=8), ParallelConfig(tp=2)),
    "tp4 to tp4": (ParallelConfig(tp=4), ParallelConfig(tp=4)),
    "uneven pp2 tp2 to tp4": (ParallelConfig(pp=2, tp=2, stages=(1, 4)), ParallelConfig(tp=4)),
    "pp3 to uneven pp2 tp2": (ParallelConfig(pp=3), ParallelConfig(pp=2, tp=2, stages=(4, 1))),
    "pp2 to pp2": (ParallelConfig(pp=2), ParallelConfig(pp=2)),
}


def moved(made: Any, share: TransferSlice) -> tuple[np.ndarray, np.ndarray]:
    """Source and destination pages (or items) of a room: runs and single pages, unordered."""
    segment = made.geometry.inputs().segments[share.segment]
    random, total = np.random.default_rng(share.segment), made.geometry.slots(segment)
    count = 3 if segment.state else 9
    src, dst = random.permutation(total)[:count], random.permutation(total)[:count]
    if not segment.state:
        src[:3], dst[:3] = np.arange(total, total + 3) - 3, np.arange(3)
        src[3:], dst[3:] = random.permutation(total - 3)[:6], 3 + random.permutation(total - 3)[:6]
    return src, dst


def groups(share: TransferSlice) -> list[tuple[int, int]]:
    """Layer groups of a slice: the first layer, and the others."""
    lo, hi = share.layer_lo, share.layer_hi
    return [(lo, hi)] if hi == lo + 1 else [(lo, lo + 1), (lo + 1, hi)]


class Recorder:
    """Replaces a transport and records the source and destination of every byte."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int]] = []

    def write(self, peer: str, here: Any, there: Any, sizes: Any, tag: bytes) -> Recorder:
        self.copies += zip(here.tolist(), there.tolist(), sizes.tolist(), strict=True)
        return self

    descriptors = 0


def element(made_of: Any, layer: int, plane: int, page: int, row: int, head: int) -> int:
    """Address of one head of one row, by the definition of a pool."""
    held = made_of.shard
    _, rows, head_bytes = held.segment.planes[plane]
    start = ((page * rows + row) * held.heads + head) * head_bytes
    return int(made_of.block(layer, plane).ctypes.data) + start


@pytest.mark.parametrize("engine", ["loopback"])
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("model", MODELS)
def test_descriptors_name_every_byte_of_a_part_once(ends: Any, geometry: Any, model: str, sides: str) -> None:
    prefill, decode = SIDES[sides]
    made = ends(geometry(model=MODELS[model], prefill=prefill, decode=decode, pages=20))
    for share in made.geometry.shares() + made.geometry.state_shares():
        here = made.writers[share.writer].segments[share.segment]
        there = made.readers[share.reader].segments[share.segment]
        src, dst = moved(made, share)
        lo, hi = groups(share)[-1]
        wanted = set()
        for layer in range(lo, hi):
            for plane, (_, rows, head_bytes) in enumerate(here.shard.segment.planes):
                for s, d in zip(src.tolist(), dst.tolist(), strict=True):
                    for row in range(rows):
                        for head in range(share.heads):
                            a = element(here, layer, plane, s, row, share.src_head + head)
                            b = element(there, layer, plane, d, row, share.dst_head + head)
                            wanted |= {(a + byte, b + byte) for byte in range(head_bytes)}
        assert len(wanted) == share.payload_bytes(len(src), hi - lo)
        for path in (SlicePath(), BulkPath()):
            if isinstance(path, BulkPath) and not share.whole_rows:
                continue
            recorder = Recorder()
            connection = PeerConnection(
                "reader", recorder, made.writers[share.writer], made.readers[share.reader].addresses(), 0
            )  # type: ignore[arg-type]
            path.start(connection, made.order(share, src, dst, (lo, hi)))
            named = [(a + byte, b + byte) for a, b, size in recorder.copies for byte in range(size)]
            assert len(named) == len(wanted)
            assert set(named) == wanted


@pytest.mark.parametrize("engine", ["loopback"])
class TestRefusals:
    @pytest.mark.parametrize("path", [BulkPath, SlicePath])
    @pytest.mark.parametrize("layers", [(0, 1), (0, 2), (1, 3), (2, 3), (1, 1)])
    def test_layers_that_one_side_does_not_have(
        self, ends: Any, geometry: Any, path: Any, layers: tuple[int, int]
    ) -> None:
        made = ends(geometry(prefill=ParallelConfig(pp=3), decode=ParallelConfig()))
        share = made.geometry.shares()[1]
        assert (share.layer_lo, share.layer_hi) == (1, 2)
        with pytest.raises(MemoryLayoutError, match=r"kv: layers .* are not all on a rank that has 1$"):
            path().start(made.connection(share), made.order(share, [1], [1], layers))


@pytest.mark.parametrize("engine", ["loopback"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_descriptors_follow_the_pages_of_a_part_and_not_those_of_the_pools(
    ends: Any, geometry: Any, page_size: int
) -> None:
    """The peer of this pool states a million million pages of it; what a part costs must not depend on them."""
    made = ends(geometry(page_size=page_size, prefill=ParallelConfig(tp=2), decode=ParallelConfig()))
    share = made.geometry.shares()[0]
    theirs = made.readers[0].addresses()
    huge = SegmentAddresses(theirs.segments[0].shard, 1 << 40, theirs.segments[0].bases)
    recorder = Recorder()
    pool = PoolAddresses((huge,), theirs.aux_bases, theirs.aux_row_bytes, theirs.aux_slots)
    connection = PeerConnection("reader", recorder, made.writers[0], pool, 0)  # type: ignore[arg-type]
    SlicePath().start(connection, made.order(share, [1, 2], [3, 5]))
    assert len(recorder.copies) == 2 * page_size * share.num_layers * 2
