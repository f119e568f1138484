"""Arrivals at a decode rank: polls for arrived tags, scatters landed parts and computes checksums of parts.

Transfer engines cannot wake a thread on arrival, so the loop polls: often while bytes are expected, seldom otherwise. A
poll costs about 10 µs and several ranks may share a core, so the pause grows with the time since the last arrival, or
since the last sign that bytes are about to come (`expect`). The pause adds to the writer's latency too: UCX
acknowledges a flushed write only when the reader polls. While the loop has nothing else to do, the transport may do
these polls for it without the GIL (`wait`).

Scatters run asynchronously, and the loop polls for tags meanwhile: with the shortest pauses while the latest scatter is
young, since most scatters on a GPU take less time than a longer pause would.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from kvctl_agent.device.base import PendingChecksum
from kvctl_agent.errors import DeviceError, RemoteProtocolError
from kvctl_agent.memory.allocations import RingMemory
from kvctl_agent.memory.checksum import Checksums, aux_checksum
from kvctl_agent.memory.copier import Copier, LandedPart, PendingCopy
from kvctl_agent.memory.device_copier import DeviceCopier
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.segment import RowIndex
from kvctl_agent.native import Turns
from kvctl_agent.protocol.events import Arrived, Check, Checked, Event, Scatter, Scattered, ScatterFailed, StoreAux
from kvctl_agent.protocol.tag import Tag
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.region import Cell
from kvctl_agent.transport.base import Arrival, Transport

_IDLE_S = 20e-3  # a poll costs 0.1 ms when idle: at 5 ms an idle rank took 3.5 % of a core
_SHORTEST_S = 50e-6  # with one open room; ranks that share cores poll less often with several, which wait for cores
_MANY_ROOMS = 8
_LONGEST_S = 1e-3
_SHARE_OF_SILENCE = 1 / 8
# A GPU fills a room's pages in a millisecond or two, and ranks with a GPU do not share a core.
_SHORTEST_ON_DEVICE_S = 10e-6
_SHARE_ON_DEVICE = 1 / 64
_WRITER_COUNTS = (8, 4, 2, 1)  # numbers of writers among which this rank's heads may be divided
_YOUNG_S = 200e-6
_COPYING_S = 20e-6
_BROKEN_NS = 20_000_000
_RECORD_EVERY_NS = 60_000_000_000  # an engine that stays broken must not fill the flight recorder


class _RunningScatter(NamedTuple):
    began_ns: int
    copy: PendingCopy
    orders: list[Scatter]


class _RunningCheck(NamedTuple):
    order: Check
    checksum: PendingChecksum


class Arrivals:
    """Polls the transport and executes `Scatter`, `Check` and `StoreAux` actions on the control loop's thread.

    Args:
        ring: memory of the staging ring; None if staging is off.
        copier, checksums: used by this object only.
        report: takes the events for the machine.
        open_rooms: returns the number of open rooms: without any, tags are polled for seldom.
        splits: returns the numbers of transfer pages in a page of this pool that the plans with peers have.
        compile_checksums: whether to compile the kernels of checksums before the first room.
        few_cores: whether ranks that share this host have no core to spare for polls.
    """

    def __init__(
        self,
        transport: Transport,
        pool: KVPool,
        ring: RingMemory | None,
        copier: Copier,
        checksums: Checksums,
        report: Callable[..., None],
        open_rooms: Callable[[], int],
        telemetry: Telemetry,
        splits: Callable[[], set[int]],
        compile_checksums: bool = False,
        few_cores: bool = False,
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._ring = ring
        self._copier = copier
        self._checksums = checksums
        self._report = report
        self._open_rooms = open_rooms
        self._telemetry = telemetry
        self._splits = splits
        self._compile_checksums = compile_checksums
        self._few_cores = few_cores
        self._compiled: set[int] = set()  # splits whose kernels have been or are being compiled
        self._orders: list[Scatter | Check] = []
        self._scatters: list[_RunningScatter] = []
        self._checks: list[_RunningCheck] = []
        self._scatter_began_s = 0.0  # start of the latest scatter
        self._active_s = time.monotonic()  # time of the last arrival, order or `expect`
        self._record_ns = 0
        self._poll_again_ns = 0
        self._found: list[Arrival] = []  # in the wait before this turn
        self._looked = False  # for tags, in that wait

    def put(self, order: Scatter | Check) -> None:
        """Queues an action for the next turn."""
        self._orders.append(order)

    def expect(self) -> None:
        """Takes note that a writer has accepted a room or been granted ring regions, so that bytes may arrive soon."""
        self._active_s = time.monotonic()

    def store_aux(self, order: StoreAux) -> None:
        """Copies an aux row to its slot, at once: the room may succeed with the next action."""
        self._pool.store_aux_row(order.slot, order.row)

    def idle(self) -> bool:
        return not self._scatters and not self._checks

    def turn(self) -> None:
        self._telemetry.region.cells[Cell.ARRIVAL_TURN_NS] = time.monotonic_ns()
        orders, self._orders = self._orders, []
        if self._poll_arrivals() or orders:
            self._active_s = time.monotonic()
        self._execute(orders)
        self._report_finished()
        if self._checks:
            self._report_checked()
        if self._pool.device is not None and not self._open_rooms():
            new = {1, *self._splits()} - self._compiled
            if new:
                self._compiled |= new
                threading.Thread(target=self._compile, args=(new,), name="kvctl-compile", daemon=True).start()

    def _compile(self, splits: set[int]) -> None:
        """Compiles the kernels of all scatters that are likely, which takes seconds, on a thread of its own."""
        assert self._pool.device is not None
        copier = DeviceCopier(self._pool.device.copies())
        try:
            for memory in (memory for split in splits for memory in self._pool.segments_at(split)):
                for writers in _WRITER_COUNTS if memory.blocks else ():
                    if memory.shard.heads % writers == 0:
                        copier.prepare(memory, 0, memory.shard.heads // writers, self._compile_checksums)
        except Exception as error:  # a scatter compiles its kernel itself, or fails by name
            self._telemetry.recorder.record("device", f"a copy kernel could not be compiled: {error}", "error")
        finally:
            copier.close()

    def wait_s(self) -> float:
        if self._orders:
            return 0.0
        now = time.monotonic()
        if self._checks:
            return _SHORTEST_ON_DEVICE_S
        if self._scatters:
            return _SHORTEST_ON_DEVICE_S if now - self._scatter_began_s < _YOUNG_S else _COPYING_S
        rooms = self._open_rooms()
        if not rooms:
            return _IDLE_S
        share, shortest = _SHARE_OF_SILENCE, _SHORTEST_S
        if self._pool.device is not None:
            share, shortest = _SHARE_ON_DEVICE, _SHORTEST_ON_DEVICE_S
        if self._few_cores or self._pool.device is not None:
            shortest *= min(rooms, _MANY_ROOMS)
        return min(max((now - self._active_s) * share, shortest), _LONGEST_S)

    def wait(self, polled: ctypes.Array[Any], turns: Turns, timeout_s: float, pause_s: float) -> int | None:
        """Lets the transport wait while only tags can make a turn necessary; for the arguments see `wait_for_tags`.

        Returns:
            Monotonic ns at the end of the wait, before this thread waited for the GIL again; None if there was none.
        """
        if self._orders or self._checks or self._scatters or time.monotonic_ns() < self._poll_again_ns:
            return None
        try:
            waited = self._transport.wait_for_tags(polled, turns, timeout_s, pause_s)
        except Exception as error:
            self._poll_failed(error)
            return None
        if waited is None:
            return None
        self._looked = True
        self._found += waited.arrivals
        return waited.ended_ns

    def _poll_arrivals(self) -> bool:
        """Reports the tags that have arrived; returns whether there were any."""
        now = time.monotonic_ns()
        arrivals, self._found = self._found, []
        # A look takes 60 µs where caches are cold, so there is none just after a wait, which ends with one or has been
        # ended by a message; the next wait begins with one.
        looked, self._looked = self._looked, False
        if not looked and now >= self._poll_again_ns:
            try:
                arrivals += self._transport.arrivals()
            except Exception as error:
                self._poll_failed(error)
        if not arrivals:
            return False
        events: list[Event] = []
        for arrival in arrivals:
            try:
                events.append(Arrived(Tag.unpack(arrival.tag), now))
            except RemoteProtocolError:
                self._telemetry.metrics.add("kvctl_tags_dropped_total", 1, "malformed")
        self._report(*events)
        return True

    def _poll_failed(self, error: Exception) -> None:
        """Counts a failure of the transport, records it now and then, and lets the next poll wait."""
        now = time.monotonic_ns()
        self._poll_again_ns = now + _BROKEN_NS
        self._telemetry.metrics.add("kvctl_transport_errors_total", 1)
        if now >= self._record_ns:
            self._record_ns = now + _RECORD_EVERY_NS
            self._telemetry.recorder.record("transport", f"cannot poll arrivals: {error}", "error")

    def _execute(self, orders: list[Scatter | Check]) -> None:
        """Executes actions: scatters as many parts at once as the copier takes, and starts checksums one by one."""
        batch: list[Scatter] = []
        for order in orders:
            if isinstance(order, Check):
                self._check(order)
                continue
            batch.append(order)
            if len(batch) >= self._copier.parts_at_once:
                self._scatter(batch)
                batch = []
        if batch:
            self._scatter(batch)

    def _check(self, order: Check) -> None:
        share, key = order.share, order.key
        try:
            if share is None:
                self._report_check(order, aux_checksum(self._pool, int(order.pages[0])))
                return
            where = order.pages, share.dst_head, key.lo, key.hi, share.dst_split
            self._checks.append(_RunningCheck(order, self._checksums.begin(share, *where)))
        except Exception as error:
            self._report_check(order, None, error)

    def _report_checked(self) -> None:
        """Reports the checksums that have been computed."""
        for running in self._checks[:]:
            order, checksum = running
            try:
                if not checksum.done():
                    continue
            except Exception as error:
                self._report_check(order, None, error)
            else:
                self._report_check(order, checksum.value)
            self._checks.remove(running)

    def _report_check(self, order: Check, found: int | None, error: Exception | None = None) -> None:
        text = ""
        if error is not None:
            self._record(order, error)
            text = str(error)
        self._report(Checked(order.room, order.nonce, order.kind, order.key, found, time.monotonic_ns(), text))

    def _scatter(self, orders: list[Scatter]) -> None:
        parts, valid = [], []
        for order in orders:
            if (part := self._try_landed_part(order)) is not None:
                parts.append(part)
                valid.append(order)
        if not valid:
            return
        began_ns = time.monotonic_ns()
        if not self._scatters:
            self._telemetry.region.cells[Cell.COPYING_SINCE_NS] = began_ns
        try:
            copy = self._copier.scatter(parts)
        except Exception as error:
            self._report_failed(valid, error)
            self._update_copying_since()
            return
        self._scatters.append(_RunningScatter(began_ns, copy, valid))
        if (ranges := self._telemetry.ranges) is not None:
            ranges.begin(self._scatters[-1], f"kv scatter of {len(valid)} parts")
        self._scatter_began_s = time.monotonic()
        self._report_finished()

    def _landed_part(self, order: Scatter) -> LandedPart:
        share, key = order.share, order.key
        memory = self._pool.segments_at(share.dst_split)[share.segment]
        layout = memory.part_layout(key.lo, key.hi, len(order.pages), share.heads)
        assert self._ring is not None
        rows = RowIndex(memory, order.pages, share.dst_head, share.heads)
        return LandedPart(rows, layout, self._ring.view(order.offset, layout.region_bytes))

    def _report_finished(self) -> None:
        """Reports the scatters that are done; scatters end in the order in which they were started."""
        while self._scatters:
            _, copy, orders = self._scatters[0]
            try:
                if not copy.done():
                    return
            except Exception as error:
                self._report_failed(orders, error)
            else:
                now = time.monotonic_ns()
                self._report(*(Scattered(order.serial, now) for order in orders))
            if (ranges := self._telemetry.ranges) is not None:
                ranges.end(self._scatters[0])
            del self._scatters[0]
            self._update_copying_since()

    def _update_copying_since(self) -> None:
        self._telemetry.region.cells[Cell.COPYING_SINCE_NS] = self._scatters[0].began_ns if self._scatters else 0

    def _try_landed_part(self, order: Scatter) -> LandedPart | None:
        try:
            return self._landed_part(order)
        except Exception as error:
            # The pages were checked when the room was opened, so this is a bug of the agent; the loop survives it.
            self._record(order, error)
            return None

    def _report_failed(self, orders: list[Scatter], error: Exception) -> None:
        for order in orders:
            self._record(order, error)
        # In host memory a failed copy is a bug of the agent. A part that a device failed to copy is not tried again.
        if isinstance(error, DeviceError) or self._pool.device is not None:
            self._report(*(ScatterFailed(order.serial, str(error)) for order in orders))

    def _record(self, order: Scatter | Check, error: Exception) -> None:
        kind = type(order).__name__.lower()
        self._telemetry.recorder.record(kind, f"{order.key}: {error}", "error", order.room)
