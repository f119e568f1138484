"""Transfer workers of a prefill rank: threads that execute `Transfer` actions.

A part is transferred by a flight (`paths.base.Flight`), which the worker advances until the write has completed. A
worker never waits for a peer. A flight whose room has failed, or whose write has failed, is abandoned: it no longer
counts as active, but is polled until the transport can no longer write, and only then reported as ended. Parts for a
peer that has a long-running flight wait until that flight ends, so that a stopped peer does not occupy all staging
buffers. A stopped peer therefore delays no other peer, and no memory is reused while a write from or to it may be in
flight.

Nothing is posted to a peer whose lease has expired: its parts wait until the lease is renewed, or until their rooms
fail because the peer is lost.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue

from msgspec.structs import replace

from kvctl_agent.errors import DeviceError, KvctlError, PeerDisconnected, TransportError
from kvctl_agent.memory.checksum import aux_checksum, part_checksum
from kvctl_agent.paths.base import Flight, Path
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.protocol.events import Event, PartFailed, PartSent, Transfer
from kvctl_agent.protocol.tag import PartKind, Tag, with_checksum
from kvctl_agent.runtime.threads import AgentThread, minimize_timer_slack
from kvctl_agent.telemetry.metrics import Metrics

_ACTIVE = 4  # flights at once
# A GPU shared by several ranks takes 120 µs to switch to another rank whenever one has no more work for it.
_ACTIVE_ON_DEVICE = 16
_ACTIVE_SLOW = 2  # to a slow peer: enough to keep a slow connection busy
_STUCK_NS = 50_000_000
_SPIN_S = 20e-6
_SLEEP_S = 500e-6
# A GPU transfers a part in less time than a long pause takes, and hosts with GPUs have a core to spare for polling.
_YOUNG_NS = 1_000_000
_SHARE_OF_AGE = 1 / 64
_DRAIN_S = 0.01
# After the last flight the transport still has tags to send and peers to answer, and does so only when it is called.
_AFTERMATH_S = 5e-3
_AFTERMATH_TURNS = 20
_IDLE_S = 0.1

Job = Transfer | Callable[[], None]


class TransferWorker(AgentThread):
    """Thread that transfers parts.

    Args:
        paths: transfer paths by name; used by this worker only.
        aux: path of aux rows.
        connections: connections by peer, written by the control loop; entries are replaced, never changed.
        progress: makes the transport progress; called periodically while the worker is idle.
        report: puts events into the control loop's mailbox.
        checksum: send a checksum of the bytes with every part.
        on_device: a GPU transfers the parts, so their completion is polled often.
    """

    def __init__(
        self,
        name: str,
        paths: Mapping[str, Path],
        aux: Path,
        connections: Mapping[str, PeerConnection],
        progress: Callable[[], None],
        report: Callable[[Event], None],
        metrics: Metrics,
        checksum: bool = False,
        on_device: bool = False,
    ) -> None:
        super().__init__(name)
        self._checksum = checksum
        self._on_device = on_device
        self._most_active = _ACTIVE_ON_DEVICE if on_device else _ACTIVE
        self._paths = paths
        self._aux = aux
        self._connections = connections
        self._progress = progress
        self._report = report
        self._metrics = metrics
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._active: list[Flight] = []
        self._draining: list[Flight] = []
        self._waiting: dict[str, deque[Transfer]] = {}  # by slow peer
        self._drop_cancelled_at = 0.0
        self._idle_turns = 0

    @property
    def drained(self) -> bool:
        """Whether none of the worker's writes is in flight."""
        return not self._active and not self._draining

    def put(self, job: Job) -> None:
        """Queues a part, or a function to call on this thread between parts."""
        self._jobs.put(job)

    def _request_stop(self) -> None:
        self._jobs.put(None)  # it stops after the jobs queued so far

    def _run(self) -> None:
        if self._on_device:
            minimize_timer_slack()
        stopping = False
        pause_s = _SPIN_S
        while not (stopping and not self._active and not self._waiting):
            moved = self._begin_waiting()
            # One job per iteration: posting may itself copy the bytes, and earlier flights need to be polled.
            if self._has_capacity() and not stopping:
                job = self._next(idle=not self._active)
                if job is _NOTHING:
                    self._let_engine_work()
                elif job is None:
                    stopping = True
                else:
                    moved = True
                    self._begin(job)  # type: ignore[arg-type]
            for flight in self._active[:]:
                if self._advance(flight):
                    self._active.remove(flight)
                    moved = True
            self._drain()
            if moved or not self._active:
                pause_s = _SPIN_S
            elif self._on_device:
                age_ns = time.monotonic_ns() - self._active[-1].began_ns
                time.sleep(0 if age_ns < _YOUNG_NS else min(age_ns * 1e-9 * _SHARE_OF_AGE, _SLEEP_S))
            else:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _SLEEP_S)

    def _begin_waiting(self) -> bool:
        """Begins the waiting parts that may begin now, and drops the cancelled ones; returns whether there were any."""
        moved = False
        now = time.monotonic()
        for peer, orders in list(self._waiting.items()):
            while orders and self._has_capacity() and not self._must_wait(orders[0]):
                moved = True
                self._start(orders.popleft())
            if now >= self._drop_cancelled_at and any(order.cancel.cancelled for order in orders):
                for _ in range(len(orders)):
                    order = orders.popleft()
                    if order.cancel.cancelled:
                        moved = True
                        self._start(order)
                    else:
                        orders.append(order)
            if not orders:
                del self._waiting[peer]
        if now >= self._drop_cancelled_at:
            self._drop_cancelled_at = now + _DRAIN_S
        return moved

    def _must_wait(self, order: Transfer) -> bool:
        """Returns whether a part must not begin now. A cancelled part need not wait, since it is dropped."""
        if order.cancel.cancelled:
            return False
        return not order.cancel.lease.valid(time.monotonic_ns()) or self._slow(order.peer)

    def _slow(self, peer: str) -> bool:
        """Returns whether a peer has several flights, the oldest of them long-running, so that no more should begin."""
        began = [flight.began_ns for flight in self._active if flight.order.peer == peer]
        return len(began) >= _ACTIVE_SLOW and began[0] <= time.monotonic_ns() - _STUCK_NS

    def _has_capacity(self) -> bool:
        """Returns whether another part may begin.

        Long-running flights do not count: their peer may have stopped, and a few of them would block all other peers.
        """
        if len(self._active) < self._most_active:
            return True
        since = time.monotonic_ns() - _STUCK_NS
        return sum(flight.began_ns > since for flight in self._active) < self._most_active

    def _next(self, idle: bool) -> Job | object | None:
        """Returns the next job, or `_NOTHING` if there is none; waits for a job only if `idle`."""
        try:
            job = self._jobs.get(timeout=self._idle_s()) if idle else self._jobs.get_nowait()
        except Empty:
            return _NOTHING
        self._idle_turns = 0
        return job

    def _idle_s(self) -> float:
        if self._draining or self._waiting:
            return _DRAIN_S
        return _AFTERMATH_S if self._idle_turns < _AFTERMATH_TURNS else _IDLE_S

    def _let_engine_work(self) -> None:
        self._idle_turns += 1
        try:
            self._progress()
        except KvctlError:
            self._metrics.add("kvctl_transport_errors_total", 1)

    def _begin(self, job: Job) -> None:
        if not isinstance(job, Transfer):
            try:
                job()
            except Exception:  # reported by the function itself; the thread must survive
                self._metrics.add("kvctl_transport_errors_total", 1)
        elif job.peer in self._waiting or self._must_wait(job):
            self._waiting.setdefault(job.peer, deque()).append(job)
        else:
            self._start(job)

    def _start(self, order: Transfer) -> None:
        if order.cancel.cancelled:
            self._report(PartSent(order.peer, order.room, order.nonce, order.kind, order.key, dropped=True))
            return
        connection = self._connections.get(order.peer)
        if connection is None:
            self._report_failed(order, TransportError(f"no connection to {order.peer}"), in_flight=False)
            return
        path = self._aux if order.kind is PartKind.AUX else self._paths[order.path]
        try:
            if self._checksum:
                order = replace(order, tag=with_checksum(order.tag, _checksum(connection, order)))
            self._active.append(path.start(connection, order))
        except Exception as error:
            self._report_failed(order, error, in_flight=False)

    def _advance(self, flight: Flight) -> bool:
        """Advances one flight; returns whether the flight is no longer active."""
        order = flight.order
        try:
            done = flight.advance()
        except Exception as error:
            drained = _abandoned(flight)
            if not drained:
                self._draining.append(flight)
            self._report_failed(order, error, in_flight=not drained)
            return True
        if order.cancel.cancelled and not done:
            self._draining.append(flight)
            return True
        if done:
            self._report_done(flight)
        return done

    def _report_done(self, flight: Flight) -> None:
        order = flight.order
        if order.cancel.cancelled:
            self._report(PartSent(order.peer, order.room, order.nonce, order.kind, order.key, dropped=True))
            return
        moments = flight.moments()
        checksum = Tag.unpack(order.tag).checksum if self._checksum else None
        self._report(PartSent(order.peer, order.room, order.nonce, order.kind, order.key, moments, checksum=checksum))
        if order.kind is PartKind.KV:
            path = (order.path,)
            self._metrics.update(
                [
                    ("kvctl_writes_total", 1, path),
                    ("kvctl_descriptors_total", flight.descriptors, path),
                    ("kvctl_engine_posts_total", flight.posts, path),
                ]
            )

    def _drain(self) -> None:
        for flight in self._draining[:]:
            if _abandoned(flight):
                self._draining.remove(flight)
                order = flight.order
                self._report(PartSent(order.peer, order.room, order.nonce, order.kind, order.key, dropped=True))

    def _report_failed(self, order: Transfer, error: Exception, *, in_flight: bool) -> None:
        if isinstance(error, DeviceError):
            code = "KV_DEVICE"
        else:
            # The engine may notice that a peer is gone before its heartbeats are missed.
            code = "KV_PEER_LOST" if isinstance(error, PeerDisconnected) else "KV_TRANSPORT"
            self._metrics.add("kvctl_transport_errors_total", 1)
        # An error of another type is a bug, which fails the part but does not end the thread.
        text = str(error) if isinstance(error, KvctlError) else f"{type(error).__name__}: {error}"
        text = f"{order.key} to {order.peer} by {order.path}: {text}"
        self._report(PartFailed(order.peer, order.room, order.nonce, order.kind, order.key, code, text, in_flight))


def _checksum(connection: PeerConnection, order: Transfer) -> int:
    """Returns the checksum of a part's bytes in this rank's pool, which are computed and no longer change."""
    share, key = order.share, order.key
    if share is None:
        return aux_checksum(connection.pool, int(order.src_pages[0]))
    return part_checksum(connection.pool, share, order.src_pages, share.src_head, key.lo, key.hi)


def _abandoned(flight: Flight) -> bool:
    """Abandons a flight; returns whether the transport can no longer write any of its bytes.

    Returns False after an exception, which does not prove that and must not end the thread.
    """
    try:
        return flight.give_up()
    except Exception:
        return False


_NOTHING = object()
