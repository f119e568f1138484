"""Transfers of a prefill rank: starts a flight for each `Transfer` action and advances it until its write completes.

The control loop calls `turn`, which never waits for a peer. A flight (`paths.base.Flight`) whose room has failed, or
whose write has failed, is abandoned: it no longer counts as active, but is polled until the transport can no longer
write, and only then reported as ended. Parts for a peer that has a long-running flight wait until that flight ends;
flights that have begun leave staging buffers for other peers (`memory.allocations.StagingBuffers`). A stopped peer
therefore delays no other peer, and no memory is reused while a write from or to it may be in flight.

Nothing is posted to a peer whose lease has expired: its parts wait until the lease is renewed, or until their rooms
fail because the peer is lost.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from kvctl_agent.device.base import Event as DeviceEvent
from kvctl_agent.device.base import PendingChecksum
from kvctl_agent.errors import DeviceError, KvctlError, PeerDisconnected, TransportError
from kvctl_agent.memory.checksum import Checksums, aux_checksum
from kvctl_agent.native import Turns
from kvctl_agent.paths.base import Flight, Path
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.protocol.events import Event, PartFailed, PartSent, Transfer
from kvctl_agent.protocol.tag import PartKind, Tag, with_checksum, with_row
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.transport.base import Waited

_ACTIVE = 4  # flights at once on few cores, where the post itself copies the bytes
# A GPU shared by several ranks takes 120 µs to switch to another rank whenever one has no more work for it. With cores
# to spare, the engine's threads and the copy threads work on several parts at once.
_ACTIVE_MANY = 16
_ACTIVE_SLOW = 2  # to a slow peer: enough to keep a slow connection busy
_STUCK_NS = 50_000_000
_STARTING_NS = 200_000  # parts begin for this long in one turn: posting may copy bytes, and flights must be polled
_SHORTEST_S = 20e-6
# Threads that post or copy need the interpreter for moments; without pauses the loop gives it up only after 5 ms.
_SHORTEST_MANY_S = 50e-6
_LONGEST_S = 500e-6
# A GPU transfers a part in less time than a long pause takes, and hosts with GPUs have a core to spare for polling.
_SHORTEST_ON_DEVICE_S = 10e-6
_SHARE_OF_AGE = 1 / 64
_DRAIN_S = 0.01
# After the last flight the transport still has tags to send and peers to answer, and does so only when it is called.
_AFTERMATH_S, _AFTERMATH_PAUSE_S = 0.1, 5e-3
_IDLE_S = 0.1


class Transfers:
    """Executes `Transfer` actions on the control loop's thread; any thread may call `run_between`.

    Args:
        paths: transfer paths by name.
        aux: path of the aux rows that do not go with a KV part.
        connections: connections by peer, written by the control loop; entries are replaced, never changed.
        progress: makes the transport progress; called periodically while no part is transferred.
        wait_for_tags: `Transport.wait_for_tags`, during which the transport progresses, too; None: there is none.
        report: takes the events for the machine.
        wake: wakes the control loop; called from other threads.
        many: whether there are cores, or a GPU, to work on many parts at once.
        checksums: computes a checksum of the bytes of every part, which is sent with it; None to send none.
        on_device: a GPU transfers the parts, so their completion is polled often.
        yield_if_due: lets the engine's thread run; called between parts.
        event_query: whether waits can end with an event of the GPU.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        aux: Path,
        connections: Mapping[str, PeerConnection],
        progress: Callable[[], None],
        report: Callable[[Event], None],
        wake: Callable[[], None],
        telemetry: Telemetry,
        *,
        many: bool = False,
        checksums: Checksums | None = None,
        on_device: bool = False,
        yield_if_due: Callable[[], object] = lambda: None,
        event_query: bool = False,
        wait_for_tags: Callable[[ctypes.Array[Any], Turns, float, float], Waited | None] | None = None,
    ) -> None:
        self._checksums = checksums
        self._summing: list[tuple[Transfer, PendingChecksum]] = []  # parts whose checksum is being computed
        self._on_device = on_device
        self._yield_if_due = yield_if_due
        self._event_query = event_query
        self._many = many
        self._most_active = _ACTIVE_MANY if many or on_device else _ACTIVE
        self._shortest_s = _SHORTEST_MANY_S if many and not on_device else _SHORTEST_S
        self._paths = paths
        self._aux = aux
        self._connections = connections
        self._progress = progress
        self._wait_for_tags = wait_for_tags
        self._report = report
        self._wake = wake
        self._telemetry = telemetry
        self._queue: deque[Transfer] = deque()
        self._active: list[Flight] = []
        self._draining: list[Flight] = []
        self._waiting: dict[str, deque[Transfer]] = {}  # by slow peer
        self._jobs: deque[Callable[[], None]] = deque()
        self._job_running = False
        self._drop_cancelled_at = 0.0
        self._progress_due_s = 0.0
        self._aftermath_ends_s = 0.0
        self._moved = False
        self._starting_ns = 0  # spent on beginning parts since the last turn
        self._pause_s = self._shortest_s

    def oldest_write_ns(self, peer: str) -> int | None:
        """Returns the time since the oldest flight to a peer began; None if there is none. For any thread."""
        began = [flight.began_ns for flight in (*self._active, *self._draining) if flight.order.peer == peer]
        return time.monotonic_ns() - min(began) if began else None

    @property
    def drained(self) -> bool:
        """Whether no write is in flight."""
        return not self._active and not self._summing and not self._draining and not self._job_running

    def put(self, order: Transfer) -> None:
        """Queues a part; begins it at once if there are cores to spare, not after all other news of the turn."""
        self._queue.append(order)
        if self._many:
            self._begin_queued()

    def run_between(self, job: Callable[[], None]) -> None:
        """Runs `job` on a thread of its own while no part is transferred: measurements of a connection take long."""
        self._jobs.append(job)
        self._wake()

    def idle(self) -> bool:
        return not (self._queue or self._active or self._summing or self._waiting or self._job_running)

    def wait_s(self) -> float:
        if self._queue and self._may_begin():
            return 0.0
        if self._moved and not self._many:
            return 0.0
        if self._checksums_running():
            return _SHORTEST_ON_DEVICE_S
        if self._active:
            if not self._on_device:
                return self._pause_s
            if self._event_query and all(flight.event is not None for flight in self._active):
                return _DRAIN_S  # the events end the wait
            age_s = (time.monotonic_ns() - self._active[-1].began_ns) * 1e-9
            return min(max(age_s * _SHARE_OF_AGE, _SHORTEST_ON_DEVICE_S), _LONGEST_S)
        if self._draining or self._waiting or self._summing:
            return _DRAIN_S
        return max(0.0, self._progress_due_s - time.monotonic())

    def wait(self, polled: ctypes.Array[Any], turns: Turns, timeout_s: float, pause_s: float) -> int | None:
        """Lets the transport work while nothing else is to be done; for the arguments see `Transport.wait_for_tags`.

        Returns:
            Monotonic ns at the end of the wait, before this thread waited for the GIL again; None if there was none.
        """
        if self._wait_for_tags is None or self._waiting or self._jobs or not (self.idle() and self.drained):
            return None
        try:
            waited = self._wait_for_tags(polled, turns, timeout_s, pause_s)  # nobody sends tags to a prefill rank
        except Exception:  # the turn that follows a wait without the transport has messages and deadlines
            self._telemetry.metrics.add("kvctl_transport_errors_total", 1)
            return None
        if waited is None:
            return None
        self._set_progress_due()
        return waited.ended_ns

    def events(self) -> Sequence[DeviceEvent]:
        """Returns the events of the GPU that flights wait for."""
        if not self._event_query:
            return ()
        return [flight.event for flight in self._active if flight.event is not None]

    def turn(self) -> None:
        self._start_job()
        self._moved = self._begin_waiting() or self._starting_ns > 0
        self._begin_queued()
        self._starting_ns = 0
        if self._summing:
            self._take_checksums()
        for flight in self._active[:]:
            if self._advance(flight):
                self._active.remove(flight)
                self._moved = True
                if (ranges := self._telemetry.ranges) is not None:
                    ranges.end(flight)
            self._yield_if_due()
        self._drain()
        self._pause_s = self._shortest_s if self._moved else min(2 * self._pause_s, _LONGEST_S)
        now = time.monotonic()
        if self._active or self._moved:
            self._aftermath_ends_s = now + _AFTERMATH_S
        if not self._active and now >= self._progress_due_s:
            self._let_engine_work()

    def _begin_queued(self) -> None:
        """Begins queued parts for as long as one turn may take for that."""
        while self._queue and self._starting_ns < _STARTING_NS and self._may_begin():
            since_ns = time.monotonic_ns()
            self._begin(self._queue.popleft())
            self._moved = True
            self._yield_if_due()
            self._starting_ns += time.monotonic_ns() - since_ns

    def _may_begin(self) -> bool:
        return not self._jobs and not self._job_running and self._has_capacity()

    def _start_job(self) -> None:
        """Starts the next job if no part is being transferred."""
        if self._jobs and not self._job_running and not self._active and not self._summing:
            self._job_running = True
            threading.Thread(
                target=self._run_job, args=[self._jobs.popleft()], name="kvctl-between", daemon=True
            ).start()

    def _run_job(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:  # reported by the function itself
            self._telemetry.metrics.add("kvctl_transport_errors_total", 1)
        self._job_running = False
        self._wake()

    def _begin_waiting(self) -> bool:
        """Begins the waiting parts that may begin now, and drops the cancelled ones; returns whether there were any."""
        moved = False
        now = time.monotonic()
        for peer, orders in list(self._waiting.items()):
            while orders and self._has_capacity() and not self._must_wait(orders[0]):
                moved = True
                self._start(orders.popleft())
            if now >= self._drop_cancelled_at and any(order.cancel.dropped for order in orders):
                for _ in range(len(orders)):
                    order = orders.popleft()
                    if order.cancel.dropped:
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
        if order.cancel.dropped:
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
        if len(self._active) + self._checksums_running() < self._most_active:
            return True
        since = time.monotonic_ns() - _STUCK_NS
        return sum(flight.began_ns > since for flight in self._active) < self._most_active

    def _let_engine_work(self) -> None:
        """Lets the transport send tags and answer peers: often after the last flight, and seldom later."""
        self._set_progress_due()
        try:
            self._progress()
        except KvctlError:
            self._telemetry.metrics.add("kvctl_transport_errors_total", 1)

    def _set_progress_due(self) -> None:
        now = time.monotonic()
        self._progress_due_s = now + (_AFTERMATH_PAUSE_S if now < self._aftermath_ends_s else _IDLE_S)

    def _begin(self, order: Transfer) -> None:
        if order.peer in self._waiting or self._must_wait(order):
            self._waiting.setdefault(order.peer, deque()).append(order)
        else:
            self._start(order)

    def _start(self, order: Transfer) -> None:
        """Starts a part: first its checksum, if one is to be sent, otherwise its flight."""
        connection = self._connections.get(order.peer)
        if self._checksums is None or connection is None or order.cancel.dropped:
            self._fly(order)
            return
        share, key = order.share, order.key
        try:
            if share is None:
                order = _with_checksum(order, aux_checksum(connection.pool, int(order.src_pages[0])))
            else:  # The pages are computed and no longer change.
                where = order.src_pages, share.src_head, key.lo, key.hi, share.src_split
                self._summing.append((order, self._checksums.begin(share, *where)))
                return
        except Exception as error:
            self._report_failed(order, error, in_flight=False)
            return
        self._fly(order)

    def _take_checksums(self) -> None:
        """Starts the flights of the parts whose checksum is known, unless the lease has expired meanwhile."""
        for each in self._summing[:]:
            order, pending = each
            try:
                if not pending.done() or not (order.cancel.dropped or order.cancel.lease.valid(time.monotonic_ns())):
                    continue
            except Exception as error:
                self._report_failed(order, error, in_flight=False)
            else:
                self._fly(_with_checksum(order, pending.value))
            self._summing.remove(each)
            self._moved = True

    def _checksums_running(self) -> int:
        """Returns the number of parts whose checksum is being computed and whose peer's lease is valid."""
        if not self._summing:  # each turn asks several times, and a turn takes 2 µs
            return 0
        now_ns = time.monotonic_ns()
        return sum(order.cancel.lease.valid(now_ns) for order, _ in self._summing)

    def _fly(self, order: Transfer) -> None:
        if order.cancel.dropped:
            self._report(PartSent(order.peer, order.room, order.nonce, order.kind, order.key, dropped=True))
            return
        connection = self._connections.get(order.peer)
        if connection is None:
            self._report_failed(order, TransportError(f"no connection to {order.peer}"), in_flight=False)
            return
        path = self._aux if order.kind is PartKind.AUX else self._paths[order.path]
        try:
            if order.aux_row < 0:
                flight = path.start(connection, order)
            else:
                row = connection.pool.aux_row(order.aux_row)
                flight = path.start(connection, replace(order, tag=with_row(order.tag, row)))
                flight.row = row
            self._active.append(flight)
        except Exception as error:
            self._report_failed(order, error, in_flight=False)
            return
        if (ranges := self._telemetry.ranges) is not None:
            ranges.begin(self._active[-1], f"kv {order.path} {order.key} of room {order.room} to {order.peer}")

    def _advance(self, flight: Flight) -> bool:
        """Advances one flight; returns whether the flight is no longer active."""
        order, posts = flight.order, flight.posts
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
        elif flight.posts != posts:
            self._moved = True
        return done

    def _report_done(self, flight: Flight) -> None:
        order = flight.order
        if order.cancel.cancelled:
            self._report(PartSent(order.peer, order.room, order.nonce, order.kind, order.key, dropped=True))
            return
        moments = flight.moments()
        checksum = None if self._checksums is None else Tag.unpack(order.tag).checksum
        part = order.peer, order.room, order.nonce, order.kind, order.key
        self._report(PartSent(*part, moments, checksum=checksum, row=flight.row))
        if order.kind is PartKind.KV:
            flight.connection.wire_times_ns.append(moments["wire"] - moments["post"] + flight.post_ns)
            path = (order.path,)
            self._telemetry.count(
                (
                    ("kvctl_writes_total", 1, path),
                    ("kvctl_descriptors_total", flight.descriptors, path),
                    ("kvctl_engine_posts_total", flight.posts, path),
                )
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
            self._telemetry.metrics.add("kvctl_transport_errors_total", 1)
        # An error of another type is a bug, which fails the part but does not end the loop.
        text = str(error) if isinstance(error, KvctlError) else f"{type(error).__name__}: {error}"
        text = f"{order.key} to {order.peer} by {order.path}: {text}"
        self._report(PartFailed(order.peer, order.room, order.nonce, order.kind, order.key, code, text, in_flight))


def _with_checksum(order: Transfer, checksum: int) -> Transfer:
    return replace(order, tag=with_checksum(order.tag, checksum))


def _abandoned(flight: Flight) -> bool:
    """Abandons a flight; returns whether the transport can no longer write any of its bytes.

    Returns False after an exception, which does not prove that and must not end the loop.
    """
    try:
        return flight.give_up()
    except Exception:
        return False
