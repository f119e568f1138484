"""Transfer workers of a prefill rank: they take orders that have passed every gate, and advance flights.

A worker never waits for a peer. A flight whose room has failed, or whose write an engine has failed, is given up: it
no longer takes a place among the active ones, but it is polled until the engine lets go, and only then reported as
over. Orders for a peer that some flight has been out to for long wait until it is over, so that those of a stopped peer
do not take all staging buffers. So a stopped peer holds up nobody else, and nothing is reused under a write that may
still land.

Nothing is posted to a peer whose lease has ended: it waits until the lease is renewed or its room fails, which the loss
of the peer brings about.
"""

from __future__ import annotations

import threading
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
from kvctl_agent.runtime.timer_slack import minimize_timer_slack
from kvctl_agent.telemetry.metrics import Metrics

_ACTIVE = 4  # parts on the wire at once
# A GPU that several ranks share takes 120 µs to turn to the next of them whenever one has nothing more for it.
_ACTIVE_ON_DEVICE = 16
_ACTIVE_SLOW = 2  # to a peer that takes its time: enough to keep a slow connection busy
_STUCK_NS = 50_000_000
_SPIN_S = 20e-6
_SLEEP_S = 500e-6
# A GPU moves a part in less time than a pause that has grown takes, and nobody there lacks the core that looks for it.
_YOUNG_NS = 1_000_000
_SHARE_OF_AGE = 1 / 64
_DRAIN_S = 0.01
# An engine without work of its own still has tags to send and peers to answer, and does so only when it is called.
_AFTERMATH_S = 5e-3
_AFTERMATH_TURNS = 20
_IDLE_S = 0.1

Job = Transfer | Callable[[], None]


