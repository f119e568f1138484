"""Both ends of a connection in this process: ranks' pools on a writer's and a reader's transport, and their plan.

The model's contents are known element by element. A writer's pool is filled with its own layers and heads; the expected
contents are computed for the reader's layout, so that a wrong head or layer is detected on either side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvctl_agent.layout.parallel import LocalShard, ParallelConfig, local_shards
from kvctl_agent.layout.plan import TransferSlice, state_slices_to_reader, transfer_slices
from kvctl_agent.layout.plan_inputs import PlanInputs
from kvctl_agent.layout.shape import ModelShape, Segment
from kvctl_agent.memory.allocations import RingMemory, StagingBuffers
from kvctl_agent.memory.part_layout import PartLayout
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.region import Region
from kvctl_agent.memory.segment import RowIndex
from kvctl_agent.paths.base import Flight, Path
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.protocol.events import Transfer
from kvctl_agent.protocol.messages import Grant
from kvctl_agent.protocol.peer import CancelToken, Lease
from kvctl_agent.protocol.tag import PartKey, PartKind
from kvctl_agent.transport.base import Transport
from kvctl_agent.transport.registry import open_transport
from tests.support.numpy_copier import scatter_piece

POISON = 0xDB
AUX_SLOTS = 4


@dataclass(frozen=True)
class Geometry:
    """Parameters of a test; `model` and the parallel configs replace the preceding sizes if given."""

    heads: int = 8
    prefill_tp: int = 2
    decode_tp: int = 1
    k_dim: int = 16
    v_dim: int = 16
    page_size: int = 4
    layers: int = 3
    pages: int = 40
    dtype_bytes: int = 2
    model: ModelShape | None = None
    prefill: ParallelConfig | None = None
    decode: ParallelConfig | None = None

    def inputs(self) -> PlanInputs:
        model = self.model or ModelShape(self.layers, self.heads, self.k_dim, self.v_dim, self.dtype_bytes)
        prefill, decode = (
            self.prefill or ParallelConfig(tp=self.prefill_tp),
            self.decode or ParallelConfig(tp=self.decode_tp),
        )
        return PlanInputs(model, self.page_size, 1024, prefill, decode)

    def shares(self) -> tuple[TransferSlice, ...]:
        """Transfer slices of KV and draft."""
        return transfer_slices(self.inputs(), 1, 0)

    def state_shares(self) -> tuple[TransferSlice, ...]:
        inputs = self.inputs()
        return tuple(
            share for reader in range(inputs.decode.size) for share in state_slices_to_reader(inputs, 1, reader)
        )

    def slots(self, segment: Segment) -> int:
        """Pages or items of a segment in every pool."""
        return self.pages - 3 * segment.index if segment.state else self.pages

    def pools(self, side: ParallelConfig) -> list[KVPool]:
        inputs = self.inputs()
        items = {segment.name: self.slots(segment) for segment in inputs.segments if segment.state}
        return [
            KVPool.allocate(
                local_shards(inputs.shape, self.page_size, side, side.coord(rank)),
                self.page_size,
                self.pages,
                items,
                aux_slots=AUX_SLOTS,
                aux_row_bytes=48,
            )
            for rank in range(side.size)
        ]

    def truth(self, segment: Segment, layer: int, plane: int) -> np.ndarray:
        """Contents of a segment in every writer: uint8 [slots, rows, heads of the model, head bytes]."""
        _, rows, head_bytes = segment.planes[plane]
        shape = self.slots(segment), rows, segment.heads, head_bytes
        return np.random.default_rng([segment.index, layer, plane]).integers(0, 256, shape, np.uint8)


def planes_of(held: LocalShard) -> Iterator[tuple[int, int]]:
    """(layer, plane) of everything that a rank holds of a segment."""
    for layer in range(held.layer_lo, held.layer_hi):
        for plane in range(len(held.segment.planes)):
            yield layer, plane


@dataclass
class Ends:
    """Pools of all ranks, filled with the truth (writers) or poison (readers), and the expected contents."""

    geometry: Geometry
    here: Transport
    there: Transport
    writers: list[KVPool]
    readers: list[KVPool]
    ring: RingMemory
    image: dict[tuple[int, int, int, int], np.ndarray] = field(default_factory=dict)

    def fill(self) -> None:
        """Fills every writer with its part of the truth."""
        for pool in self.writers:
            for memory in pool.segments:
                heads = slice(memory.shard.head_lo, memory.shard.head_hi)
                for layer, plane in planes_of(memory.shard):
                    truth = self.geometry.truth(memory.shard.segment, layer, plane)
                    memory.block(layer, plane)[:] = truth[:, :, heads].reshape(-1)
            pool.aux[0][:] = np.random.default_rng(1).integers(0, 256, pool.aux[0].shape, np.uint8)

    def poison(self) -> None:
        """Fills the readers with poison and expects nothing else."""
        for number, pool in enumerate(self.readers):
            for index, memory in enumerate(pool.segments):
                for layer, plane in planes_of(memory.shard):
                    memory.block(layer, plane)[:] = POISON
                    self.image[number, index, layer, plane] = memory.block(layer, plane).copy()
            pool.aux[0][:] = POISON

    def connection(self, share: TransferSlice) -> PeerConnection:
        pool, theirs = self.writers[share.writer], self.readers[share.reader].addresses()
        return PeerConnection("reader", self.here, pool, theirs, self.ring.addr)

    def order(
        self, share: TransferSlice | None, src: Any, dst: Any, layers: tuple[int, int] | None = None, **more: Any
    ) -> Transfer:
        lo, hi = layers or ((share.layer_lo, share.layer_hi) if share else (0, 1))
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
            "grant": None,
            "tag": b"tag",
            "cancel": CancelToken(Lease(1 << 62)),
            "ready_ns": time.monotonic_ns(),
            "opened_ns": time.monotonic_ns(),
        }
        return Transfer(**{**defaults, **more})

    def layout(self, share: TransferSlice, pages: int, layers: tuple[int, int]) -> PartLayout:
        return self.readers[share.reader].segments[share.segment].part_layout(*layers, pages, share.heads)

    def grant(
        self, share: TransferSlice, pages: int, layers: tuple[int, int] | None = None, offset: int = 4096
    ) -> Grant:
        """Grants a region as the reader does: from the plan alone."""
        lo, hi = layers or (share.layer_lo, share.layer_hi)
        return Grant(0, lo, hi, 1, offset, offset + share.part_bytes(pages, hi - lo), 0)

    def scatter(
        self, share: TransferSlice, dst: Any, layers: tuple[int, int] | None = None, offset: int = 4096
    ) -> None:
        """Scatters a landed part, as the reader does."""
        part = self.layout(share, len(dst), layers or (share.layer_lo, share.layer_hi))
        memory = self.readers[share.reader].segments[share.segment]
        rows = RowIndex(memory, np.asarray(dst, np.int32), share.dst_head, share.heads)
        region = self.ring.view(offset, part.region_bytes).array
        assert region is not None
        for piece in part.pieces():
            scatter_piece(piece, rows, region[piece.offset :])

    def expect(self, share: TransferSlice, src: Any, dst: Any, layers: tuple[int, int] | None = None) -> None:
        """Expects these elements of the model at the readers from now on."""
        held = self.readers[share.reader].segments[share.segment].shard
        theirs = slice(share.dst_head, share.dst_head + share.heads)
        heads = slice(held.head_lo + theirs.start, held.head_lo + theirs.stop)
        for layer in range(*(layers or (share.layer_lo, share.layer_hi))):
            for plane, (_, rows, head_bytes) in enumerate(held.segment.planes):
                image = self.image[share.reader, share.segment, layer, plane].reshape(-1, rows, held.heads, head_bytes)
                image[dst, :, theirs] = self.geometry.truth(held.segment, layer, plane)[src][:, :, heads]

    def check(self) -> None:
        """Checks every byte of every reader's pool: the expected ones, and poison elsewhere."""
        for (reader, segment, layer, plane), image in self.image.items():
            got = self.readers[reader].segments[segment].block(layer, plane)
            assert np.array_equal(got, image), (reader, segment, layer, plane)

    def tags(self, count: int, timeout_s: float = 60.0) -> list[bytes]:
        """Returns the tags that arrive at the reader within a short time."""
        got: list[bytes] = []
        deadline = time.monotonic() + timeout_s
        while len(got) < count and time.monotonic() < deadline:
            self.here.progress()
            got += [arrival.tag for arrival in self.there.arrivals()]
        return got

    def fly(self, path: Path, share: TransferSlice, src: Any, dst: Any, **more: Any) -> Flight:
        """Transfers one part and returns its tag."""
        flight = path.start(more.pop("connection", None) or self.connection(share), self.order(share, src, dst, **more))
        land(flight, self.there)
        assert self.tags(1) == [b"tag"]
        return flight


def land(flight: Flight, there: Transport, timeout_s: float = 60.0) -> None:
    """Drive a part to its end; the reader progresses its engine meanwhile."""
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
        writers, readers = geometry.pools(geometry.inputs().prefill), geometry.pools(geometry.inputs().decode)
        ring = RingMemory(4 << 20)
        here, there = open_transport(engine, "writer"), open_transport(engine, "reader")
        here.register([Region(*r) for pool in writers for r in pool.regions()] + [Region(*buffers.region())])
        there.register([Region(*r) for pool in readers for r in pool.regions()] + [Region(*ring.region())])
        here.connect("reader", there.metadata())
        made = Ends(geometry, here, there, writers, readers, ring)
        made.fill()
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
