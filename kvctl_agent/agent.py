"""The agent a worker embeds: builds all parts, owns their lives; the only file that knows them all."""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

import zmq

from kvctl_agent import assembly
from kvctl_agent.admin.actions import AdminActions
from kvctl_agent.admin.queries import AdminQueries
from kvctl_agent.admin.remote_endpoint import remote_endpoint
from kvctl_agent.admin.server import AdminServer
from kvctl_agent.contract.choices import BULK, DIRECT, SLICE, STAGED
from kvctl_agent.contract.config import Value
from kvctl_agent.contract.connection_cost import ConnectionCost
from kvctl_agent.contract.settings import load_settings
from kvctl_agent.contract.values import shown
from kvctl_agent.device.base import RowCopies
from kvctl_agent.errors import ConfigError, DeadlineExceeded, LayoutError, LocalProtocolError
from kvctl_agent.export.exports import Exports
from kvctl_agent.layout.chunks import prefix_pages
from kvctl_agent.layout.layer_grouping import ForwardInfo, Grouping
from kvctl_agent.layout.local_shard import local_shards as layout_of
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.buffers import RingMemory, StagingBuffers
from kvctl_agent.memory.copier import Copier
from kvctl_agent.memory.copy_pool import CopyPool
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.paths.base import Path
from kvctl_agent.paths.bulk import AuxPath, BulkPath
from kvctl_agent.paths.direct import DirectPath
from kvctl_agent.paths.path_chooser import PathChooser
from kvctl_agent.paths.slice import SlicePath
from kvctl_agent.paths.staged import StagedPath
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.recording import InputLog
from kvctl_agent.protocol.registry import Roster
from kvctl_agent.rank import Rank
from kvctl_agent.runtime import control_endpoints
from kvctl_agent.runtime.action_executor import ActionExecutor
from kvctl_agent.runtime.arrival_loop import ArrivalLoop
from kvctl_agent.runtime.bootstrap import Registries
from kvctl_agent.runtime.control_channel import ControlChannel
from kvctl_agent.runtime.control_loop import ControlLoop
from kvctl_agent.runtime.control_setup import set_up_control
from kvctl_agent.runtime.event_poller import EventPoller
from kvctl_agent.runtime.handle_registry import HandleRegistry, OnState
from kvctl_agent.runtime.handles import PoolLimits, Receive, Send, check_flag, check_room, check_timeout
from kvctl_agent.runtime.mailbox import Mailbox
from kvctl_agent.runtime.operator_requests import OperatorRequests
from kvctl_agent.runtime.page_owners import written
from kvctl_agent.runtime.peer_connections import PeerConnections
from kvctl_agent.runtime.pipelining import Pipelining
from kvctl_agent.runtime.readiness import check_fit, waiting_for
from kvctl_agent.runtime.transfer_worker import TransferWorker
from kvctl_agent.security.curve import load_fleet_key
from kvctl_agent.security.rejected_keys import RejectedKeys
from kvctl_agent.security.zap_authenticator import ZapAuthenticator
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.transport.base import Transport
from kvctl_agent.transport.registry import open_transport, parse_params


