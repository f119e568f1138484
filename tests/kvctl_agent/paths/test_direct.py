"""Path direct on the stand-in device: copies, event and tag of a kernel, and the mapping through which it writes."""

from __future__ import annotations

import timeit
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from kvctl_agent.device.base import Export
from kvctl_agent.errors import DeviceError, MemoryLayoutError, PeerDisconnected, TransportError
from kvctl_agent.layout.parallel import ParallelConfig
from kvctl_agent.layout.shape import ModelShape, StateShape
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.paths.direct import PROGRAMS, DirectPath, geometries
from kvctl_agent.paths.peer_connection import MappedMemory, PeerConnection
from kvctl_agent.protocol.tag import PartKind
from tests.support.host_device import HostDevice, HostMapping

pytestmark = pytest.mark.parametrize("engine", ["loopback"])

CONV = StateShape("conv", (0, 2, 3), 3, 8, 4)  # cut over tp
INDEX = StateShape("index", (1, 4), 1, 1, 20)  # the same on every rank
MODELS = {
    "K wider than V, draft, state": ModelShape(5, 8, 6, 4, 2, draft=ModelShape(1, 4, 4, 6, 2), states=(CONV, INDEX)),
    "scales": ModelShape(5, 8, 8, 8, 1, k_scale_bytes=4, v_scale_bytes=2),
    "latent with scales, state": ModelShape(5, 1, 18, 0, 1, kind="mla", k_scale_bytes=4, states=(INDEX,)),
}
SIDES = {
    "tp2 to tp1": (ParallelConfig(tp=2), ParallelConfig()),
    "tp1 to tp4 of dp2": (ParallelConfig(), ParallelConfig(dp=2, tp=4)),
    "tp8 to tp2": (ParallelConfig(tp=8), ParallelConfig(tp=2)),
    "tp4 to tp4": (ParallelConfig(tp=4), ParallelConfig(tp=4)),
    "pp3 to uneven pp2 tp2": (ParallelConfig(pp=3), ParallelConfig(pp=2, tp=2, stages=(4, 1))),
}


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


def exports(pool: KVPool) -> list[Export]:
    return [Export(region.addr, region.nbytes, "ipc", b"", "HOST") for region in pool.regions()]


def connection(made: Any, share: Any) -> tuple[PeerConnection, HostMapping]:
    """A connection with a mapping of the peer's memory on the stand-in device."""
    reader = made.readers[share.reader]
    mapping = HostMapping(exports(reader), "nvlink")
    return PeerConnection(
        "reader", made.here, made.writers[share.writer], reader.addresses(), 0, MappedMemory(mapping)
    ), mapping


def moved(made: Any, share: Any) -> tuple[np.ndarray, np.ndarray]:
    segment = made.geometry.inputs().segments[share.segment]
    random, total = np.random.default_rng(share.segment), made.geometry.slots(segment)
    count = 3 if segment.state else 9
    return random.permutation(total)[:count], random.permutation(total)[:count]


def send_all(made: Any, device: HostDevice) -> None:
    """Sends every slice of the plan, first one layer and then the others, and compares all bytes."""
    path = DirectPath(device.copies())
    for share in made.geometry.shares() + made.geometry.state_shares():
        src, dst = moved(made, share)
        way, mapping = connection(made, share)
        kind = PartKind.STATE if made.geometry.inputs().segments[share.segment].state else PartKind.KV
        cuts = sorted({share.layer_lo, min(share.layer_lo + 1, share.layer_hi), share.layer_hi})
        for layers in pairwise(cuts):
            made.expect(share, src, dst, layers)
            flight = made.fly(path, share, src, dst, layers=layers, connection=way, kind=kind)
            blocks = sum(len(batch.blocks) for batch in device.begun[-1].batches)
            assert blocks == len(way.segments[share.segment].local.shard.segment.planes) * (layers[1] - layers[0])
            assert flight.descriptors == flight.posts == len(device.begun[-1].batches)
        assert {batch.geometry for begun in device.begun for batch in begun.batches} >= geometries(
            [way.segments[share.segment]]
        )
        way.close()
        assert mapping.closed
    made.check()


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("model", MODELS)
def test_every_segment_lands_where_the_plan_says_and_nowhere_else(
    ends: Any, geometry: Any, device: HostDevice, model: str, sides: str
) -> None:
    prefill, decode = SIDES[sides]
    send_all(ends(geometry(model=MODELS[model], prefill=prefill, decode=decode, pages=20)), device)


