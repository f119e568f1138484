"""Transfers: orders become flights, and nothing that a peer or an engine does stops the others.

The paths here are stand-ins whose flights end when the test says so; real ones are tested with the agent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import ANY

import numpy as np
import pytest

from kvctl_agent.errors import DeviceError, MemoryLayoutError, PeerDisconnected, TransportError
from kvctl_agent.layout.plan import TransferSlice
from kvctl_agent.paths.base import Flight
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.protocol.events import Event, PartFailed, PartSent, Transfer
from kvctl_agent.protocol.peer import CancelToken, Lease
from kvctl_agent.protocol.tag import PartKey, PartKind, Tag
from kvctl_agent.runtime.transfers import Transfers
from kvctl_agent.runtime.waiting import PolledDescriptors, turns_of_loop
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.transport.base import Waited
from tests.support.driven_task import DrivenTask
from tests.support.host_device import HostEvent
from tests.support.polling import until

AtBest = Callable[[Callable[[], float], float], None]
NONE = np.empty(0, np.int32)
TAG = Tag(PartKind.KV, 1, 2, 3, 0, PartKey(0, 0, 0, 2)).pack()
SHARE = TransferSlice(0, 0, 0, 1, 0, 2, 0, 2, 4, 4, 64)


NO_DESCRIPTORS = PolledDescriptors(()).polled


class Wire:
    """What the test decides about the flights of one peer."""

    def __init__(self) -> None:
        self.done = True
        self.error: Exception | None = None
        self.start_error: Exception | None = None
        self.drained: bool | None = True  # None: nobody can tell
        self.row: bytes | None = None
        self.started: list[int] = []
        self.threads: set[str] = set()


class StandInFlight(Flight):
    def __init__(self, connection: Any, order: Transfer, wire: Wire) -> None:
        super().__init__(connection, order, time.monotonic_ns())
        self.wire = wire
        self.posts, self.descriptors, self.row = 1, 3, wire.row

    def advance(self) -> bool:
        self.wire.threads.add(threading.current_thread().name)
        if self.wire.error is not None:
            raise self.wire.error
        return self.wire.done

    def give_up(self) -> bool:
        if self.wire.drained is None:
            raise DeviceError("the device is gone")
        return self.wire.drained


class Bench:
    """Transfers, their peers' wires, and what they reported."""

    def __init__(
        self,
        telemetry: Telemetry,
        on_device: bool = False,
        checksums: Any = None,
        *,
        many: bool = False,
        **options: Any,
    ) -> None:
        self.wires: dict[str, Wire] = {name: Wire() for name in ("good", "bad", "third")}
        self.reported: Queue[Event] = Queue()
        self.progressed = 0
        self.slow_s = 0.0  # that a start takes
        connections = {name: cast(PeerConnection, SimpleNamespace(peer=name, wire_times_ns=[])) for name in self.wires}
        paths, report = {"bulk": self, "staged": self}, self.reported.put
        self.transfers = Transfers(
            paths,
            self,
            connections,
            self.progress,
            report,
            lambda: self.loop.wake(),
            telemetry,
            many=many,
            on_device=on_device,
            checksums=checksums,
            **options,
        )
        self.loop = DrivenTask(self.transfers)

    def progress(self) -> None:
        self.progressed += 1

    def start(self, connection: PeerConnection, order: Transfer) -> Flight:
        """The one path."""
        if self.slow_s:
            time.sleep(self.slow_s)
        wire = self.wires[connection.peer]
        if wire.start_error is not None:
            raise wire.start_error
        wire.started.append(order.room)
        return StandInFlight(connection, order, wire)

    def order(
        self,
        peer: str,
        room: int,
        cancel: CancelToken | None = None,
        kind: PartKind = PartKind.KV,
        share: TransferSlice | None = None,
    ) -> CancelToken:
        cancel = cancel or CancelToken(Lease(1 << 62))
        key = PartKey(0, 0, 0, 2)
        order = Transfer(peer, room, 1, kind, key, "bulk", share, NONE, NONE, None, TAG, cancel, time.monotonic_ns(), 0)
        self.loop.put(order)
        return cancel

    def report(self, timeout_s: float = 60.0) -> Any:
        return self.reported.get(timeout=timeout_s)

    def nothing_reported(self) -> bool:
        try:
            self.reported.get(timeout=0.05)
        except Empty:
            return True
        return False


