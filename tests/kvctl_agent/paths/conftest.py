"""Two ends of a lane in this process: ranks' pools on a writer's and on a reader's transport, and what is planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvctl_agent.layout.plan import PlanInputs, Share, shares
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.layout.side import Side
from kvctl_agent.memory.buffers import RingMemory, StagingBuffers
from kvctl_agent.memory.copy import scatter_piece
from kvctl_agent.memory.parts import PartLayout
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.rows import RowIndex
from kvctl_agent.paths.base import Flight, Lane, Path
from kvctl_agent.protocol.events import Fence, Transfer
from kvctl_agent.protocol.messages import Grant
from kvctl_agent.protocol.tag import PartKey, PartKind
from kvctl_agent.transport.base import Region, Transport
from kvctl_agent.transport.registry import open_transport

POISON = 0xDB
AUX_SLOTS = 4


@dataclass(frozen=True)
class Geometry:
    """What a test varies."""

    heads: int = 8
    prefill_tp: int = 2
    decode_tp: int = 1
    k_dim: int = 16
    v_dim: int = 16
    page_size: int = 4
    layers: int = 3
    pages: int = 40
    dtype_bytes: int = 2

    def shares(self) -> tuple[Share, ...]:
        return shares(self.inputs(), 1, 0)

    def shape(self) -> ModelShape:
        return ModelShape(self.layers, self.heads, self.k_dim, self.v_dim, self.dtype_bytes)

    def inputs(self) -> PlanInputs:
        return PlanInputs(self.shape(), self.page_size, 1024, Side(tp=self.prefill_tp), Side(tp=self.decode_tp))

    def pool(self, tp: int) -> KVPool:
        local = max(1, self.heads // tp)
        sizes = (self.page_size, local, self.heads, self.k_dim, self.v_dim, self.dtype_bytes)
        return KVPool.allocate(self.layers, self.pages, *sizes, aux_slots=AUX_SLOTS, aux_row_bytes=48)

    def grid(self, pool: KVPool, layer: int, kv: int) -> np.ndarray:
        """One layer's K or V as [pages, page_size, heads, row bytes]."""
        return pool.block(layer, kv).reshape(self.pages, self.page_size, pool.heads, -1)


