"""Arrivals: the loop hears tags soon while bytes are expected, costs little otherwise, and outlives anything."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvctl_agent.errors import TransportError
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord, local_shards
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.allocations import RingMemory
from kvctl_agent.memory.checksum import part_checksum
from kvctl_agent.memory.copier import Copier
from kvctl_agent.memory.device_copier import DeviceCopier
from kvctl_agent.memory.part_layout import PartLayout
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.segment import RowIndex
from kvctl_agent.parts import checksums_of
from kvctl_agent.protocol.events import Arrived, Check, Checked, Scatter, Scattered, ScatterFailed, StoreAux
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag
from kvctl_agent.runtime.arrivals import Arrivals
from kvctl_agent.runtime.waiting import turns_of_loop
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.region import Cell
from kvctl_agent.transport.base import Arrival, Waited
from tests.support.driven_task import DrivenTask
from tests.support.folded import folded
from tests.support.host_device import HostDevice, at
from tests.support.numpy_copier import NumpyCopier, gather_piece
from tests.support.polling import until

AtBest = Callable[[Callable[[], float], float], None]
SHAPE = ModelShape(num_layers=4, num_kv_heads=4, k_dim=8, v_dim=6, dtype_bytes=2)
KEY = PartKey(0, 0, 1, 3)
TAG = Tag(PartKind.KV, 5, 7, 9, 11, KEY)


class Tags:
    """Stands for a transport: gives what the test puts in, and counts how often it was asked."""

    def __init__(self) -> None:
        self.waiting: list[bytes] = []
        self.error: Exception | None = None
        self.asked = 0

    def arrivals(self) -> list[Arrival]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        tags, self.waiting = self.waiting, []
        return [Arrival("prefill-0", tag) for tag in tags]

    def wait_for_tags(self, polled: Any, turns: Any, timeout_s: float, pause_s: float) -> Waited:
        if self.error is not None:
            raise self.error
        tags, self.waiting = self.waiting, []
        return Waited(round(timeout_s * 1e9), [Arrival("prefill-0", tag) for tag in tags])


class Rig:
    def __init__(
        self,
        telemetry: Telemetry,
        device: HostDevice | None = None,
        compile_checksums: bool = False,
        few_cores: bool = False,
    ) -> None:
        self.tags = Tags()
        self.pool = KVPool.allocate(
            local_shards(SHAPE, 4, ParallelConfig(), RankCoord(0, 0, 0, 0)),
            4,
            16,
            aux_slots=4,
            aux_row_bytes=8,
            device=device,
        )
        self.ring = RingMemory(1 << 20, device)
        self.copier: Copier = NumpyCopier() if device is None else DeviceCopier(device.copies())
        self.reported: Queue[Any] = Queue()
        self.rooms = 0
        self.splits: set[int] = set()
        self.arrivals = Arrivals(
            self.tags,  # type: ignore[arg-type]
            self.pool,
            self.ring,
            self.copier,
            checksums_of(self.pool, self.copier),
            lambda *events: [self.reported.put(event) for event in events],
            lambda: self.rooms,
            telemetry,
            lambda: self.splits,
            compile_checksums,
            few_cores,
        )
        self.loop = DrivenTask(self.arrivals)

    def expect(self, rooms: int) -> None:
        """Sets the number of open rooms; in an agent the message that opens one wakes the loop."""
        self.rooms = rooms
        self.loop.wake()

    def report(self, timeout_s: float = 60.0) -> Any:
        return self.reported.get(timeout=timeout_s)

    def looks(self, seconds: float) -> float:
        """How often a second it looks."""
        before, since = self.tags.asked, time.monotonic()
        time.sleep(seconds)
        return (self.tags.asked - before) / (time.monotonic() - since)


@pytest.fixture
def rig(telemetry: Telemetry) -> Iterator[Rig]:
    with running(Rig(telemetry)) as rig:
        yield rig


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


@pytest.fixture
def on_device(telemetry: Telemetry, device: HostDevice) -> Iterator[Rig]:
    with running(Rig(telemetry, device)) as rig:
        yield rig


@contextmanager
def running(rig: Rig) -> Iterator[Rig]:
    rig.loop.start()
    yield rig
    assert rig.loop.close(60)
    rig.copier.close()
    rig.ring.close()
    rig.pool.close()


def scatter(offset: int = 512, pages: Any = (3, 9), heads: int = 2, lo: int = 1, hi: int = 3) -> Scatter:
    share = TransferSlice(0, 0, 0, 0, 2, heads, 0, 4, 2, 4, 4 * (16 + 12))
    key = PartKey(0, 0, lo, hi)
    return Scatter(21, offset, key, share, np.array(pages, np.int32), 7, 9, time.monotonic_ns())


def test_a_tag_is_reported_with_its_moment(rig: Rig) -> None:
    before = time.monotonic_ns()
    rig.tags.waiting = [TAG.pack(), TAG._replace(serial=12).pack()]
    first, second = rig.report(), rig.report()
    assert (first.tag, second.tag.serial) == (TAG, 12)
    assert before <= first.at_ns <= time.monotonic_ns()


def test_a_copy_that_does_not_end_is_told_of(rig: Rig, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()
    copy = rig.copier.scatter

    def slow(landed: Any) -> Any:
        entered.set()
        assert go_on.wait(60), "the test did not let the copy go on within 60 s"
        return copy(landed)

    monkeypatch.setattr(rig.copier, "scatter", slow)
    before = time.monotonic_ns()
    rig.loop.put(scatter())
    assert entered.wait(60), "no copy was begun within 60 s"
    turn_ns = telemetry.region.cells[Cell.ARRIVAL_TURN_NS]
    assert before <= telemetry.region.cells[Cell.COPYING_SINCE_NS] <= time.monotonic_ns()
    time.sleep(0.05)
    assert telemetry.region.cells[Cell.ARRIVAL_TURN_NS] == turn_ns  # it makes no turn meanwhile
    go_on.set()
    assert rig.report().serial == 21
    until(lambda: not telemetry.region.cells[Cell.COPYING_SINCE_NS], "the copy was not taken for ended within 60 s")


@pytest.mark.parametrize("garbage", [b"x", bytes(49), TAG.pack() + b"!"])
def test_garbage_is_counted_and_spoils_nothing(rig: Rig, telemetry: Telemetry, garbage: bytes) -> None:
    rig.tags.waiting = [garbage, TAG.pack()]
    assert rig.report().tag == TAG
    assert telemetry.metrics.total("kvctl_tags_dropped_total", "malformed") == 1


def test_it_looks_often_while_bytes_are_expected_and_seldom_otherwise(rig: Rig) -> None:
    for _ in range(10):  # a busy machine may let it look less often than it would
        seldom = rig.looks(0.3)
        rig.expect(1)
        often = rig.looks(0.3)
        rig.expect(0)
        again = rig.looks(0.3)
        assert seldom < 250
        assert again < 250
        if often > 2 * max(seldom, again):
            return
    pytest.fail(f"{often:.0f} looks a second while bytes are expected, {seldom:.0f} and {again:.0f} otherwise")


@pytest.mark.parametrize(("few_cores", "rooms", "pause_s"), [(False, 1, 50e-6), (False, 9, 50e-6), (True, 9, 400e-6)])
def test_after_a_long_silence_it_looks_often_again_once_bytes_are_about_to_come(
    telemetry: Telemetry, few_cores: bool, rooms: int, pause_s: float
) -> None:
    rig = Rig(telemetry, few_cores=few_cores)  # its loop does not run
    rig.rooms = rooms
    time.sleep(0.02)
    assert rig.arrivals.wait_s() == pytest.approx(1e-3)
    for _ in range(10):  # a busy machine may let a moment pass between the two calls
        rig.arrivals.expect()
        if (wait_s := rig.arrivals.wait_s()) == pytest.approx(pause_s):
            break
    else:
        pytest.fail(f"it looks again after {wait_s * 1e6:.0f} µs")
    rig.copier.close()
    rig.ring.close()
    rig.pool.close()


def test_the_transport_may_look_for_tags_while_nothing_else_is_due(
    telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(telemetry)  # its loop does not run

    def waits() -> bool:
        return rig.arrivals.wait(None, turns_of_loop(), 0.1, 0.1) is not None  # type: ignore[arg-type]

    now_ns = 10**12
    monkeypatch.setattr(
        "kvctl_agent.runtime.arrivals.time",
        SimpleNamespace(monotonic=lambda: now_ns / 1e9, monotonic_ns=lambda: now_ns),
    )
    assert waits()
    rig.arrivals.put(scatter())
    assert not waits()
    rig.arrivals.turn()
    assert waits()
    rig.arrivals.turn()
    for fail in (rig.arrivals.turn, waits):
        rig.tags.error = TransportError("broken")
        assert not fail()
        rig.tags.error = None
        assert not waits()  # the transport would fail at once again
        now_ns += 30_000_000
        assert waits()
    assert telemetry.metrics.total("kvctl_transport_errors_total") == 2
    rig.copier.close()
    rig.ring.close()
    rig.pool.close()


def test_a_turn_reports_what_the_wait_before_it_has_found_and_looks_only_without_one(telemetry: Telemetry) -> None:
    rig = Rig(telemetry)  # its loop does not run
    rig.tags.waiting = [TAG.pack()]
    rig.arrivals.wait(None, turns_of_loop(), 0.1, 0.1)  # type: ignore[arg-type]
    rig.tags.waiting = [TAG.pack()]
    rig.arrivals.turn()
    assert (rig.reported.qsize(), rig.tags.asked) == (1, 0)
    rig.arrivals.turn()  # the second round of the loop's turn
    assert (rig.reported.qsize(), rig.tags.asked) == (2, 1)
    rig.copier.close()
    rig.ring.close()
    rig.pool.close()


def test_expecting_wakes_it_from_its_long_pause(rig: Rig, at_best: AtBest) -> None:
    def usual_s() -> float:
        waits: list[float] = []
        for _ in range(9):
            rig.expect(0)
            time.sleep(0.012)
            rig.tags.waiting = [TAG.pack()]
            since = time.monotonic()
            rig.expect(1)
            rig.report()
            waits.append(time.monotonic() - since)
        return statistics.median(waits)

    at_best(usual_s, 0.0025)


class TestScatter:
    @pytest.mark.parametrize("where", ["rig", "on_device"])
    def test_a_landed_part_is_copied_to_exactly_its_pages(self, where: str, request: pytest.FixtureRequest) -> None:
        rig: Rig = request.getfixturevalue(where)
        source = KVPool.allocate(local_shards(SHAPE, 4, ParallelConfig(tp=2), RankCoord(0, 0, 0, 0)), 4, 16)
        random = np.random.default_rng(1)
        for layer in range(4):
            for block in source.segments[0].blocks[layer]:
                block.array()[:] = random.integers(0, 256, block.nbytes, np.uint8)
        part = PartLayout(1, 2, 2, (4 * 2 * 16, 4 * 2 * 12))
        region = at(rig.ring.addr + 512, part.region_bytes)
        for piece in part.pieces():
            gather_piece(piece, RowIndex(source.segments[0], np.array([5, 2], np.int32), 0, 2), region[piece.offset :])
        rig.loop.put(scatter())
        done = rig.report()
        assert isinstance(done, Scattered)
        assert done.serial == 21
        for layer in range(4):
            for kv, dim in ((0, 16), (1, 12)):
                got = rig.pool.segments[0].block(layer, kv).reshape(16, 4, 4, dim)
                wanted = np.zeros_like(got)
                if 1 <= layer < 3:
                    wanted[[3, 9], :, 2:4] = source.segments[0].block(layer, kv).reshape(16, 4, 2, dim)[[5, 2]]
                assert np.array_equal(got, wanted)
        source.close()

    @pytest.mark.parametrize(
        "wrong", [scatter(offset=1 << 20), scatter(pages=(99,)), scatter(heads=3), scatter(lo=3, hi=9)]
    )
    def test_an_order_that_does_not_fit_is_recorded_and_the_loop_goes_on(
        self, rig: Rig, telemetry: Telemetry, wrong: Scatter
    ) -> None:
        rig.loop.put(wrong)
        rig.loop.put(scatter())
        assert rig.report().serial == 21
        errors = [row for row in folded(telemetry).recorder.since(None, 100)["events"] if row["severity"] == "error"]
        assert [(row["kind"], row["room"]) for row in errors] == [("scatter", "7")]

    def test_a_part_in_its_pages_is_compared_on_the_loop(self, rig: Rig, telemetry: Telemetry) -> None:
        order = scatter()
        pages = np.array([3, 9], np.int32)
        rig.loop.put(Check(7, 9, PartKind.KV, order.key, order.share, np.array([99], np.int32)))  # no such page
        rig.loop.put(Check(7, 9, PartKind.KV, order.key, order.share, pages))
        failed, found = rig.report(), rig.report()
        assert failed.found is None
        assert "page 99 is outside the pool" in failed.text
        assert isinstance(found, Checked)
        assert (found.room, found.nonce, found.kind, found.key) == (7, 9, PartKind.KV, order.key)
        assert found.found == part_checksum(rig.pool, order.share, pages, 2, 1, 3)
        errors = [row for row in folded(telemetry).recorder.since(None, 100)["events"] if row["severity"] == "error"]
        assert [(row["kind"], row["room"]) for row in errors] == [("check", "7")]


class TestOnADevice:
    def test_parts_that_wait_together_are_one_launch(self, telemetry: Telemetry, device: HostDevice) -> None:
        rig = Rig(telemetry, device)
        for number in range(5):
            rig.loop.put(replace(scatter(offset=number << 12), serial=number))
        with running(rig):
            assert [rig.report().serial for _ in range(5)] == [0, 1, 2, 3, 4]
        assert len(device.begun) == 1

    def test_tags_are_heard_while_a_copy_takes_its_time(self, telemetry: Telemetry, device: HostDevice) -> None:
        device.slow = 1 << 60
        rig = Rig(telemetry, device)
        rig.loop.put(scatter())
        with running(rig):
            while not device.begun:
                time.sleep(0.001)
            rig.tags.waiting = [TAG.pack()]
            assert type(rig.report()) is Arrived
            for stream in device.streams:
                stream.run_to(None)
            assert type(rig.report()) is Scattered

    def test_a_copy_that_fails_is_told_and_recorded(
        self, on_device: Rig, device: HostDevice, telemetry: Telemetry
    ) -> None:
        device.fail_next = 1
        on_device.loop.put(scatter())
        failed = on_device.report()
        assert isinstance(failed, ScatterFailed)
        assert failed.serial == 21
        assert "told to fail" in failed.text
        on_device.loop.put(replace(scatter(), serial=22))
        assert on_device.report().serial == 22
        errors = [row for row in folded(telemetry).recorder.since(None, 100)["events"] if row["severity"] == "error"]
        assert [(row["kind"], row["room"]) for row in errors] == [("scatter", "7")]

    def test_one_that_does_not_fit_spoils_no_other(self, telemetry: Telemetry, device: HostDevice) -> None:
        rig = Rig(telemetry, device)
        for order in (scatter(pages=(99,)), scatter()):
            rig.loop.put(order)
        with running(rig):
            assert rig.report().serial == 21
        assert len(device.begun) == 1

    def test_what_writers_can_send_is_compiled_before_the_first_room(self, on_device: Rig, device: HostDevice) -> None:
        deadline = time.monotonic() + 60
        widths = {heads * head_bytes for heads in (1, 2) for head_bytes in (16, 12)}
        while not widths <= {geometry.heads * geometry.width for geometry in device.prepared}:
            assert time.monotonic() < deadline, device.prepared
            time.sleep(0.001)
        assert all(geometry.src is None and geometry.dst is not None for geometry in device.prepared)

    def test_kernels_of_transfer_pages_are_compiled_once_a_plan_has_them(
        self, on_device: Rig, device: HostDevice
    ) -> None:
        on_device.splits = {2}
        deadline = time.monotonic() + 60
        while not {(4, 1), (2, 2)} <= {(each.rows, each.dst.split) for each in device.prepared if each.dst}:
            assert time.monotonic() < deadline, device.prepared
            time.sleep(0.001)

    @pytest.mark.parametrize("late", [False, True])
    def test_a_bug_in_a_copy_is_told_too(self, telemetry: Telemetry, device: HostDevice, late: bool) -> None:
        """Of parts that go together, of many rooms: none of them is left in the ring for ever."""
        rig = Rig(telemetry, device)
        begin = rig.copier.scatter

        def broken(landed: Any) -> Any:
            work: Any = begin(landed) if late else 1 // 0
            work.done = lambda: 1 // 0
            return work

        rig.copier.scatter = broken  # type: ignore[method-assign]
        for number in range(3):
            rig.loop.put(replace(scatter(offset=number << 12), serial=number))
        with running(rig):
            assert [type(rig.report()) for _ in range(3)] == [ScatterFailed] * 3

    def test_a_kernel_that_cannot_be_prepared_does_not_end_the_loop(
        self, telemetry: Telemetry, device: HostDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = threading.Event()

        def broken(*arguments: Any) -> None:
            asked.set()
            raise RuntimeError("a bug of the compiler's")

        monkeypatch.setattr(DeviceCopier, "prepare", broken)
        rig = Rig(telemetry, device)
        with running(rig):
            assert asked.wait(60)
            rig.tags.waiting = [TAG.pack()]
            assert isinstance(rig.report(), Arrived)

    def test_a_checksum_that_fails_is_told(self, on_device: Rig, device: HostDevice) -> None:
        order, pages = scatter(), np.array([3, 9], np.int32)
        device.fail_next = 1
        for _ in range(2):
            on_device.loop.put(Check(7, 9, PartKind.KV, order.key, order.share, pages))
        failed, found = on_device.report(), on_device.report()
        assert (failed.found, failed.text) == (None, "the stand-in device was told to fail this copy")
        assert found.found is not None

    def test_close_waits_for_what_was_begun(self, telemetry: Telemetry, device: HostDevice) -> None:
        device.slow = 200
        rig = Rig(telemetry, device)
        rig.loop.put(scatter())
        rig.loop.start()
        while not device.begun:
            time.sleep(0.001)
        assert rig.loop.close(60)
        assert isinstance(rig.report(), Scattered)
        for closing in (rig.copier, rig.ring, rig.pool):
            closing.close()


@pytest.mark.parametrize("error", [TransportError("the engine broke"), RuntimeError("a bug")])
def test_an_engine_that_fails_to_answer_is_recorded_and_asked_again(
    rig: Rig, telemetry: Telemetry, error: Exception
) -> None:
    rig.tags.error = error
    until(lambda: telemetry.metrics.total("kvctl_transport_errors_total"), "the error is not counted")
    rig.tags.waiting, rig.tags.error = [TAG.pack()], None
    assert isinstance(rig.report(), Arrived)
    texts = {row["text"] for row in folded(telemetry).recorder.since(None, 1000)["events"]}
    assert any(str(error) in text for text in texts)


def test_a_failing_engine_does_not_flood_the_recorder(rig: Rig, telemetry: Telemetry) -> None:
    rig.expect(1)
    since, asked = time.monotonic(), rig.tags.asked
    rig.tags.error = TransportError("the engine broke")
    while rig.tags.asked < asked + 20:
        assert time.monotonic() < since + 60, "it is not asked again"
        time.sleep(0.01)
    assert len(folded(telemetry).recorder.since(None, 1000)["events"]) <= 2 + time.monotonic() - since
    rig.tags.error = None


def test_a_row_that_came_in_its_tag_is_in_its_slot_when_the_call_returns(telemetry: Telemetry) -> None:
    rig = Rig(telemetry)
    (aux,) = rig.pool.aux
    rig.arrivals.store_aux(StoreAux(2, bytes(range(8))))
    assert aux[2].tolist() == list(range(8))
    assert not aux[[0, 1, 3]].any()