class TransferWorker:
    """One thread.

    Args:
        paths: by name; private to this worker.
        aux: the path of aux rows.
        connections: by peer; written by the control loop, an entry is replaced and never changed.
        progress: lets the engine work; called now and then while there is nothing else to do.
        report: puts events into the control loop's mailbox.
        checksum: send with every part the checksum of its bytes.
        on_device: parts are moved by a GPU: look for their end often.
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
        self._waiting: dict[str, deque[Transfer]] = {}  # by peer that takes its time
        self._sift_at = 0.0
        self._idle_turns = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def drained(self) -> bool:
        """No write of ours is in flight."""
        return not self._active and not self._draining

    def put(self, job: Job) -> None:
        """Queue a part, or something to run on this thread between parts."""
        self._jobs.put(job)

    def close(self, timeout: float) -> bool:
        """Stop after the jobs queued so far; True when the thread has ended."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._on_device:
            minimize_timer_slack()
        stopping = False
        patience = _SPIN_S
        while not (stopping and not self._active and not self._waiting):
            moved = self._begin_waiting()
            # One at a time: a post may be the copy itself, and what was posted before wants to be seen to its end.
            if self._has_place() and not stopping:
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
                patience = _SPIN_S
            elif self._on_device:
                age_ns = time.monotonic_ns() - self._active[-1].began_ns
                time.sleep(0 if age_ns < _YOUNG_NS else min(age_ns * 1e-9 * _SHARE_OF_AGE, _SLEEP_S))
            else:
                time.sleep(patience)
                patience = min(2 * patience, _SLEEP_S)

    def _begin_waiting(self) -> bool:
        """Begin what waited for a slow peer and may go now, drop what was given up; True when something did."""
        moved = False
        now = time.monotonic()
        for peer, orders in list(self._waiting.items()):
            while orders and self._has_place() and not self._held_up(orders[0]):
                moved = True
                self._start(orders.popleft())
            if now >= self._sift_at and any(order.cancel.cancelled for order in orders):
                for _ in range(len(orders)):
                    order = orders.popleft()
                    if order.cancel.cancelled:
                        moved = True
                        self._start(order)
                    else:
                        orders.append(order)
            if not orders:
                del self._waiting[peer]
        if now >= self._sift_at:
            self._sift_at = now + _DRAIN_S
        return moved

    def _held_up(self, order: Transfer) -> bool:
        """Whether a part should not be begun now, unless to be dropped."""
        if order.cancel.cancelled:
            return False
        return not order.cancel.lease.valid(time.monotonic_ns()) or self._slow(order.peer)

    def _slow(self, peer: str) -> bool:
        """Whether no more parts should be begun to a peer: one has been out to it for long."""
        began = [flight.began_ns for flight in self._active if flight.order.peer == peer]
        return len(began) >= _ACTIVE_SLOW and began[0] <= time.monotonic_ns() - _STUCK_NS

    def _has_place(self) -> bool:
        """Whether another part may begin. One that has been out for long no longer counts: its peer may have stopped,
        and a few of those would hold up all others."""
        if len(self._active) < self._most_active:
            return True
        since = time.monotonic_ns() - _STUCK_NS
        return sum(flight.began_ns > since for flight in self._active) < self._most_active

    def _next(self, idle: bool) -> Job | object | None:
        """The next job; waits only when there is nothing else to do."""
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
            except Exception:  # its owner hears of it; this thread must go on
                self._metrics.add("kvctl_transport_errors_total", 1)
        elif job.peer in self._waiting or self._held_up(job):
            self._waiting.setdefault(job.peer, deque()).append(job)
        else:
            self._start(job)

    def _start(self, order: Transfer) -> None:
        if order.cancel.cancelled:
            self._report(PartSent(order.peer, order.room, order.nonce, order.kind, order.key, dropped=True))
            return
        connection = self._connections.get(order.peer)
        if connection is None:
            self._failed(order, TransportError(f"no connection to {order.peer}"), in_flight=False)
            return
        path = self._aux if order.kind is PartKind.AUX else self._paths[order.path]
        try:
            if self._checksum:
                order = replace(order, tag=with_checksum(order.tag, _checksum(connection, order)))
            self._active.append(path.start(connection, order))
        except Exception as error:
            self._failed(order, error, in_flight=False)

    def _advance(self, flight: Flight) -> bool:
        """Drive one flight; True when it is no longer active."""
        order = flight.order
        try:
            done = flight.advance()
        except Exception as error:
            drained = _given_up(flight)
            if not drained:
                self._draining.append(flight)
            self._failed(order, error, in_flight=not drained)
            return True
        if order.cancel.cancelled and not done:
            self._draining.append(flight)
            return True
        if done:
            self._over(flight)
        return done

    def _over(self, flight: Flight) -> None:
        order = flight.order
        if order.cancel.cancelled:
            self._report(PartSent(order.peer, order.room, order.nonce, order.kind, order.key, dropped=True))
            return
        moments = flight.moments()
        checksum = Tag.unpack(order.tag).checksum if self._checksum else None
        self._report(PartSent(order.peer, order.room, order.nonce, order.kind, order.key, moments, checksum=checksum))
        if order.kind is PartKind.KV:
            self._metrics.add("kvctl_writes_total", 1, order.path)
            self._metrics.add("kvctl_descriptors_total", flight.descriptors, order.path)
            self._metrics.add("kvctl_engine_posts_total", flight.posts, order.path)

    def _drain(self) -> None:
        for flight in self._draining[:]:
            if _given_up(flight):
                self._draining.remove(flight)
                order = flight.order
                self._report(PartSent(order.peer, order.room, order.nonce, order.kind, order.key, dropped=True))

    def _failed(self, order: Transfer, error: Exception, *, in_flight: bool) -> None:
        if isinstance(error, DeviceError):
            code = "KV_DEVICE"
        else:
            # The engine may notice the end of a peer before its heartbeats are missed.
            code = "KV_PEER_LOST" if isinstance(error, PeerDisconnected) else "KV_TRANSPORT"
            self._metrics.add("kvctl_transport_errors_total", 1)
        where = f"{order.key} to {order.peer} by {order.path}"
        self._report(
            PartFailed(
                order.peer,
                order.room,
                order.nonce,
                order.kind,
                order.key,
                code,
                f"{where}: {_said(error)}",
                in_flight,
            )
        )


def _checksum(connection: PeerConnection, order: Transfer) -> int:
    """Of a part's bytes as our pool has them: it is computed, so they change no more."""
    share, key = order.share, order.key
    if share is None:
        return aux_checksum(connection.pool, int(order.src_pages[0]))
    return part_checksum(connection.pool, share, order.src_pages, share.src_head, key.lo, key.hi)


def _given_up(flight: Flight) -> bool:
    """Whether nothing of it can land any more. An error proves nothing, and must not cost the thread."""
    try:
        return flight.give_up()
    except Exception:
        return False


def _said(error: Exception) -> str:
    """What failed a part. An error that is none of ours is a bug; it costs its part, not the thread."""
    return str(error) if isinstance(error, KvctlError) else f"{type(error).__name__}: {error}"


_NOTHING = object()