@dataclass
class Ends:
    """Pools of all ranks, filled with random bytes (writers) and poison (readers), and the image of what must land."""

    geometry: Geometry
    here: Transport
    there: Transport
    writers: list[KVPool]
    readers: list[KVPool]
    ring: RingMemory
    image: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict)

    def poison(self) -> None:
        """Nothing has landed, and nothing is planned."""
        for number, pool in enumerate(self.readers):
            for layer in range(self.geometry.layers):
                for kv in (0, 1):
                    pool.block(layer, kv)[:] = POISON
                    self.image[number, layer, kv] = pool.block(layer, kv).copy()
            assert pool.aux is not None
            pool.aux[:] = POISON

    def lane(self, share: Share) -> Lane:
        pool, theirs = self.writers[share.writer], self.readers[share.reader].addresses()
        return Lane("reader", self.here, pool, theirs, self.ring.addr)

    def order(
        self, share: Share | None, src: Any, dst: Any, layers: tuple[int, int] | None = None, **more: Any
    ) -> Transfer:
        lo, hi = layers or (0, self.geometry.layers)
        defaults: dict[str, Any] = {
            "peer": "reader",
            "room": 1,
            "nonce": 1,
            "kind": PartKind.KV,
            "key": PartKey(share.writer if share else 0, 0, lo, hi),
            "path": "?",
            "share": share,
            "src_pages": np.asarray(src, np.int32),
            "dst_pages": np.asarray(dst, np.int32),
            "src_aux": -1,
            "dst_aux": -1,
            "grant": None,
            "tag": b"tag",
            "fence": Fence(),
            "ready_ns": time.monotonic_ns(),
            "opened_ns": time.monotonic_ns(),
        }
        return Transfer(**{**defaults, **more})

    def layout(self, share: Share, pages: int, layers: tuple[int, int]) -> PartLayout:
        g = self.geometry
        rows = g.k_dim * g.dtype_bytes, g.v_dim * g.dtype_bytes
        return PartLayout(layers[0], layers[1] - layers[0], pages, g.page_size, share.heads, *rows)

    def grant(self, share: Share, pages: int, layers: tuple[int, int] | None = None, offset: int = 4096) -> Grant:
        lo, hi = layers or (0, self.geometry.layers)
        end = offset + self.layout(share, pages, (lo, hi)).region_bytes
        return Grant(0, lo, hi, 1, offset, end, 0)

    def scatter(self, share: Share, dst: Any, layers: tuple[int, int], offset: int) -> None:
        """What the reader does with a landed part."""
        part = self.layout(share, len(dst), layers)
        rows = RowIndex(self.readers[share.reader], np.asarray(dst, np.int32), share.dst_head, share.heads)
        region = self.ring.view(offset, part.region_bytes)
        for piece in part.pieces():
            scatter_piece(piece, rows, region[piece.offset :])

    def expect(self, share: Share, src: Any, dst: Any, layers: tuple[int, int] | None = None) -> None:
        """From now on these bytes are planned to be there."""
        g, writer, reader = self.geometry, self.writers[share.writer], self.readers[share.reader]
        theirs = slice(share.dst_head, share.dst_head + share.heads)
        ours = slice(share.src_head, share.src_head + share.heads)
        for layer in range(*(layers or (0, g.layers))):
            for kv in (0, 1):
                image = self.image[share.reader, layer, kv]
                image.reshape(g.grid(reader, layer, kv).shape)[dst, :, theirs] = g.grid(writer, layer, kv)[src][
                    :, :, ours
                ]

    def check(self) -> None:
        """Every byte of every reader's pool is what was planned, and no other was touched."""
        for (reader, layer, kv), image in self.image.items():
            assert np.array_equal(self.readers[reader].block(layer, kv), image), (reader, layer, kv)

    def tags(self, count: int, timeout_s: float = 3.0) -> list[bytes]:
        """The tags that arrived at the reader within a moment."""
        got: list[bytes] = []
        deadline = time.monotonic() + timeout_s
        while len(got) < count and time.monotonic() < deadline:
            self.here.progress()
            got += [arrival.tag for arrival in self.there.arrivals()]
        return got

    def fly(self, path: Path, share: Share, src: Any, dst: Any, **more: Any) -> Flight:
        """Move one part to its end and hear its tag."""
        flight = path.start(more.pop("lane", None) or self.lane(share), self.order(share, src, dst, **more))
        land(flight, self.there)
        assert self.tags(1) == [b"tag"]
        return flight


def land(flight: Flight, there: Transport, timeout_s: float = 5.0) -> None:
    """Drive a part to its end; the reader does its duty to let its engine work."""
    deadline = time.monotonic() + timeout_s
    while not flight.advance():
        there.progress()
        assert time.monotonic() < deadline, "the part does not end"


@pytest.fixture(params=["nixl", "loopback"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def buffers() -> Iterator[StagingBuffers]:
    buffers = StagingBuffers(8, 4096)
    yield buffers
    buffers.close()


@pytest.fixture
def ends(engine: str, buffers: StagingBuffers) -> Iterator[Callable[[Geometry], Ends]]:
    closing: list[Callable[[], None]] = []

    def make(geometry: Geometry) -> Ends:
        random = np.random.default_rng(1)
        writers = [geometry.pool(geometry.prefill_tp) for _ in range(geometry.prefill_tp)]
        readers = [geometry.pool(geometry.decode_tp) for _ in range(geometry.decode_tp)]
        ring = RingMemory(4 << 20)
        here, there = open_transport(engine, "writer"), open_transport(engine, "reader")
        here.register([Region(*r) for pool in writers for r in pool.regions()] + [Region(*buffers.region())])
        there.register([Region(*r) for pool in readers for r in pool.regions()] + [Region(*ring.region())])
        here.connect("reader", there.metadata())
        made = Ends(geometry, here, there, writers, readers, ring)
        for pool in writers:
            for layer in range(geometry.layers):
                for kv in (0, 1):
                    block = pool.block(layer, kv)
                    block[:] = random.integers(0, 256, block.nbytes, np.uint8)
            assert pool.aux is not None
            pool.aux[:] = random.integers(0, 256, pool.aux.shape, np.uint8)
        made.poison()
        closing.extend([here.close, there.close, ring.close, *(pool.close for pool in writers + readers)])
        return made

    yield make
    for close in closing:
        close()


@pytest.fixture
def geometry() -> type[Geometry]:
    return Geometry


@pytest.fixture
def landed() -> Callable[..., None]:
    return land
