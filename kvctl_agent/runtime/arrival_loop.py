"""The arrival loop of a decode rank: hears tags, scatters landed parts, takes checksums of what is in its pages.

Engines have no way to wake us, so it looks: often while bytes are expected, seldom otherwise. Looking costs about
10 µs, and several ranks share a core, so the pause grows with the time since the last arrival. The pause is part of a
writer's latency too: UCX acknowledges a flushed write only when the reader looks.

A scatter on a device is begun and then looked for, too, while tags go on being heard: without a pause while it is
young, since most take less than a pause would, and with short ones afterwards.
"""

from __future__ import annotations

import threading
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
from kvctl_agent.runtime.timer_slack import minimize_timer_slack
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.transport.base import Transport

_IDLE_S = 20e-3  # each look costs 0.1 ms: at 5 ms an idle rank took 3.5 % of a core
_SHORTEST_S = 50e-6  # a room that is alone; with more in flight none of them waits for this look
_MANY_ROOMS = 8
_LONGEST_S = 1e-3
_SHARE_OF_SILENCE = 1 / 8
# A GPU fills a room's pages in a millisecond or two, and ranks that have one do not share a core.
_SHORTEST_ON_DEVICE_S = 10e-6
_SHARE_ON_DEVICE = 1 / 64
_RANKS = (8, 4, 2, 1)  # of writers that share our heads
_YOUNG_S = 200e-6
_COPYING_S = 20e-6
_RECORD_EVERY_NS = 60_000_000_000  # an engine that stays broken must not fill the recorder


_Order = TypeVar("_Order", Scatter, Check)
_Found = TypeVar("_Found")


class _Begun(NamedTuple):
    """Parts that are being scattered."""

    at_ns: int
    work: PendingCopy
    orders: list[Scatter]


