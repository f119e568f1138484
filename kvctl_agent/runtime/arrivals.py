"""The arrival loop of a decode rank: hears tags, scatters landed parts, takes digests of what is in its pages.

Engines have no way to wake us, so it looks: often while bytes are expected, seldom otherwise. Looking costs about
10 µs, and several ranks share a core, so the pause grows with the time since the last arrival. The pause is part of a
writer's latency too: UCX acknowledges a flushed write only when the reader looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.memory.buffers import RingMemory
from kvctl_agent.memory.copy import scatter_piece
from kvctl_agent.memory.crew import CopyCrew
from kvctl_agent.memory.digest import aux_digest, part_digest
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.rows import RowIndex
from kvctl_agent.protocol.events import Arrived, Check, Checked, Event, Scatter, Scattered
from kvctl_agent.protocol.tag import Tag
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.transport.base import Transport

_IDLE_S = 5e-3
_SHORTEST_S = 50e-6  # a room that is alone; with more in flight none of them waits for this look
_MANY_ROOMS = 8
_LONGEST_S = 1e-3
_SHARE_OF_SILENCE = 1 / 8
_RECORD_EVERY_NS = 60_000_000_000  # an engine that stays broken must not fill the recorder


class ArrivalLoop:
    """One thread; the control loop tells it how many rooms are open."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        pool: KVPool,
        ring: RingMemory | None,
        crew: CopyCrew,
        report: Callable[..., None],
        telemetry: Telemetry,
    ) -> None:
        self._transport = transport
        self._pool = pool
        self._ring = ring
        self._crew = crew
        self._report = report
        self._telemetry = telemetry
        self._orders: SimpleQueue[Scatter | Check | None] = SimpleQueue()
        self._rooms = 0
        self._stopping = False
        self._record_ns = 0
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
        heard = time.monotonic()
        while not self._stopping:
            if self._hear():
                heard = time.monotonic()
            pause = _IDLE_S
            if self._rooms:
                silence = time.monotonic() - heard
                shortest = _SHORTEST_S * min(self._rooms, _MANY_ROOMS)
                pause = min(max(silence * _SHARE_OF_SILENCE, shortest), _LONGEST_S)
            try:
                order = self._orders.get(timeout=pause)
                while True:
                    if order is not None:
                        self._try(order)
                        heard = time.monotonic()
                    order = self._orders.get_nowait()
            except Empty:
                pass

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

    def _try(self, order: Scatter | Check) -> None:
        try:
            if isinstance(order, Check):
                self._check(order)
            else:
                self._scatter(order)
        except Exception as error:
            # Its pages were checked when the room was opened, so this is a bug of ours: the thread must outlive it.
            kind = type(order).__name__.lower()
            self._telemetry.recorder.record(kind, f"{order.key}: {error}", "error", order.room)

    def _check(self, order: Check) -> None:
        share, key = order.share, order.key
        if share is None:
            found = aux_digest(self._pool, int(order.pages[0]))
        else:
            found = part_digest(self._pool, share, order.pages, share.dst_head, key.lo, key.hi)
        self._report(Checked(order.room, order.nonce, order.kind, key, found, time.monotonic_ns()))

    def _scatter(self, order: Scatter) -> None:
        share, key = order.share, order.key
        memory = self._pool.segments[share.segment]
        layout = memory.part_layout(key.lo, key.hi, len(order.pages), share.heads)
        assert self._ring is not None
        rows = RowIndex(memory, order.pages, share.dst_head, share.heads)
        region = self._ring.view(order.offset, layout.region_bytes)
        self._crew.run([partial(scatter_piece, piece, rows, region[piece.offset :]) for piece in layout.pieces()])
        self._report(Scattered(order.serial, time.monotonic_ns()))