def test_planes_of_one_geometry_go_in_one_kernel_and_whole_pages_as_one_row(
    ends: Any, geometry: Any, device: HostDevice
) -> None:
    for tp, rows, kernels in ((1, 1, 1), (2, 4, 1)):
        made = ends(geometry(prefill_tp=tp))
        share = made.geometry.shares()[0]
        flight = made.fly(DirectPath(device.copies()), share, [1, 2], [3, 4], connection=connection(made, share)[0])
        assert flight.posts == kernels
        (batch,) = device.begun[-1].batches
        assert batch.geometry.merged().rows == rows
        assert None not in (batch.geometry.src, batch.geometry.dst)
        assert device.begun[-1].pages.tolist() == [1, 2, 3, 4]


def test_it_takes_as_many_multiprocessors_as_it_is_told(ends: Any, geometry: Any, device: HostDevice) -> None:
    made = ends(geometry())
    share = made.geometry.shares()[0]
    for given, taken in ((None, PROGRAMS), (8, 8)):
        made.fly(DirectPath(device.copies(), given), share, [1], [1], connection=connection(made, share)[0])
        assert device.begun[-1].programs == taken


class TestFlight:
    def test_the_tag_goes_once_and_behind_the_kernel(
        self, ends: Any, geometry: Any, device: HostDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = ends(geometry())
        share = made.geometry.shares()[0]
        told: list[bytes] = []
        monkeypatch.setattr(made.here, "tell", lambda peer, tag: (made.check(), told.append(tag)))
        flight = DirectPath(device.copies()).start(connection(made, share)[0], made.order(share, [1], [1]))
        assert not flight.advance()
        assert not flight.advance()
        made.check()
        assert not told
        made.expect(share, [1], [1])
        assert flight.advance()
        assert flight.advance()
        assert told == [b"tag"]
        assert set(flight.moments()) == {"ready", "gate", "queue", "post", "wire"}

    def test_behind_a_raised_fence_it_drains_and_tells_nobody(
        self, ends: Any, geometry: Any, device: HostDevice
    ) -> None:
        made = ends(geometry())
        share = made.geometry.shares()[0]
        order = made.order(share, [1], [1])
        way, mapping = connection(made, share)
        flight = DirectPath(device.copies()).start(way, order)
        order.cancel.cancelled = True
        way.close()
        assert not flight.advance()
        assert not flight.give_up()
        assert not mapping.closed
        assert flight.give_up()
        assert mapping.closed
        assert made.tags(1, 0.05) == []

    def test_a_part_that_is_cancelled_before_its_kernel_ends_is_complete_without_a_tag(
        self, ends: Any, geometry: Any, device: HostDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = ends(geometry())
        share = made.geometry.shares()[0]
        told: list[bytes] = []
        monkeypatch.setattr(made.here, "tell", lambda peer, tag: told.append(tag))
        order = made.order(share, [1], [1])
        flight = DirectPath(device.copies()).start(connection(made, share)[0], order)
        assert not flight.advance()
        order.cancel.cancelled = True
        while not flight.advance():
            pass
        assert told == []

    def test_what_a_device_has_failed_is_never_taken_for_drained(
        self, ends: Any, geometry: Any, device: HostDevice
    ) -> None:
        made = ends(geometry())
        share = made.geometry.shares()[0]
        way, mapping = connection(made, share)
        device.fail_next = 1
        flight = DirectPath(device.copies()).start(way, made.order(share, [1], [1]))
        assert not flight.advance()
        assert not flight.advance()
        with pytest.raises(DeviceError, match="told to fail"):
            flight.advance()
        way.close()
        assert not flight.give_up()
        assert not mapping.closed

    def test_a_kernel_that_cannot_be_begun_holds_nothing(
        self, ends: Any, geometry: Any, device: HostDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = ends(geometry())
        share = made.geometry.shares()[0]
        way, mapping = connection(made, share)
        copies = device.copies()

        def refuse(*args: Any, **named: Any) -> Any:
            raise DeviceError("no more launches")

        monkeypatch.setattr(copies, "begin", refuse)
        with pytest.raises(DeviceError, match="no more launches"):
            DirectPath(copies).start(way, made.order(share, [1], [1]))
        way.close()
        assert mapping.closed


class TestMapping:
    def test_it_is_unmapped_behind_the_last_of_its_kernels(self, ends: Any, geometry: Any, device: HostDevice) -> None:
        made = ends(geometry())
        share = made.geometry.shares()[0]
        way, mapping = connection(made, share)
        paths = [DirectPath(device.copies()) for _ in range(2)]  # of two workers
        flights = [path.start(way, made.order(share, [1], [1])) for path in paths]
        way.close()
        way.close()
        with pytest.raises(PeerDisconnected, match="no longer mapped"):
            paths[0].start(way, made.order(share, [1], [1]))
        for flight in flights:
            assert not mapping.closed
            while not flight.give_up():
                pass
        assert mapping.closed

    def test_without_one_the_part_fails_and_says_why(self, ends: Any, geometry: Any, device: HostDevice) -> None:
        made = ends(geometry())
        share = made.geometry.shares()[0]
        theirs = made.readers[0].addresses()
        way = PeerConnection("reader", made.here, made.writers[0], theirs, 0, why_not="reader's pool is host memory")
        with pytest.raises(TransportError, match=r"no direct path to reader \(auto .*\): reader's pool is host memory"):
            DirectPath(device.copies()).start(way, made.order(share, [1], [1]))

    def test_a_lane_refuses_one_that_does_not_cover_the_pool(self, ends: Any, geometry: Any) -> None:
        made = ends(geometry())
        (export,) = exports(made.readers[0])
        middle = export.nbytes // 2
        theirs = made.readers[0].addresses()
        for short in ([export._replace(nbytes=middle)], [export._replace(addr=export.addr + middle)]):
            with pytest.raises(DeviceError, match="lies in nothing"):
                PeerConnection(
                    "reader", made.here, made.writers[0], theirs, 0, MappedMemory(HostMapping(short, "nvlink"))
                )

    def test_a_lost_device_keeps_nobody_from_letting_go(
        self, ends: Any, geometry: Any, device: HostDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mapping = MappedMemory(HostMapping([], "nvlink"))

        def refuse(self: HostMapping) -> None:
            raise DeviceError("an illegal address was met")

        monkeypatch.setattr(HostMapping, "close", refuse)
        mapping.acquire()
        mapping.close()
        mapping.release()
        assert mapping.users == 0
        MappedMemory(HostMapping([], "nvlink")).close()


class TestRefusals:
    @pytest.mark.parametrize(("src", "dst"), [([40], [1]), ([1], [40]), ([-1], [1]), ([1], [-1])])
    def test_a_page_outside_the_pool_never_reaches_a_kernel(
        self, ends: Any, geometry: Any, device: HostDevice, src: list[int], dst: list[int]
    ) -> None:
        made = ends(geometry())
        share = made.geometry.shares()[0]
        with pytest.raises(MemoryLayoutError, match=r"kv: pages .* are not all in the (local|peer.s) pool of 40"):
            DirectPath(device.copies()).start(connection(made, share)[0], made.order(share, src, dst))
        assert not device.begun

    def test_layers_that_one_side_does_not_have(self, ends: Any, geometry: Any, device: HostDevice) -> None:
        made = ends(geometry(prefill=ParallelConfig(pp=3), decode=ParallelConfig()))
        share = made.geometry.shares()[1]
        with pytest.raises(MemoryLayoutError, match="kv: layers 0-1 are not all on"):
            DirectPath(device.copies()).start(connection(made, share)[0], made.order(share, [1], [1], (0, 2)))

    def test_a_rank_that_owes_nothing(self, ends: Any, geometry: Any, device: HostDevice) -> None:
        made = ends(geometry())
        way = connection(made, made.geometry.shares()[0])[0]
        with pytest.raises(MemoryLayoutError, match="has no heads to send"):
            DirectPath(device.copies()).start(way, made.order(None, [1], [1]))


def test_building_a_launch_costs_microseconds(ends: Any, geometry: Any, engine: str, at_best: Any) -> None:
    """The limit is far above the usual time, and far below that of building a table per part: 80 layers of 64 pages."""

    class Never:
        def done(self) -> bool:
            return False

    class Nowhere:
        def begin(self, batches: Any, pages: Any, after: Any = None, programs: Any = None) -> Never:
            return Never()

    made = ends(geometry(layers=80, pages=70, prefill_tp=4))
    share = made.geometry.shares()[0]
    way, path = connection(made, share)[0], DirectPath(Nowhere())  # type: ignore[arg-type]
    order = made.order(share, np.arange(64), np.arange(64)[::-1])
    at_best(lambda: min(timeit.repeat(lambda: path.start(way, order), number=100, repeat=20)) / 100, 100e-6)