@pytest.fixture
def bench(telemetry: Telemetry) -> Iterator[Bench]:
    bench = Bench(telemetry)
    bench.loop.start()
    yield bench
    assert bench.loop.close(60)


@pytest.fixture
def on_device(telemetry: Telemetry) -> Iterator[Bench]:
    bench = Bench(telemetry, on_device=True)
    bench.loop.start()
    yield bench
    assert bench.loop.close(60)


def test_a_part_is_reported_with_its_moments_and_counted(bench: Bench, telemetry: Telemetry) -> None:
    before = time.monotonic_ns()
    bench.order("good", 1)
    sent = bench.report()
    assert isinstance(sent, PartSent)
    assert (sent.peer, sent.room, sent.dropped) == ("good", 1, False)
    moments = list(sent.moments.values())
    assert list(sent.moments) == ["ready", "gate", "queue", "post", "wire"]  # nothing was gathered
    assert moments == sorted(moments)
    assert before <= moments[0]
    assert moments[-1] <= time.monotonic_ns()
    for metric, count in (("kvctl_writes_total", 1), ("kvctl_descriptors_total", 3), ("kvctl_engine_posts_total", 1)):
        assert telemetry.metrics.total(metric, "bulk") == count


def test_a_row_sent_in_its_tag_is_reported_so_that_it_can_be_sent_again(bench: Bench) -> None:
    bench.wires["good"].row = b"row"
    bench.order("good", 1, kind=PartKind.AUX)
    assert bench.report().row == b"row"


def test_aux_rows_are_no_parts_in_the_counters(bench: Bench, telemetry: Telemetry) -> None:
    bench.order("good", 1, kind=PartKind.AUX)
    assert bench.report().kind is PartKind.AUX
    assert telemetry.metrics.total("kvctl_writes_total") == 0


@pytest.mark.parametrize("many", [False, True])
def test_with_cores_to_spare_a_part_begins_before_the_next_turn(telemetry: Telemetry, many: bool) -> None:
    bench = Bench(telemetry, many=many)  # whose loop makes no turns
    bench.order("good", 0)
    assert bench.wires["good"].started == ([0] if many else [])
    bench.transfers.turn()
    assert bench.wires["good"].started == [0]
    assert bench.reported.get_nowait() == PartSent("good", 0, 1, PartKind.KV, PartKey(0, 0, 0, 2), ANY, row=None)


def test_parts_begun_since_the_last_turn_count_for_the_time_that_a_turn_may_take(telemetry: Telemetry) -> None:
    bench = Bench(telemetry, many=True)
    bench.slow_s = 0.3e-3
    for room in range(3):
        bench.order("good", room)
    assert bench.wires["good"].started == [0]
    bench.transfers.turn()
    assert bench.wires["good"].started == [0]
    assert bench.transfers.wait_s() == 0.0
    bench.transfers.turn()
    assert bench.wires["good"].started == [0, 1]


@pytest.mark.parametrize("stuck", [1, 4, 20])
def test_a_stopped_peer_holds_up_nobody_else(bench: Bench, stuck: int) -> None:
    bench.wires["bad"].done = False
    cancel_tokens = [bench.order("bad", room) for room in range(stuck)]
    for room in range(100, 130):
        bench.order("good", room)
    assert [bench.report().room for _ in range(30)] == list(range(100, 130))
    # And when it goes on, so do its parts.
    bench.wires["bad"].done = True
    assert sorted(bench.report().room for _ in range(stuck)) == list(range(stuck))
    assert not any(cancel.cancelled for cancel in cancel_tokens)


