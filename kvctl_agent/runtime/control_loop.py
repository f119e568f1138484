"""Control loop: the thread that owns the protocol machine, the control sockets and the registry.

Each turn waits for input, passes it to the machine, executes the machine's actions, lets the tasks (transfers,
arrivals, device events) make progress, and sends one frame to each peer. One thread does all of this, because a
hand-over to another thread takes as long as the transfer of a small room, and because after each wait a thread needs
the GIL again, which the engine's thread may have. The loop never waits for a peer or an observer; exceptions are
recorded and the loop continues.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future
from math import inf
from typing import Any

import zmq

from kvctl_agent import gil
from kvctl_agent.device.base import Event
from kvctl_agent.errors import LocalProtocolError
from kvctl_agent.host.sockets import shortage
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.bootstrap_registry import NOWHERE, Lookup, Rank, Register, Whereabouts
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.messages import MAX_TEXT, Hello, PeerInfo, RoomAccepted, StagingGrants
from kvctl_agent.protocol.peer import LocalInfo, PeerState
from kvctl_agent.runtime import control_endpoints
from kvctl_agent.runtime.arrivals import Arrivals
from kvctl_agent.runtime.bootstrap import Registries, RegistryServer
from kvctl_agent.runtime.control_channel import ControlChannel
from kvctl_agent.runtime.event_poller import EventPoller
from kvctl_agent.runtime.handles import HandleRegistry
from kvctl_agent.runtime.liveness import is_dead
from kvctl_agent.runtime.peer_connections import PeerConnections
from kvctl_agent.runtime.pipelining import Pipelining
from kvctl_agent.runtime.transfers import Transfers
from kvctl_agent.runtime.waiting import InputWait, LoopTask, minimize_timer_slack, turns_of_loop
from kvctl_agent.security.curve import ZapAuthenticator
from kvctl_agent.telemetry.engine_calls import SilentEngine
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.region import Cell

_TICK_NS = 100_000_000
_LIVENESS_NS = 500_000_000
_STALL_NS = 1_000_000_000  # so late a tick finds messages that have waited, and peers that may have stood still, too
_LONGEST_WAIT_S = 0.1
_LANDING_ROUNDS, _LANDING_PAUSE_S = 20, 1e-3
_ROUNDS_A_TURN = 2  # then messages are read and sent again
_LAST_TURN_S = 1.0
_SPARE_DESCRIPTORS = 32  # left free by connections to prefill instances: for clients, the engine, a look at /proc
# Plain integers: an operation on zmq's enumerations takes 0.9 µs, the call that asks a socket 1.5 µs.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

_Incarnation = tuple[str, int, PeerInfo | None]  # name of a peer, number of the incarnation, what it said of itself


class Mailbox:
    """Queue of events for the control loop, filled by any thread; `fileno` is readable while it may hold events."""

    def __init__(self) -> None:
        self._events: deque[ev.Event] = deque()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.RLock()
        self._woken = False
        self._batching = 0  # thread that is inside `batch`
        self._wake_later = False  # at the end of its batch
        self._closed = False

    def fileno(self) -> int:
        """Returns the descriptor to poll."""
        return self._fd

    def put(self, *events: ev.Event) -> None:
        """Queues events and wakes the loop. Events queued after `close` are never read."""
        self._events.extend(events)
        self.wake()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Returns a context that wakes the loop once, at its end, for all that the calling thread puts or wakes in it.

        A context inside another one of the same thread does nothing; one of another thread ends this one early.
        """
        if self._batching == threading.get_ident():
            yield
            return
        self._batching = threading.get_ident()
        try:
            yield
        finally:
            self._batching = 0
            if self._wake_later:
                self._wake_later = False
                self.wake()

    def wake(self) -> None:
        """Wakes the loop by making the descriptor readable."""
        if self._woken:
            return  # the loop will read the queue before it sleeps again
        if self._batching == threading.get_ident():
            self._wake_later = True
            return
        with self._lock:
            if not self._closed and not self._woken:
                self._woken = True
                gil.eventfd_write(self._fd)

    def take(self, readable: bool = False) -> list[ev.Event]:
        """Removes and returns all queued events, in order.

        Args:
            readable: the descriptor was found readable, so that it is reset also if somebody else has written to it, as
                the copy pool does.
        """
        if self._woken or readable:
            # `wake` sets the flag and writes in two steps. Without the lock the flag could be cleared between them,
            # which would leave the descriptor readable and the loop spinning.
            with self._lock:
                if not self._closed:
                    with contextlib.suppress(BlockingIOError):
                        gil.eventfd_read(self._fd)
                self._woken = False
        events: list[ev.Event] = []
        queue = self._events
        while queue:
            events.append(queue.popleft())
        return events

    def close(self) -> None:
        """Closes the descriptor; idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)


class OperatorRequests:
    """Passes operators' requests to the machine, and waits for its answers.

    Args:
        put: queues an event for the machine.
    """

    def __init__(self, put: Callable[[ev.Event], None]) -> None:
        self._put = put
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[ev.Answered]] = {}

    def ask(self, make: Callable[[int], ev.Event], timeout: float) -> ev.Answered | None:
        """Queues the event that `make` returns for a new request number, and waits for the machine's answer.

        Returns None without an answer within `timeout` seconds; the machine may still act on the request.
        """
        number = next(self._numbers)
        pending = self._pending[number] = Future[ev.Answered]()
        try:
            self._put(make(number))
            return pending.result(timeout)
        except TimeoutError:
            return None
        finally:
            del self._pending[number]

    def answer(self, action: ev.Answered) -> None:
        """Passes an answer to the thread that waits for it; does nothing if the request has timed out."""
        pending = self._pending.get(action.ticket)
        if pending is not None:
            pending.set_result(action)


class ControlLoop:
    """Thread that runs one machine; other threads reach it through the mailbox.

    Attributes:
        requests: operator requests to the machine; `ask` may be called from any thread.
        executors: by type of action, the function that executes it on this thread.
    """

    def __init__(
        self,
        local: LocalInfo,
        machine: Machine,
        mailbox: Mailbox,
        channel: ControlChannel,
        registries: Registries,
        telemetry: Telemetry,
        handles: HandleRegistry,
        connections: PeerConnections,
        pipelining: Pipelining,
        *,
        transfers: Transfers | None = None,
        arrivals: Arrivals | None = None,
        event_poller: EventPoller | None = None,
        reported: deque[ev.Event] | None = None,
        wait: InputWait | None = None,
        server: RegistryServer | None = None,
        authenticator: Callable[[], ZapAuthenticator] | None = None,
    ) -> None:
        """Creates the loop; `open` binds and connects its sockets, `start` starts its thread.

        Args:
            transfers: prefill: executes `Transfer`.
            arrivals: decode: executes `Scatter`, `Check` and `StoreAux`.
            event_poller: prefill, pool on a device: polls the engine's events.
            reported: events that the tasks have reported, to be handled in the same turn.
            wait: waits for input; None for one without a transport.
            server: first prefill rank: the registry of its instance.
            authenticator: starts the authenticator of the control sockets; None without keys.
        """
        self._local = local
        self._machine = machine
        self._channel = channel
        self._mailbox = mailbox
        self._mailbox_key = mailbox.fileno()
        self._mailbox_only: Set[Any] = frozenset({self._mailbox_key})
        self._registries = registries
        self._server = server
        self._start_authenticator = authenticator
        self._authenticator: ZapAuthenticator | None = None
        self._telemetry = telemetry
        self._region = telemetry.region
        self._silent_engine = SilentEngine(telemetry.region)
        self._handles = handles
        self._connections = connections
        self._tasks: list[LoopTask] = [task for task in (event_poller, transfers, arrivals) if task is not None]
        self._transfers = transfers
        self._event_poller = event_poller
        self._reported = deque[ev.Event]() if reported is None else reported
        self.requests = OperatorRequests(mailbox.put)
        self._stop_by_s = inf
        self._tick_ns = self._stalled_ns = 0
        self._liveness_ns = 0
        self._channel_due_ns = 0
        self._flush_now = self._ask_now = False
        self._polled: list[zmq.Socket[bytes] | int] = []
        self._input = InputWait(turns_of_loop(), telemetry.waited) if wait is None else wait
        self._sockets_used = True  # those of ZeroMQ, since they were asked and had no input
        self._channel_uses_zmq = True
        self._changes = (-1, -1)
        self._registry_keys: Set[Any] = frozenset()
        self._thread = threading.Thread(target=self._run, name=f"{local.name}-control", daemon=True)
        self.executors: dict[type[ev.Action], Callable[[Any], None]] = {
            ev.Send: self._send,
            ev.ConnectPeer: self._connect_peer,
            ev.DropPeer: self._drop_peer,
            ev.ForgetPeer: self._forget_peer,
            ev.FindInstance: self._find_instance,
            ev.ForgetInstance: lambda action: registries.forget(action.instance),
            ev.StateChanged: handles.change_state,
            ev.Released: handles.release,
            ev.Recalled: handles.end_recall,
            ev.Overlapped: pipelining.learn,
            ev.Answered: self.requests.answer,
        }
        if transfers is not None:
            self.executors[ev.Transfer] = transfers.put
        if arrivals is not None:
            self.executors |= {ev.Scatter: arrivals.put, ev.Check: arrivals.put, ev.StoreAux: arrivals.store_aux}

    def open(self, instances: Sequence[str], listen: str = "", at: Whereabouts = NOWHERE) -> tuple[str, ...]:
        """Binds and connects the control sockets; registers with, or looks up, the registries at `instances`.

        Args:
            listen: prefill: host or host:port of the control socket, as for `control_address`.
            at: where operators find this agent, for the registries.

        Returns:
            `instances`, with the port that was chosen for a registry that this rank serves.

        Raises:
            ConfigError: an address is taken or cannot be bound.
        """
        local = self._local
        if self._start_authenticator is not None:
            self._authenticator = self._start_authenticator()
        if self._server is not None:
            instances = (self._server.serve().endpoint,)
        if local.role == "prefill":
            endpoint = self._channel.serve(control_endpoints.control_address(instances[0], local.name, listen))
            side = local.side
            sizes = [side.dp, side.pp, side.cp, side.tp]
            rank = Rank(local.name, endpoint, local.incarnation, list(local.coord), sizes, at)
            self._registries.request = Register(rank)
        else:
            self._registries.request = Lookup(local.name, local.incarnation, at)
        for instance in instances:
            self._registries.ask(instance)
        return tuple(instances)

    def add_task(self, task: LoopTask) -> None:
        """Adds a task to those of every turn, before `start`."""
        self._tasks.append(task)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Ends the loop as soon as the tasks are idle and peers know how the rooms have ended, so before Bye.

        At the latest it ends after `timeout` seconds.

        Returns:
            whether the thread has ended, or was never started, and no task was in progress.
        """
        self._stop_by_s = time.monotonic() + timeout
        self._mailbox.wake()
        if self._thread.ident is None:
            self._close_sockets()
        elif self._thread.is_alive():
            self._thread.join(timeout + _LAST_TURN_S)
        if self._authenticator is not None:
            self._authenticator.close()
        return not self._thread.is_alive() and self._idle()

    def _run(self) -> None:
        minimize_timer_slack()
        self._region.cells[Cell.LOOP_ENDED_NS] = 0
        try:
            ended = False
            while not ended:
                stopping = self._stop_by_s < inf  # before the turn, so that it handles all events put before `close`
                self._try_turn()
                settled = stopping and self._idle() and not self._machine.unanswered()
                ended = settled or time.monotonic() >= self._stop_by_s
            if self._event_poller is not None:
                self._event_poller.close()
            drained = self._transfers is None or self._transfers.drained
            self._mailbox.put(ev.Shutdown(drained and self._idle()))
            self._try_turn(wait=False)
        finally:
            self._region.cells[Cell.LOOP_ENDED_NS] = time.monotonic_ns()
            self._channel.flush(everything=True)
            self._close_sockets()
            self._telemetry.flush()
            self._input.end()

    def _idle(self) -> bool:
        return all(task.idle() for task in self._tasks)

    def _close_sockets(self) -> None:
        self._channel.close()
        self._registries.close()
        if self._server is not None:
            self._server.close()

    def _poll(self) -> Set[Any]:
        """Waits for input or for the next deadline; returns the readable sockets and descriptors."""
        changes = self._channel.changes, self._registries.changes
        if changes != self._changes:
            self._changes = changes
            self._register_sockets()
        self._channel_due_ns = self._channel.due_ns or self._tick_ns
        due_s = (min(self._tick_ns, self._channel_due_ns) - time.monotonic_ns()) * 1e-9
        wait_s = due_s
        for task in self._tasks:
            wait_s = min(wait_s, task.wait_s())
        due_s -= self._input.pause(self._machine.open_rooms, wait_s)
        wait_s = min(wait_s, due_s)
        # A ZeroMQ socket's descriptor becomes readable for new messages only, and any call on the socket may take that
        # notice: after such calls the sockets are asked themselves.
        ready = {socket for socket in self._polled if _has_input(socket)} if self._sockets_used else set[Any]()
        self._sockets_used = bool(ready)
        wait_s = 0.0 if ready else min(max(wait_s, 0.0), _LONGEST_WAIT_S)
        self._telemetry.flush()
        for index in self._input.wait(wait_s, min(max(due_s, 0.0), _LONGEST_WAIT_S), self._device_events()):
            socket = self._polled[index]
            if isinstance(socket, int) or _has_input(socket):
                ready.add(socket)
        return ready

    def _device_events(self) -> Sequence[Event]:
        """Returns the events of the GPU one of which makes a turn necessary when it is done."""
        if self._event_poller is None or self._transfers is None:
            return ()
        return (*self._event_poller.events(), *self._transfers.events())

    def _register_sockets(self) -> None:
        registry_sockets = [
            *self._registries.sockets(),
            *([control_endpoints.poll_key(self._server.socket)] if self._server else []),
        ]
        self._registry_keys = frozenset(registry_sockets)
        channel_sockets = self._channel.sockets()
        self._channel_uses_zmq = not all(isinstance(socket, int) for socket in channel_sockets)
        self._polled = [self._mailbox_key, *registry_sockets, *channel_sockets]
        self._sockets_used = True
        self._input.watch(
            [socket if isinstance(socket, int) else int(socket.getsockopt(zmq.FD)) for socket in self._polled]
        )

    def _try_turn(self, *, wait: bool = True) -> None:
        try:
            self._turn(self._poll() if wait else frozenset())
        except Exception as error:
            self._record_bug(error)

    def _turn(self, ready: Set[Any]) -> None:
        self._region.cells[Cell.TURN_NS] = time.monotonic_ns()
        for event in self._mailbox.take(self._mailbox_key in ready):
            self._feed(event)
            self._input.yield_if_due()
        now = time.monotonic_ns()
        channel_due = now >= self._channel_due_ns
        if channel_due or ready - self._mailbox_only:
            self._sockets_used |= self._channel_uses_zmq
            for received in self._channel.receive(ready):
                if isinstance(received.message, Hello):
                    self._check_replaced([(received.peer, received.incarnation)])
                elif isinstance(received.message, RoomAccepted):
                    self._input.expect()
                self._feed(received)
                self._input.yield_if_due()
        if self._ask_now or now >= self._tick_ns or not self._registry_keys.isdisjoint(ready):
            self._ask_now = False
            self._sockets_used = True
            if self._server is not None:
                for declined in self._server.turn():
                    self._feed(ev.DeclineRoom(declined.room, declined.reason[:MAX_TEXT]))
            for instance in self._registries.turn(ready, now):
                self._roster_changed(instance)
        now = time.monotonic_ns()  # of the whole tick: if the process is stopped from here on, the next tick notes it
        if now >= self._tick_ns and not self._note_stall(now):
            self._tick_ns = now + _TICK_NS
            self._check_liveness(now)
            self._silent_engine.look(now, self._handles.count)
            self._feed(ev.Tick(self._stalled_ns), now)
            self._stalled_ns = 0
            for peer, text in self._channel.tick(now):  # last: whatever its sockets raise, deadlines are kept
                self._feed(ev.PeerUnusable(peer, text))
        if channel_due or self._flush_now:
            self._flush()
        self._run_tasks()
        if self._flush_now:
            self._flush()

    def _note_stall(self, now_ns: int) -> bool:
        """Notes a tick that is very late; returns whether the next turn must first read what peers have sent meanwhile.

        This thread had no core or no interpreter, or the process or the whole machine was stopped.
        """
        late_ns = now_ns - self._tick_ns if self._tick_ns else 0
        if late_ns < _STALL_NS:
            return False
        self._tick_ns = now_ns
        self._stalled_ns += late_ns
        held_up = f"the control loop was held up for {late_ns / 1e9:.1f} s"
        why = "it had no core or no interpreter, was stopped, or a call took long"
        self._telemetry.recorder.record("stall", f"{held_up}: {why}", "warning")
        return True

    def _flush(self) -> None:
        self._flush_now = False
        self._sockets_used |= self._channel_uses_zmq
        for unsendable in self._channel.flush():
            self._feed(unsendable)

    def _run_tasks(self) -> None:
        """Lets every task make progress and handles the events that they report, until there are no more."""
        for _ in range(_ROUNDS_A_TURN):
            for task in self._tasks:
                task.turn()
                self._input.yield_if_due()
            if not self._reported:
                return
            while self._reported:
                self._feed(self._reported.popleft())
                self._input.yield_if_due()

    def _feed(self, event: ev.Event, now_ns: int = 0) -> None:
        """Passes one event to the machine and executes the actions that it returns; `now_ns` is the present time if 0.

        An action that causes another event puts it into `_reported`: if it called this method, the messages of that
        event would overtake those of the actions that are still to be executed.
        """
        try:
            actions = self._machine.handle(event, now_ns or time.monotonic_ns())
        except LocalProtocolError as error:
            self._telemetry.recorder.record("engine", str(error), "error")
            if isinstance(event, ev.SendRoom | ev.OpenRoom):
                self._handles.refuse(event.room, str(error))
            return
        except Exception as error:
            self._record_bug(error)
            return
        for action in actions:
            try:
                self.executors[type(action)](action)
            except Exception as error:
                self._record_bug(error)

    def _record_bug(self, error: Exception) -> None:
        """Records a bug of the agent or of an engine's callback, which costs one event or action but not the loop."""
        self._telemetry.metrics.add("kvctl_internal_errors_total", 1)
        self._telemetry.recorder.record("control", f"{type(error).__name__}: {error}", "error")

    def _find_instance(self, action: ev.FindInstance) -> None:
        if not self._is_short_for(action.instance):
            self._registries.ask(action.instance)
            self._ask_now = True

    def _is_short_for(self, instance: str) -> bool:
        """Returns whether too few descriptors are left to connect to a prefill instance; the machine is told then."""
        if (text := shortage(_SPARE_DESCRIPTORS)) is None:
            return False
        self._reported.append(ev.InstanceUnreachable(instance, text))
        return True

    def _roster_changed(self, instance: str) -> None:
        roster = self._registries.roster(instance)
        assert roster is not None
        if roster.refused:
            self._telemetry.recorder.record("bootstrap", roster.refused, "error")
        if self._machine.local.role != "decode":
            return
        if not roster.complete:
            self._feed(ev.RosterMissing(instance, roster.refused or roster.missing))
        else:
            self._check_replaced((rank.name, rank.incarnation) for rank in roster.ranks)
            names = tuple(rank.name for rank in roster.ranks)
            self._feed(ev.RosterKnown(instance, names, tuple(rank.incarnation for rank in roster.ranks)))
            for rank in roster.ranks:
                if rank.name not in self._machine.roster(instance):
                    continue
                if self._channel.endpoint(rank.name) != rank.endpoint and self._is_short_for(instance):
                    return
                self._channel.connect(rank.name, rank.endpoint)

    def _check_liveness(self, now_ns: int) -> None:
        """Looks for peers on this host whose process has ended, so that rooms need not wait for the peers' timeout.

        Also closes control connections that no incarnation of a peer uses any more.
        """
        if now_ns < self._liveness_ns:
            return
        self._liveness_ns = now_ns + _LIVENESS_NS
        suspects: list[_Incarnation] = []
        for peer in self._machine.peers.values():
            if not peer.proven_dead and peer.state is not PeerState.REFUSED:
                suspects.append((peer.name, peer.incarnation, peer.info))
            suspects += [(peer.name, incarnation, former.info) for incarnation, former in peer.former.items()]
            self._channel.keep(peer.name, {peer.route, *(former.route for former in peer.former.values())})
        self._check_ended(suspects)

    def _check_replaced(self, newcomers: Iterable[tuple[str, int]]) -> None:
        """Checks, when other incarnations have peers' names, whether the peers' earlier processes have ended."""
        suspects: list[_Incarnation] = []
        for name, incarnation in newcomers:
            peer = self._machine.peers.get(name)
            if peer is not None and not peer.proven_dead and peer.incarnation != incarnation:
                suspects.append((name, peer.incarnation, peer.info))
        self._check_ended(suspects)

    def _check_ended(self, suspects: Sequence[_Incarnation]) -> None:
        """Reports incarnations of peers whose process on this host has ended, once nothing of them can land any more.

        The bytes that a process has sent outlive it in the sockets of this host, megabytes of them, until the engine
        takes them.
        """
        ended = [
            (name, incarnation, info)
            for name, incarnation, info in suspects
            if info is not None and info.host == self._local.host and is_dead(info.pid)
        ]
        for _ in range(_LANDING_ROUNDS if ended else 0):
            self._run_tasks()
            self._input.sleep(_LANDING_PAUSE_S)
        for name, incarnation, info in ended:
            self._connections.ended(info)
            self._feed(ev.PeerDead(name, incarnation, f"process {info.pid} has ended"))

    def _send(self, action: ev.Send) -> None:
        peer = self._machine.peers.get(action.peer)
        route = action.route
        # A Hello goes to the endpoint that the registry names, all other messages to the peer's return address.
        if not route and peer is not None and not isinstance(action.message, Hello):
            route = peer.route
        self._channel.queue(action.peer, action.message, route, self._machine.open_rooms <= 1)
        self._flush_now = True
        if isinstance(action.message, StagingGrants):
            self._input.expect()

    def _connect_peer(self, action: ev.ConnectPeer) -> None:
        try:
            self._connections.connect(action.peer, action.info, action.inputs)
        except Exception as error:
            self._reported.append(ev.PeerUnusable(action.peer, str(error)))
        else:
            self._reported.append(ev.PeerConnected(action.peer))

    def _drop_peer(self, action: ev.DropPeer) -> None:
        self._connections.drop(action.peer)
        self._channel.renew(action.peer)
        self._registries.hurry()
        self._ask_now = True

    def _forget_peer(self, action: ev.ForgetPeer) -> None:
        self._connections.drop(action.peer)
        self._channel.disconnect(action.peer)


def _has_input(socket: zmq.Socket[bytes] | int) -> bool:
    return not isinstance(socket, int) and bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)