class Agent:
    """One rank's agent. One per process in a worker; several per process work.

    Args:
        role: "prefill" or "decode".
        rank: where this worker stands in its instance.
        pool: its KV pool, registered as it is.
        name: unique on this host; the admin socket's name.
        bootstrap: endpoint of the registry (`ipc:///path` or `tcp://address:port`); the first prefill rank serves it.
            A decode rank may be given those of several prefill instances; `receive` may name more.
        model: the whole model's KV; needed where this rank's pool is not all of its layers.
        on_state: called on the control thread at each change of a room's state (of a fake room, by the call that makes
            it); it must only enqueue.
        config: any key of `contract.config`, with origin "argument".

    Raises:
        ConfigError, MemoryLayoutError, LayoutError: something given is wrong; says what.
        TransportUnavailable: the engine is not installed; says how to get it.
    """

    def __init__(
        self,
        *,
        role: Literal["prefill", "decode"],
        rank: Rank,
        pool: KVPool,
        name: str,
        bootstrap: str | Sequence[str],
        model: ModelShape | None = None,
        on_state: OnState | None = None,
        **config: Value,
    ) -> None:
        assembly.check_arguments(role, rank, pool, name, model, on_state)
        self.name = name
        self.role = role
        self.rank = rank
        self.pool = pool
        clock = self._open_clock()
        born = clock.wall_ns(clock.now_ns())
        self.incarnation = born >> 20 << 20 | secrets.randbits(20) | 1  # grows from life to life
        self.settings = load_settings(config)
        settings = self.settings
        self._keys = load_fleet_key(settings["fleet_key"])
        remote = remote_endpoint(settings, self._keys)
        self.exports = Exports(settings, name, role)
        self._instances = assembly.instances_of(role, bootstrap)
        for endpoint in self._instances:
            self._check_endpoint(endpoint)
        self.telemetry = Telemetry(
            name,
            role,
            history=settings["history_rooms"],
            failed=settings["failed_rooms"],
            timeline_events=settings["timeline_events"],
            recorder_events=settings["recorder_events"],
            clock=clock,
        )
        if model is None and rank.pp_size > 1:
            raise ConfigError("with pipeline stages a rank's pool is not the whole model: give the agent model=")
        self.shape = model or pool.shape()
        held = layout_of(self.shape, pool.page_size, rank.parallel_config, rank.coord)
        pool.assign_shards(held)
        assembly.check_settings(settings, pool)
        self.chooser = PathChooser(self.shape, pool.page_size, settings["path"], settings["staging"])
        self._desk = HandleRegistry(name, on_state, assembly.destinations_of(pool) if role == "decode" else None)
        self._forwards: EventPoller | None = None
        if role == "prefill" and pool.device is not None:
            self._forwards = EventPoller(f"{name}-forwards", pool.device)
        self._state: Literal["new", "running", "draining", "closed"] = "new"
        self._leaving = False  # the engine wants no more rooms, ever
        self._turning = threading.Lock()  # an operator may resume while the engine closes
        self.transport = self._open_transport()
        self._mailbox = Mailbox()
        self.workers: list[TransferWorker] = []
        self._crew: CopyPool | None = None
        self._copiers: list[Copier | RowCopies] = []
        self.buffers: StagingBuffers | None = None
        self.ring: RingMemory | None = None
        try:
            self.buffers, self.ring = assembly.staging_memory(role, settings, pool.device)
            self.transport.register(assembly.regions(pool, self.buffers or self.ring))
            told = self.chooser, self.telemetry.recorder, settings["direct_sms"]
            self.connections = PeerConnections(name, self.transport, pool, self.buffers, *told)
            self.machine = self._build_machine()
            self.pipelining = Pipelining(self.local.layers, pool.page_size, settings, self.telemetry.metrics)
            tickets = OperatorRequests()
            parts = (self.machine, self._desk, self.connections, self.pipelining, self.workers, tickets)
            self._hands = ActionExecutor(*parts)
        except BaseException:
            self.transport.close()
            self._mailbox.close()
            assembly.close_all((self.buffers, self.ring))
            raise
        self.observe = AdminQueries(self)
        operator = AdminActions(self, self._mailbox.put, tickets, lambda: self._admin.asker)
        telemetry = self.telemetry
        self._admin = AdminServer(
            name,
            {**self.observe.handlers(), **operator.handlers()},
            self.observe.hello,
            metrics=telemetry.metrics,
            recorder=telemetry.recorder,
            clock=telemetry.clock,
            remote=remote,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gatekeeper: ZapAuthenticator | None = None
        self._control: ControlLoop | None = None
        self.links: ControlChannel | None = None
        self._registries: Registries | None = None
        self._at_exit = _close_at_exit(self)

    # ---- building ---------------------------------------------------------------------------------------------

    def _open_clock(self) -> Clock:
        """The one wall clock; the rig puts faults between an agent and this, and the next three."""
        return Clock()

    def _open_transport(self) -> Transport:
        """The engine."""
        settings = self.settings
        params = parse_params(settings["transport_params"])
        return open_transport(settings["transport"], self.name, params, self.pool.device)

    def _open_links(self, kind: Callable[..., ControlChannel] = ControlChannel) -> ControlChannel:
        """The control channel."""
        return kind(self._context, self.name, self.incarnation, self.telemetry, self._keys)

    def _open_arrivals(self, kind: Callable[..., ArrivalLoop] = ArrivalLoop) -> ArrivalLoop:
        report, name = self._mailbox.put, f"{self.name}-arrivals"
        return kind(name, self.transport, self.pool, self.ring, self._copier(), report, self.telemetry)

    def _copier(self) -> Copier:
        """For one thread."""
        assert self._crew is not None
        copier = assembly.copier_of(self.pool.device, self._crew)
        self._copiers.append(copier)
        return copier

    def _paths(self, buffers: StagingBuffers) -> dict[str, Path]:
        """Of one worker."""
        paths: dict[str, Path] = {BULK: BulkPath(), SLICE: SlicePath(), STAGED: StagedPath(buffers, self._copier())}
        if self.pool.device is not None:
            copies = self.pool.device.copies()
            self._copiers.append(copies)
            paths[DIRECT] = DirectPath(copies, self.settings["direct_sms"])
        return paths

    def _check_endpoint(self, endpoint: str) -> None:
        control_endpoints.check_endpoint(endpoint, insecure=self.settings["insecure"], keys=self._keys is not None)

    def _build_machine(self) -> Machine:
        self.local = assembly.local_of(
            self.name,
            self.role,
            self.rank,
            self.shape,
            self.pool,
            self.incarnation,
            self.settings,
            self.transport,
            self.ring,
        )
        self.inputs = InputLog(self.settings["record_inputs"])
        parts = (self.telemetry, self.chooser, self.inputs, self.connections.reaches)
        return assembly.machine_of(self.role, self.local, self.settings, *parts)

    # ---- life -------------------------------------------------------------------------------------------------

    def start(self) -> Agent:
        """Start the threads and the admin socket; returns at once, `wait_ready` waits for the peers.

        Raises:
            ConfigError: an address is taken or must not be bound.
            AdminError: another agent of this name is alive, or the socket's path is too long.
        """
        if self._state != "new":
            raise LocalProtocolError(f"agent {self.name} was started before; make a new one")
        self._state = "running"
        try:
            self._admin.start()
            self.exports.start(self.observe.metrics, self.telemetry)
            if (keys := self._keys) is not None:
                strangers = RejectedKeys(self.telemetry.metrics, self.telemetry.recorder)
                self._gatekeeper = ZapAuthenticator(
                    self._context, f"{self.name}-keys", lambda key: key == keys.public, strangers.refused
                )
            self._control = self._build_control()
            self._start_threads()
            self._control.start()
        except BaseException:
            self.close()
            raise
        return self

    def _build_control(self) -> ControlLoop:
        """Bind and connect the control sockets; the loop owns them from here on."""
        recorded = self.inputs if self.settings["record_inputs"] else None
        parts = (self.machine, self._hands, self._mailbox, self.telemetry)
        meeting = set_up_control(
            self.local, self._instances, self._context, self._keys, self._open_links, parts, recorded
        )
        self.links, self._registries = meeting.links, meeting.registries
        return meeting.control

    def _start_threads(self) -> None:
        self._crew = CopyPool(assembly.threads(self.settings["copy_threads"], 2), f"{self.name}-copy")
        if self.role == "decode":
            self._hands.arrivals = self._open_arrivals()
            self._hands.arrivals.start()
            return
        assert self.buffers is not None
        if self._forwards is not None:
            self._forwards.start()
        for number in range(assembly.workers(self.settings, self.pool.device)):
            worker = TransferWorker(
                f"{self.name}-transfer-{number}",
                self._paths(self.buffers),
                AuxPath(),
                self.connections.by_peer,
                self.transport.progress,
                self._mailbox.put,
                self.telemetry.metrics,
                self.settings["checksum"],
                self.pool.device is not None,
            )
            worker.start()
            self.workers.append(worker)

    def wait_ready(self, timeout: float) -> None:
        """Prefill: until registered. Decode: until every prefill rank of the instance has said hello.

        Raises:
            DeadlineExceeded: names who is missing.
            ConfigError: the registry or a peer refuses us; names the differing factor.
        """
        deadline = time.monotonic() + check_timeout(timeout)
        while (waiting := self.waiting_for()) is not None:
            if self._registries is not None:
                check_fit(self.name, self.role, self._instances, self._registries, self.machine)
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{self.name} was not ready after {timeout:g} s: {waiting}")
            time.sleep(0.01)

    def rosters(self) -> list[tuple[str, Roster]]:
        """Endpoints of the registries that are asked, and what each has said so far."""
        registries = self._registries
        return [] if registries is None else [(each, registries.roster(each)) for each in self._instances]

    def waiting_for(self) -> str | None:
        """What keeps this agent from serving, in words; None when nothing does."""
        if self._registries is None:
            return "it has not been started"
        return waiting_for(self.name, self.role, self._instances, self._registries, self.machine)

    @property
    def accepting(self) -> bool:
        """Whether the engine may begin rooms."""
        return self._state == "running"

    @property
    def draining(self) -> bool:
        """Whether it was told to take no new rooms."""
        return self._state == "draining"

    def begin_drain(self) -> None:
        """Take no new rooms from now on; rooms that a decode rank has opened here already are not new.

        Raises:
            LocalProtocolError: it is not running.
        """
        with self._turning:
            if self._state not in ("running", "draining"):
                raise LocalProtocolError(f"agent {self.name} is {self._state}")
            # In this order: an opening that comes between the two is refused, and our engine, if it comes too, is told.
            self.telemetry.drain(True)
            self._mailbox.put(ev.Drain(True))
            self._state = "draining"

    def resume(self) -> None:
        """Take new rooms again after `begin_drain`.

        Raises:
            LocalProtocolError: its engine has called `drain`, and is about to close it; or it is not running.
        """
        with self._turning:
            if self._leaving or self._state not in ("running", "draining"):
                state = "being closed by its engine" if self._leaving else self._state
                raise LocalProtocolError(f"agent {self.name} is {state}")
            self._state = "running"
            self.telemetry.drain(False)
            self._mailbox.put(ev.Drain(False))

    def drain(self, timeout: float) -> None:
        """Take no new rooms and wait until those in flight have ended.

        Raises:
            DeadlineExceeded: names the rooms still in flight.
        """
        deadline = time.monotonic() + check_timeout(timeout)
        self._leaving = True
        if self._state == "running":
            self.begin_drain()
        while self._desk.rooms:
            if time.monotonic() >= deadline:
                rooms = ", ".join(str(room) for room in sorted(self._desk.rooms)[:8])
                raise DeadlineExceeded(f"{self.name}: rooms still in flight after {timeout:g} s: {rooms}")
            time.sleep(0.002)

    def close(self, timeout: float = 5.0) -> None:
        """Fail what is in flight with a cause, stop all threads, release everything; idempotent, never hangs.

        In a process that was forked off it does nothing: all of it is the parent's.
        """
        timeout = check_timeout(timeout)
        if self.local.pid != os.getpid():
            return
        with self._turning:
            if self._state == "closed":
                return
            started = self._state != "new"
            self._state = "closed"
        deadline = time.monotonic() + timeout
        if started:
            for room in self._desk.rooms:
                self._mailbox.put(ev.AbortRoom(room, f"agent {self.name} is closing"))
            while self._desk.rooms and time.monotonic() < deadline - timeout / 2:
                time.sleep(0.002)
        ended = self._forwards is None or self._forwards.close(max(0.1, deadline - time.monotonic()))
        for worker in self.workers:
            ended &= worker.close(max(0.1, deadline - time.monotonic()))
        if self._hands.arrivals is not None:
            ended &= self._hands.arrivals.close(max(0.1, deadline - time.monotonic()))
        if self._control is not None:
            self._mailbox.put(ev.Shutdown(ended and all(worker.drained for worker in self.workers)))
            ended &= self._control.close(max(0.1, deadline - time.monotonic()))
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._desk.close()
        try:
            self._admin.close()
        except DeadlineExceeded as error:  # it goes when it has answered
            self.telemetry.recorder.record("admin", str(error), "warning")
        self.exports.close()
        self.transport.close()
        self._mailbox.close()
        atexit.unregister(self._at_exit)
        if ended:
            copied = assembly.copies_ended(self._copiers, self.telemetry.recorder)
            if copied:
                self.connections.close()
            if self._crew is not None:
                self._crew.close()
            self._context.destroy(0)  # not term: it would wait for sockets of a loop that was never started
            # Memory goes last, and only when no thread can touch it any more.
            if copied:
                assembly.close_all((self.buffers, self.ring))

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the engine's calls -----------------------------------------------------------------------------------

    def layer_groups(self, forward: ForwardInfo) -> Grouping:
        """Prefill: how the layers of one forward are to be sent; the reason is counted.

        No groups: call `send.pages`. Else give the groups to `send.prefetch` and call `send.layers` for each of them.
        """
        if not isinstance(forward, ForwardInfo):
            raise LayoutError(f"forward is {shown(forward)}: it must be a ForwardInfo")
        return self.pipelining.decide(forward)

    def send(self, room: int, *, fake: bool = False) -> Send:
        """Prefill: take part in sending `room`; may come before or after the decode side opens it.

        Args:
            fake: an engine's warm-up or health check: nothing moves, and the room has succeeded at once.

        Raises:
            LocalProtocolError: the room is no unsigned 64-bit number or in use here, or this is no running prefill
                agent.
        """
        room, fake = check_room(room), check_flag("fake", fake)
        self._check_running("prefill", begun=fake or self.machine.knows(room))
        handle = Send(room, _discard if fake else self._mailbox.put, self._bounds(), self._forwards)
        self._take(handle, fake)
        if not fake:
            self._mailbox.put(ev.SendRoom(room))
        return handle

    def receive(
        self,
        room: int,
        pages: Any,
        *,
        prefill: str | None = None,
        prefix_tokens: int = 0,
        aux_index: int | None = None,
        state_indices: Sequence[Any] = (),
        prefill_only: bool = False,
        fake: bool = False,
    ) -> Receive:
        """Decode: receive `room` into `pages`.

        Args:
            room: its bootstrap_room, an unsigned 64-bit number.
            pages: page numbers in this rank's pool for the prompt after its cached prefix, in prompt order.
            prefill: endpoint of the registry of the prefill instance that computes it; None: the agent's first one.
            prefix_tokens: tokens that this rank has cached already; whole pages.
            aux_index: row of the pool's aux tensor that receives the room's aux row; None for none.
            state_indices: for each state component, in the model's order, the items of this room in this rank's pool.
            prefill_only: the answer is complete after prefill: no KV is wanted, only what `finish` sends.
            fake: as for `send`.

        Raises:
            LocalProtocolError: the room is no unsigned 64-bit number or in use here; a page, item or aux row lies
                outside the pool, is given twice, or belongs to another room that may still be written to; or this is
                no running decode agent.
            LayoutError: the prefix is not page-aligned, or prefix and pages together are too many.
            ConfigError: `prefill` is no endpoint, or one that needs keys.
        """
        room, fake = check_room(room), check_flag("fake", fake)
        self._check_running("decode", begun=fake)
        if prefill is not None:
            self._check_endpoint(prefill)
        prefix = prefix_pages(prefix_tokens, self.pool.page_size)
        wanted = pages, prefix, aux_index, state_indices, prefill_only
        opening = self._bounds().opening(room, prefill or self._instances[0], *wanted)
        handle = Receive(room, _discard if fake else self._mailbox.put, self.pool.device)
        self._take(handle, fake, written(opening))
        if not fake:
            self._mailbox.put(opening)
        return handle

    def _check_running(self, role: str, *, begun: bool) -> None:
        """`begun`: it is no new room, and may come while draining; nor is a health check."""
        if self.role != role or not (self.accepting or (self.draining and begun)):
            raise LocalProtocolError(f"agent {self.name} ({self.role}, {self._state}) takes no {role} rooms")

    def _take(self, handle: Send | Receive, fake: bool, written: tuple[ev.Pages, ...] = ()) -> None:
        if fake:
            self._desk.finish(handle)
        else:
            self._desk.add(handle, written)

    def _bounds(self) -> PoolLimits:
        slots = tuple(memory.num_slots for memory in self.pool.segments if memory.shard.segment.state)
        return PoolLimits(self.pool.num_pages, self.pool.aux_slots, self.local.layers, slots)

    def set_pipeline(self, mode: str) -> None:
        """Change how forwards are cut from now on: off, on, measured, or a number of layers per group."""
        self.pipelining.set(mode)

    def set_path(self, path: str) -> None:
        """Change how parts move from now on: a value of the key `path`."""
        assembly.check_path(path, self.pool)
        self.chooser.path = path
        self.connections.calibrate_once(self.workers[0] if self.workers else None)

    def measure_connection(self) -> ConnectionCost:
        """Prefill: measure the connection to the first connected peer, between parts.

        Raises:
            LocalProtocolError: no peer is connected, or it offers no memory to measure with.
            DeadlineExceeded: the transfer worker was too busy.
        """
        if self._state not in ("running", "draining") or not self.workers:
            raise LocalProtocolError(f"{self.name} ({self._state}) has no connection to measure")
        return self.connections.measure(self.workers[0])


def _discard(event: ev.Event) -> None:
    """What a fake room's handle tells nobody."""


def _close_at_exit(agent: Agent) -> Callable[[], None]:
    """An engine that forgets to close still exits cleanly; the reference is weak so that this keeps nothing alive."""
    reference = weakref.ref(agent)

    def close() -> None:
        if (alive := reference()) is not None:
            alive.close()

    return atexit.register(close)