def test_a_stopped_peer_gets_no_more_parts_until_it_goes_on(bench: Bench) -> None:
    """Each part that is begun takes staging buffers with it."""
    wire = bench.wires["bad"]
    wire.done = False
    for room in range(3):
        bench.order("bad", room)
    bench.order("good", 99)
    assert bench.report().room == 99
    time.sleep(0.1)
    cancel_tokens = [bench.order("bad", room) for room in range(3, 40)]
    for room in range(100, 110):
        bench.order("good", room)
    assert [bench.report().room for _ in range(10)] == list(range(100, 110))
    assert wire.started == [0, 1, 2]
    # One that is given up meanwhile is reported, as its room waits for that.
    cancel_tokens[20].cancelled = True
    dropped = bench.report()
    assert (dropped.room, dropped.dropped) == (23, True)
    wire.done = True
    rooms = [bench.report().room for _ in range(39)]
    assert sorted(rooms) == [room for room in range(40) if room != 23]
    assert wire.started == [room for room in range(40) if room != 23]


def test_waiting_costs_little(bench: Bench, at_best: AtBest) -> None:
    bench.wires["bad"].done = False
    cancel = bench.order("bad", 1)
    time.sleep(0.1)

    def share() -> float:
        cpu, since = time.process_time(), time.monotonic()
        time.sleep(0.5)
        return (time.process_time() - cpu) / (time.monotonic() - since)

    at_best(share, 0.25)
    cancel.cancelled = True
    assert bench.report().dropped


class TestFence:
    def test_a_queued_part_behind_a_raised_fence_is_dropped_unbegun(self, bench: Bench) -> None:
        cancel = CancelToken(Lease(1 << 62))
        cancel.cancelled = True
        bench.order("good", 1, cancel)
        assert bench.report().dropped
        assert bench.wires["good"].started == []

    def test_after_a_recall_queued_parts_are_dropped_and_parts_in_flight_are_finished(self, bench: Bench) -> None:
        wire = bench.wires["bad"]
        wire.done = wire.drained = False
        cancel = bench.order("bad", 1)
        while not wire.started:
            time.sleep(0.001)
        cancel.recalled = True
        bench.order("bad", 2, cancel)
        over = bench.report()
        assert (over.room, over.dropped) == (2, True)
        assert bench.nothing_reported()
        wire.done = True
        over = bench.report()
        assert (over.room, over.dropped) == (1, False)
        assert wire.started == [1]

    def test_a_part_in_flight_is_reported_over_only_when_the_engine_lets_go(self, bench: Bench) -> None:
        wire = bench.wires["bad"]
        wire.done = wire.drained = False
        cancel = bench.order("bad", 1)
        while not wire.started:
            time.sleep(0.001)
        cancel.cancelled = True
        assert bench.nothing_reported()
        bench.order("good", 2)
        assert bench.report().room == 2
        wire.drained = True
        over = bench.report()
        assert (over.room, over.dropped) == (1, True)

    def test_a_part_that_was_complete_when_the_fence_rose_is_over_at_once(self, bench: Bench) -> None:
        cancel = CancelToken(Lease(1 << 62))
        gate = threading.Event()
        bench.transfers.run_between(lambda: gate.wait(60))  # type: ignore[arg-type, return-value]
        bench.order("good", 1, cancel)
        cancel.cancelled = True
        gate.set()
        assert bench.report().dropped


class TestLease:
    """A process that was frozen, and goes on, posts nothing to peers that it has not heard of since."""

    def test_nothing_is_begun_without_one_until_it_is_renewed(self, bench: Bench) -> None:
        cancel = CancelToken(Lease(60_000_000_000))  # renewed at the boot of the machine
        bench.order("good", 1, cancel)
        assert bench.nothing_reported()
        bench.order("third", 2)
        assert bench.report().room == 2, "nobody else waits for it"
        assert bench.wires["good"].started == []
        cancel.lease.renewed_ns = time.monotonic_ns()
        assert (bench.report().room, bench.wires["good"].started) == (1, [1])

    def test_what_waits_for_one_is_dropped_when_its_room_fails(self, bench: Bench) -> None:
        cancel = CancelToken(Lease(1))
        bench.order("good", 1, cancel)
        assert bench.nothing_reported()
        cancel.cancelled = True
        assert bench.report().dropped
        assert bench.wires["good"].started == []