class ArrivalLoop:
    """One thread; the control loop tells it how many rooms are open.

    Args:
        ring: None where nothing is staged.
        copier: this loop's alone.
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
        self._transport = transport
        self._pool = pool
        self._ring = ring
        self._copier = copier
        self._report = report
        self._telemetry = telemetry
        self._orders: SimpleQueue[Scatter | Check | None] = SimpleQueue()
        held = [(memory, memory.shard.heads) for memory in pool.segments if memory.blocks]
        self._ahead = [(memory, heads // ranks) for memory, heads in held for ranks in _RANKS if heads % ranks == 0]
        self._begun: list[_Begun] = []
        self._begun_s = 0.0  # when the last of them was
        self._rooms = 0
        self._stopping = False
        self._record_ns = 0
        self._unread = False  # a checksum that came was not compared
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, order: Scatter | Check) -> None:
        self._orders.put(order)

    def expect(self, rooms: int) -> None:
        """Look seldom while no room is open, often while one is, and a little less often while many are."""
        if rooms and not self._rooms:
            self._orders.put(None)  # it may be in its long pause
        self._rooms = rooms

    def close(self, timeout: float) -> bool:
        """Stop; True when the thread has ended."""
        self._stopping = True
        self._orders.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._pool.device is not None:
            minimize_timer_slack()
        heard = time.monotonic()
        while not (self._stopping and not self._begun):
            self._telemetry.arrival_turn_ns = time.monotonic_ns()
            if self._hear():
                heard = time.monotonic()
            orders = self._take(self._pause(heard))
            self._serve(orders)
            self._end()
            if orders:
                heard = time.monotonic()
            elif not self._rooms and self._ahead:
                self._prepare(*self._ahead.pop())

    def _prepare(self, memory: SegmentMemory, heads: int) -> None:
        """Before the first room comes, and not in the middle of it: for writers that have so many of our heads."""
        try:
            self._copier.prepare(memory, 0, heads)
        except Exception as error:  # a bug, too, must not cost the thread
            self._telemetry.recorder.record("device", f"a copy kernel could not be compiled: {error}", "error")

    def _pause(self, heard: float) -> float:
        """Seconds until the next look, where no order comes before."""
        now = time.monotonic()
        if self._begun:
            return 0.0 if now - self._begun_s < _YOUNG_S else _COPYING_S
        if not self._rooms:
            return _IDLE_S
        share, shortest = _SHARE_OF_SILENCE, _SHORTEST_S
        if self._pool.device is not None:
            share, shortest = _SHARE_ON_DEVICE, _SHORTEST_ON_DEVICE_S
        return min(max((now - heard) * share, shortest * min(self._rooms, _MANY_ROOMS)), _LONGEST_S)

    def _take(self, pause: float) -> list[Scatter | Check]:
        """All orders that wait; waits for the first."""
        orders: list[Scatter | Check | None] = []
        try:
            if pause:
                orders.append(self._orders.get(timeout=pause))
            else:
                time.sleep(0)  # other threads of this process have work, too
            while True:
                orders.append(self._orders.get_nowait())
        except Empty:
            return [order for order in orders if order is not None]

    def _hear(self) -> bool:
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

    def _serve(self, orders: list[Scatter | Check]) -> None:
        """Scatter together what goes together; checksums are taken one by one."""
        together: list[Scatter] = []
        for order in orders:
            if isinstance(order, Check):
                self._try(order, self._check)
                continue
            together.append(order)
            if len(together) >= self._copier.parts_at_once:
                self._scatter(together)
                together = []
        if together:
            self._scatter(together)

    def _check(self, order: Check) -> None:
        share, key = order.share, order.key
        found: int | None = None
        if share is None:
            found = aux_checksum(self._pool, int(order.pages[0]))
        elif self._pool.device is None:
            found = part_checksum(self._pool, share, order.pages, share.dst_head, key.lo, key.hi)
        elif not self._unread:
            self._unread = True
            text = "writers send checksums; those of parts on a GPU are not compared: it would read every byte back"
            self._telemetry.recorder.record("checksum", text, "warning")
        self._report(Checked(order.room, order.nonce, order.kind, key, found, time.monotonic_ns()))

    def _scatter(self, orders: list[Scatter]) -> None:
        landed, known = [], []
        for order in orders:
            if (part := self._try(order, self._landed)) is not None:
                landed.append(part)
                known.append(order)
        if not known:
            return
        began_ns = time.monotonic_ns()
        if not self._begun:
            self._telemetry.copying_since_ns = began_ns
        try:
            work = self._copier.scatter(landed)
        except Exception as error:
            self._failed(known, error)
            self._note_oldest()
            return
        self._begun.append(_Begun(began_ns, work, known))
        self._begun_s = time.monotonic()
        self._end()

    def _landed(self, order: Scatter) -> LandedPart:
        share, key = order.share, order.key
        memory = self._pool.segments[share.segment]
        layout = memory.part_layout(key.lo, key.hi, len(order.pages), share.heads)
        assert self._ring is not None
        rows = RowIndex(memory, order.pages, share.dst_head, share.heads)
        return LandedPart(rows, layout, self._ring.view(order.offset, layout.region_bytes))

    def _end(self) -> None:
        """Report what is in its pages by now; scatters end in the order in which they were begun."""
        while self._begun:
            _, work, orders = self._begun[0]
            try:
                if not work.done():
                    return
            except Exception as error:
                self._failed(orders, error)
            else:
                now = time.monotonic_ns()
                self._report(*(Scattered(order.serial, now) for order in orders))
            del self._begun[0]
            self._note_oldest()

    def _note_oldest(self) -> None:
        self._telemetry.copying_since_ns = self._begun[0].at_ns if self._begun else 0

    def _try(self, order: _Order, serve: Callable[[_Order], _Found]) -> _Found | None:
        try:
            return serve(order)
        except Exception as error:
            # Its pages were checked when the room was opened, so this is a bug of ours: the thread must outlive it.
            self._record(order, error)
            return None

    def _failed(self, orders: list[Scatter], error: Exception) -> None:
        for order in orders:
            self._record(order, error)
        # What host memory does not take is a bug of ours. What a device does not take is never copied any more.
        if isinstance(error, DeviceError) or self._pool.device is not None:
            self._report(*(ScatterFailed(order.serial, str(error)) for order in orders))

    def _record(self, order: Scatter | Check, error: Exception) -> None:
        kind = type(order).__name__.lower()
        self._telemetry.recorder.record(kind, f"{order.key}: {error}", "error", order.room)
