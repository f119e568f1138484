"""Arrival loop of a decode rank: polls for arrived tags, scatters landed parts and computes checksums of parts.

Transfer engines cannot wake a thread on arrival, so the loop polls: often while bytes are expected, seldom otherwise. A
poll costs about 10 µs and several ranks may share a core, so the pause grows with the time since the last arrival. The
pause adds to the writer's latency too: UCX acknowledges a flushed write only when the reader polls.

Scatters on a device run asynchronously, and the loop polls for tags meanwhile: without a pause while the latest scatter
is young, since most scatters take less time than a pause would, and with short pauses afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from kvctl_agent.errors import DeviceError, RemoteProtocolError
from kvctl_agent.memory.allocations import RingMemory
from kvctl_agent.memory.checksum import aux_checksum, part_checksum
from kvctl_agent.memory.copier import Copier, LandedPart, PendingCopy
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.segment import RowIndex, SegmentMemory
from kvctl_agent.protocol.events import Arrived, Check, Checked, Event, Scatter, Scattered, ScatterFailed
from kvctl_agent.protocol.tag import Tag
from kvctl_agent.runtime.threads import AgentThread, minimize_timer_slack
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.transport.base import Transport

_IDLE_S = 20e-3  # a poll costs 0.1 ms when idle: at 5 ms an idle rank took 3.5 % of a core
_SHORTEST_S = 50e-6  # with one open room; with several, none of them waits for this poll
_MANY_ROOMS = 8
_LONGEST_S = 1e-3
_SHARE_OF_SILENCE = 1 / 8
# A GPU fills a room's pages in a millisecond or two, and ranks with a GPU do not share a core.
_SHORTEST_ON_DEVICE_S = 10e-6
_SHARE_ON_DEVICE = 1 / 64
_WRITER_COUNTS = (8, 4, 2, 1)  # numbers of writers among which this rank's heads may be divided
_YOUNG_S = 200e-6
_COPYING_S = 20e-6
_RECORD_EVERY_NS = 60_000_000_000  # an engine that stays broken must not fill the flight recorder


_Order = TypeVar("_Order", Scatter, Check)
_Result = TypeVar("_Result")


class _RunningScatter(NamedTuple):
    began_ns: int
    copy: PendingCopy
    orders: list[Scatter]


class ArrivalLoop(AgentThread):
    """Thread that polls the transport and executes `Scatter` and `Check` actions.

    Args:
        ring: memory of the staging ring; None if staging is off.
        copier: used by this loop only.
        report: puts events into the control loop's mailbox.
    """

    def __init__(
        self,
        name: str,
        transport: Transport,
        pool: KVPool,
        ring: RingMemory | None,
        copier: Copier,
        report: Callable[..., None],
        telemetry: Telemetry,
    ) -> None:
        super().__init__(name)
        self._transport = transport
        self._pool = pool
        self._ring = ring
        self._copier = copier
        self._report = report
        self._telemetry = telemetry
        self._orders: SimpleQueue[Scatter | Check | None] = SimpleQueue()
        segments = [(memory, memory.shard.heads) for memory in pool.segments if memory.blocks]
        self._to_prepare = [
            (memory, heads // writers)
            for memory, heads in segments
            for writers in _WRITER_COUNTS
            if heads % writers == 0
        ]
        self._scatters: list[_RunningScatter] = []
        self._scatter_began_s = 0.0  # start of the latest scatter
        self._rooms = 0
        self._stopping = False
        self._record_ns = 0
        self._checksum_skipped = False  # a checksum from a writer was not compared

    def put(self, order: Scatter | Check) -> None:
        """Queues an action for this thread."""
        self._orders.put(order)

    def expect(self, rooms: int) -> None:
        """Sets the number of open rooms: without any the loop polls seldom; with many, less often than with one."""
        if rooms and not self._rooms:
            self._orders.put(None)  # ends the long pause
        self._rooms = rooms

    def _request_stop(self) -> None:
        self._stopping = True
        self._orders.put(None)

    def _run(self) -> None:
        if self._pool.device is not None:
            minimize_timer_slack()
        active = time.monotonic()
        while not (self._stopping and not self._scatters):
            self._telemetry.arrival_turn_ns = time.monotonic_ns()
            if self._poll_arrivals():
                active = time.monotonic()
            orders = self._take_orders(self._pause(active))
            self._execute(orders)
            self._report_finished()
            if orders:
                active = time.monotonic()
            elif not self._rooms and self._to_prepare:
                self._prepare(*self._to_prepare.pop())

    def _prepare(self, memory: SegmentMemory, heads: int) -> None:
        """Compiles the kernels that scatter parts with `heads` heads of a segment; called while no room is open."""
        try:
            self._copier.prepare(memory, 0, heads)
        except Exception as error:  # not even a bug may end the thread
            self._telemetry.recorder.record("device", f"a copy kernel could not be compiled: {error}", "error")

    def _pause(self, active: float) -> float:
        """Returns the seconds to wait for an action before the next poll; `active` is the time of the last activity."""
        now = time.monotonic()
        if self._scatters:
            return 0.0 if now - self._scatter_began_s < _YOUNG_S else _COPYING_S
        if not self._rooms:
            return _IDLE_S
        share, shortest = _SHARE_OF_SILENCE, _SHORTEST_S
        if self._pool.device is not None:
            share, shortest = _SHARE_ON_DEVICE, _SHORTEST_ON_DEVICE_S
        return min(max((now - active) * share, shortest * min(self._rooms, _MANY_ROOMS)), _LONGEST_S)

    def _take_orders(self, pause: float) -> list[Scatter | Check]:
        """Returns all queued actions; waits up to `pause` seconds for the first."""
        orders: list[Scatter | Check | None] = []
        try:
            if pause:
                orders.append(self._orders.get(timeout=pause))
            else:
                time.sleep(0)  # let other threads of the process run
            while True:
                orders.append(self._orders.get_nowait())
        except Empty:
            return [order for order in orders if order is not None]

    def _poll_arrivals(self) -> bool:
        """Reports the tags that have arrived; returns whether there were any."""
        try:
            arrivals = self._transport.arrivals()
        except Exception as error:
            self._telemetry.metrics.add("kvctl_transport_errors_total", 1)
            if time.monotonic_ns() >= self._record_ns:
                self._record_ns = time.monotonic_ns() + _RECORD_EVERY_NS
                self._telemetry.recorder.record("transport", f"cannot poll arrivals: {error}", "error")
            time.sleep(_IDLE_S)
            return False
        if not arrivals:
            return False
        now = time.monotonic_ns()
        events: list[Event] = []
        for arrival in arrivals:
            try:
                events.append(Arrived(Tag.unpack(arrival.tag), now))
            except RemoteProtocolError:
                self._telemetry.metrics.add("kvctl_tags_dropped_total", 1, "malformed")
        self._report(*events)
        return True

    def _execute(self, orders: list[Scatter | Check]) -> None:
        """Executes actions: scatters as many parts at once as the copier takes, and computes checksums one by one."""
        batch: list[Scatter] = []
        for order in orders:
            if isinstance(order, Check):
                self._try(order, self._check)
                continue
            batch.append(order)
            if len(batch) >= self._copier.parts_at_once:
                self._scatter(batch)
                batch = []
        if batch:
            self._scatter(batch)

    def _check(self, order: Check) -> None:
        share, key = order.share, order.key
        found: int | None = None
        if share is None:
            found = aux_checksum(self._pool, int(order.pages[0]))
        elif self._pool.device is None:
            found = part_checksum(self._pool, share, order.pages, share.dst_head, key.lo, key.hi)
        elif not self._checksum_skipped:
            self._checksum_skipped = True
            text = "writers send checksums, but parts on a GPU are not checked: that would read every byte back"
            self._telemetry.recorder.record("checksum", text, "warning")
        self._report(Checked(order.room, order.nonce, order.kind, key, found, time.monotonic_ns()))

    def _scatter(self, orders: list[Scatter]) -> None:
        parts, valid = [], []
        for order in orders:
            if (part := self._try(order, self._landed_part)) is not None:
                parts.append(part)
                valid.append(order)
        if not valid:
            return
        began_ns = time.monotonic_ns()
        if not self._scatters:
            self._telemetry.copying_since_ns = began_ns
        try:
            copy = self._copier.scatter(parts)
        except Exception as error:
            self._report_failed(valid, error)
            self._update_copying_since()
            return
        self._scatters.append(_RunningScatter(began_ns, copy, valid))
        self._scatter_began_s = time.monotonic()
        self._report_finished()

    def _landed_part(self, order: Scatter) -> LandedPart:
        share, key = order.share, order.key
        memory = self._pool.segments[share.segment]
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
            del self._scatters[0]
            self._update_copying_since()

    def _update_copying_since(self) -> None:
        self._telemetry.copying_since_ns = self._scatters[0].began_ns if self._scatters else 0

    def _try(self, order: _Order, execute: Callable[[_Order], _Result]) -> _Result | None:
        try:
            return execute(order)
        except Exception as error:
            # The pages were checked when the room was opened, so this is a bug of the agent; the thread survives it.
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