class TestOnADevice:
    @pytest.mark.parametrize(("after_s", "late_s"), [(0.0005, 60e-6), (0.004, 200e-6)])
    def test_the_end_of_a_part_is_seen_soon(
        self, on_device: Bench, at_best: AtBest, after_s: float, late_s: float
    ) -> None:
        def late() -> float:
            wire = on_device.wires["good"]
            wire.done = False
            on_device.order("good", 1)
            time.sleep(after_s)
            ended_ns, wire.done = time.monotonic_ns(), True
            return float(on_device.report().moments["wire"] - ended_ns) / 1e9

        at_best(late, late_s)

    def test_one_that_does_not_end_costs_little(self, on_device: Bench, at_best: AtBest) -> None:
        on_device.wires["bad"].done = False
        on_device.order("bad", 1)
        time.sleep(0.05)

        def used() -> float:
            before = time.process_time()
            time.sleep(0.1)
            return time.process_time() - before

        at_best(used, 0.02)
        on_device.wires["bad"].done = True
        on_device.report()


class TestFailure:
    def test_an_engine_error_fails_the_part_with_its_text(self, bench: Bench, telemetry: Telemetry) -> None:
        bench.wires["bad"].error = TransportError("nixl: the connection broke")
        bench.order("bad", 1)
        failed = bench.report()
        assert isinstance(failed, PartFailed)
        assert (failed.code, failed.in_flight) == ("KV_TRANSPORT", False)
        assert failed.text == "writer 0 chunk 0 layers 0-1 to bad by bulk: nixl: the connection broke"
        assert telemetry.metrics.total("kvctl_transport_errors_total") == 1
        assert bench.nothing_reported()

    def test_a_peer_that_the_engine_finds_gone_is_a_lost_peer(self, bench: Bench, telemetry: Telemetry) -> None:
        bench.wires["bad"].error = PeerDisconnected("nixl: peer 'bad' is gone")
        bench.order("bad", 1)
        failed = bench.report()
        assert (failed.code, failed.text.split(": ")[-1]) == ("KV_PEER_LOST", "peer 'bad' is gone")
        assert telemetry.metrics.total("kvctl_transport_errors_total") == 1

    def test_a_device_that_fails_is_no_error_of_the_engine(self, bench: Bench, telemetry: Telemetry) -> None:
        bench.wires["bad"].error = DeviceError("an illegal address was met")
        bench.order("bad", 1)
        failed = bench.report()
        assert (failed.code, failed.text.split(": ")[1]) == ("KV_DEVICE", "an illegal address was met")
        assert telemetry.metrics.total("kvctl_transport_errors_total") == 0

    def test_what_may_still_land_is_said_and_followed_until_it_cannot(self, bench: Bench) -> None:
        wire = bench.wires["bad"]
        wire.error, wire.drained = TransportError("broken"), False
        bench.order("bad", 1)
        failed = bench.report()
        assert (type(failed), failed.in_flight) == (PartFailed, True)
        assert bench.nothing_reported()
        wire.drained = True
        over = bench.report()
        assert (type(over), over.dropped) == (PartSent, True)

    def test_an_error_of_giving_up_proves_nothing_and_costs_nobody_else(self, bench: Bench) -> None:
        wire = bench.wires["bad"]
        wire.error, wire.drained = DeviceError("an illegal address"), None
        bench.order("bad", 1)
        assert bench.report().in_flight
        bench.order("good", 2)
        assert bench.report().room == 2
        wire.drained = True
        assert bench.report().dropped

    def test_an_order_that_does_not_fit_fails(self, bench: Bench) -> None:
        bench.wires["bad"].start_error = MemoryLayoutError("its grant is smaller")
        bench.order("bad", 1)
        failed = bench.report()
        assert failed.text.endswith("its grant is smaller")
        assert not failed.in_flight

    def test_a_peer_without_a_lane_fails(self, bench: Bench) -> None:
        bench.order("stranger", 1)
        assert "no connection to stranger" in bench.report().text

    @pytest.mark.parametrize("where", ["start", "advance"])
    def test_a_bug_costs_one_part_and_not_the_loop(self, bench: Bench, where: str) -> None:
        wire = bench.wires["bad"]
        if where == "start":
            wire.start_error = IndexError("index 7 is out of bounds")
        else:
            wire.error = IndexError("index 7 is out of bounds")
        bench.order("bad", 1)
        failed = bench.report()
        assert isinstance(failed, PartFailed)
        assert "IndexError: index 7 is out of bounds" in failed.text
        bench.order("good", 2)
        assert bench.report().room == 2


class TestJobs:
    def test_a_job_runs_beside_the_loop_while_no_part_is_transferred(self, bench: Bench) -> None:
        begun, gate = threading.Event(), threading.Event()
        wire = bench.wires["bad"]
        wire.done = False
        bench.order("bad", 1)
        while not wire.started:
            time.sleep(0.001)
        bench.transfers.run_between(lambda: begun.set() or gate.wait(60))  # type: ignore[arg-type]
        bench.order("good", 2)
        assert bench.nothing_reported()
        assert not begun.is_set()
        wire.done = True
        assert bench.report().room == 1
        assert begun.wait(60)
        assert bench.nothing_reported()
        assert bench.wires["good"].started == []
        gate.set()
        assert bench.report().room == 2

    def test_a_job_that_raises_costs_only_itself(self, bench: Bench) -> None:
        bench.transfers.run_between(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        bench.order("good", 2)
        assert bench.report().room == 2


class TestClose:
    def test_what_was_queued_is_done_first(self, telemetry: Telemetry) -> None:
        bench = Bench(telemetry)
        for room in range(20):
            bench.order("good", room)
        bench.loop.start()
        assert bench.loop.close(60)
        assert [bench.report().room for _ in range(20)] == list(range(20))

    def test_a_write_that_never_ends_keeps_it_until_its_fence_is_raised(self, telemetry: Telemetry) -> None:
        bench = Bench(telemetry)
        bench.loop.start()
        wire = bench.wires["bad"]
        wire.done = wire.drained = False
        cancel = bench.order("bad", 1)
        while not wire.started:
            time.sleep(0.001)
        assert not bench.loop.close(0.1)
        cancel.cancelled = True
        assert bench.loop.close(60)


def test_without_work_it_lets_the_engine_work_often_at_first_and_seldom_later(bench: Bench) -> None:
    """A tag may still be inside an engine that has no thread of its own."""

    def looks(seconds: float) -> int:
        before = bench.progressed
        time.sleep(seconds)
        return bench.progressed - before

    for _ in range(20):  # a busy machine may let it look less often than it would, and lets us sleep longer
        bench.order("good", 1)
        bench.report()
        soon = looks(0.08)
        time.sleep(0.3)
        later = looks(0.3)
        if soon >= 5 and 1 <= later <= 5:
            return
    pytest.fail(f"{soon} looks in the first 80 ms, later {later} in 300 ms")


class TestWaits:
    """Waits in which the engine works, in place of turns of the loop."""

    def made(self, telemetry: Telemetry, found: Waited | Exception | None) -> tuple[Bench, list[tuple[float, float]]]:
        waits: list[tuple[float, float]] = []

        def wait_for_tags(polled: Any, turns: Any, timeout_s: float, pause_s: float) -> Waited | None:
            waits.append((timeout_s, pause_s))
            if isinstance(found, Exception):
                raise found
            return found

        return Bench(telemetry, True, many=True, event_query=True, wait_for_tags=wait_for_tags), waits

    def test_it_waits_while_nothing_is_in_flight(self, telemetry: Telemetry) -> None:
        bench, waits = self.made(telemetry, Waited(77, []))
        transfers = bench.transfers
        transfers.turn()
        assert transfers.wait(NO_DESCRIPTORS, turns_of_loop(), 0.1, 0.005) == 77
        assert waits == [(0.1, 0.005)]
        before = bench.progressed
        transfers.turn()  # the engine has worked in the wait
        assert bench.progressed == before
        bench.wires["good"].done = False
        bench.order("good", 1)
        transfers.turn()
        assert transfers.wait(NO_DESCRIPTORS, turns_of_loop(), 0.1, 0.005) is None
        bench.wires["good"].done = True
        transfers.turn()
        assert transfers.wait(NO_DESCRIPTORS, turns_of_loop(), 0.1, 0.005) == 77

    @pytest.mark.parametrize("error", [TransportError("broken"), ValueError("the library is not open")])
    def test_an_engine_that_fails_is_counted_and_costs_no_turn(self, telemetry: Telemetry, error: Exception) -> None:
        bench, _ = self.made(telemetry, error)
        assert bench.transfers.wait(NO_DESCRIPTORS, turns_of_loop(), 0.1, 0.005) is None
        assert telemetry.metrics.total("kvctl_transport_errors_total") == 1

    def test_flights_that_wait_for_an_event_need_no_polls(self, telemetry: Telemetry) -> None:
        bench, _ = self.made(telemetry, None)
        bench.wires["good"].done = False
        bench.order("good", 1)
        bench.transfers.turn()
        assert bench.transfers.wait_s() < 1e-3
        assert list(bench.transfers.events()) == []
        (flight,) = bench.transfers._active
        flight.event = event = HostEvent(None, lambda: None, 1, None)
        assert bench.transfers.wait_s() >= 5e-3
        assert list(bench.transfers.events()) == [event]


class StandInChecksums:
    """Checksums that are known, or fail, when the test says so."""

    def __init__(self) -> None:
        self.value = 0xC0FFEE
        self.known = False
        self.error: Exception | None = None
        self.begun: list[tuple[Any, ...]] = []

    def begin(self, *of: Any) -> StandInChecksums:
        self.begun.append(of)
        return self

    def await_begun(self) -> None:
        until(lambda: self.begun)

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.known


class TestChecksums:
    @pytest.fixture
    def checksums(self) -> StandInChecksums:
        return StandInChecksums()

    @pytest.fixture
    def bench(self, telemetry: Telemetry, checksums: StandInChecksums) -> Iterator[Bench]:
        bench = Bench(telemetry, on_device=True, checksums=checksums)
        bench.loop.start()
        yield bench
        assert bench.loop.close(60)

    def test_a_part_is_posted_with_its_checksum_when_that_is_known(
        self, bench: Bench, checksums: StandInChecksums
    ) -> None:
        bench.order("good", 1, share=SHARE)
        checksums.await_begun()
        assert bench.nothing_reported()
        assert not bench.wires["good"].started
        assert not bench.transfers.drained
        assert not bench.transfers.idle()
        assert checksums.begun == [(SHARE, NONE, 1, 0, 2, 1)]
        checksums.known = True
        bench.loop.wake()
        assert bench.report().checksum == 0xC0FFEE

    @pytest.mark.parametrize("how", ["cancelled", "recalled"])
    def test_a_part_that_is_dropped_meanwhile_is_never_posted(
        self, bench: Bench, checksums: StandInChecksums, how: str
    ) -> None:
        """It is reported when the kernel no longer reads its pages."""
        cancel = bench.order("good", 1, share=SHARE)
        checksums.await_begun()
        setattr(cancel, how, True)
        assert bench.nothing_reported()
        checksums.known = True
        assert bench.report().dropped
        assert not bench.wires["good"].started

    def test_a_part_whose_lease_expires_meanwhile_waits_and_delays_no_other(
        self, bench: Bench, checksums: StandInChecksums
    ) -> None:
        lease = Lease(1 << 62)
        for room in range(40):
            bench.order("bad", room, CancelToken(lease), share=SHARE)
        checksums.await_begun()
        lease.length_ns = 0
        checksums.known = True
        bench.order("good", 99, share=SHARE)
        assert bench.report().room == 99
        assert bench.nothing_reported()
        assert bench.wires["bad"].started == [], "no checksum was known before the lease had expired"
        lease.length_ns = 1 << 62
        for _ in range(40):
            assert bench.report().checksum == 0xC0FFEE

    def test_a_checksum_that_fails_fails_its_part(self, bench: Bench, checksums: StandInChecksums) -> None:
        checksums.error = DeviceError("the kernel faulted")
        bench.order("good", 1, share=SHARE)
        failed = bench.report()
        assert (failed.code, failed.in_flight) == ("KV_DEVICE", False)
        assert "the kernel faulted" in failed.text
        assert bench.transfers.drained
