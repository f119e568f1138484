"""The agent a worker embeds: builds all parts, owns their lives; the only file that knows them all."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

import zmq

from kvctl_agent.admin.observe import Observer
from kvctl_agent.admin.server import AdminServer
from kvctl_agent.contract.config import Value
from kvctl_agent.contract.settings import load_settings
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import ConfigError, DeadlineExceeded, LocalProtocolError
from kvctl_agent.layout.chunks import chunk_pages, prefix_pages
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.buffers import RingMemory, StagingBuffers
from kvctl_agent.memory.crew import CopyCrew
from kvctl_agent.memory.parts import PIECE_BYTES
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.paths.base import BULK, SLICE, STAGED, Path
from kvctl_agent.paths.bulk import AuxPath, BulkPath
from kvctl_agent.paths.chooser import AUTO, Chooser
from kvctl_agent.paths.slice import SlicePath
from kvctl_agent.paths.staged import StagedPath
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.local import Local, Timing
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.roster import Lookup, Register
from kvctl_agent.protocol.roster import Rank as RegisteredRank
from kvctl_agent.rank import Rank
from kvctl_agent.runtime import endpoints
from kvctl_agent.runtime.arrivals import ArrivalLoop
from kvctl_agent.runtime.bootstrap import RegistryClient, RegistryServer
from kvctl_agent.runtime.control import ControlLoop
from kvctl_agent.runtime.handles import Handle, Receive, Send, page_array
from kvctl_agent.runtime.lanes import Lanes
from kvctl_agent.runtime.links import Links
from kvctl_agent.runtime.liveness import host_identity
from kvctl_agent.runtime.mailbox import Mailbox
from kvctl_agent.runtime.worker import TransferWorker
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.transport.base import Region, Transport
from kvctl_agent.transport.probe import LaneCost
from kvctl_agent.transport.registry import open_transport

_SCRATCH_BYTES = 64 << 20  # behind the ring, larger than the caches: where writers measure their lane
_MAX_ROOM = (1 << 64) - 1
_FEW_CORES = 4  # up to here, ranks that share a host have no core to spare

OnState = Callable[[Send | Receive, RoomState], None]


class Agent:
    """One rank's agent. One per process in a worker; several per process work.

    Args:
        role: "prefill" or "decode".
        rank: where this worker stands in its instance.
        pool: its KV pool, registered as it is.
        name: unique on this host; the admin socket's name.
        bootstrap: endpoint of the registry (`ipc:///path` or `tcp://address:port`); the first prefill rank serves it.
        on_state: called on the control thread at each change of a room's state; it must only enqueue.
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
        bootstrap: str,
        on_state: OnState | None = None,
        **config: Value,
    ) -> None:
        if role not in ("prefill", "decode"):
            raise ConfigError(f"role {role!r}: must be 'prefill' or 'decode'")
        self.name = name
        self.role = role
        self.rank = rank
        self.pool = pool
        self.incarnation = secrets.randbits(63) | 1
        self.settings = load_settings(config)
        settings = self.settings
        endpoints.check_endpoint(bootstrap, insecure=settings["insecure"])
        self._bootstrap = bootstrap
        self._on_state = on_state
        self.telemetry = Telemetry(
            name,
            role,
            history=settings["history_rooms"],
            timeline_events=settings["timeline_events"],
            recorder_events=settings["recorder_events"],
        )
        self.shape = ModelShape(
            num_layers=pool.num_layers,
            num_kv_heads=pool.total_kv_heads,
            k_dim=pool.k_dim,
            v_dim=pool.v_dim,
            dtype_bytes=pool.dtype_bytes,
        )
        self.chooser = Chooser(self.shape, pool.page_size, settings["path"], settings["staging"])
        self._handles: dict[int, Send | Receive] = {}
        self._handles_lock = threading.Lock()
        self._state: Literal["new", "running", "draining", "closed"] = "new"
        self.transport: Transport = open_transport(settings["transport"], name, _params(settings["transport_params"]))
        self._mailbox = Mailbox()
        self.buffers: StagingBuffers | None = None
        self.ring: RingMemory | None = None
        self.workers: list[TransferWorker] = []
        self._crew: CopyCrew | None = None
        self._arrivals: ArrivalLoop | None = None
        try:
            self._build_memory()
            self.lanes = Lanes(name, self.transport, pool, self.buffers, self.chooser, self.telemetry.recorder)
            self.machine = self._build_machine()
        except BaseException:
            self.transport.close()
            self._mailbox.close()
            raise
        self.observe = Observer(self)
        telemetry = self.telemetry
        self._admin = AdminServer(
            name,
            self.observe.handlers(),
            self.observe.hello,
            metrics=telemetry.metrics,
            recorder=telemetry.recorder,
            clock=telemetry.clock,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control: ControlLoop | None = None
        self.links: Links | None = None
        self.registry: RegistryClient | None = None
        self._at_exit = _close_at_exit(self)

    # ---- building ---------------------------------------------------------------------------------------------

    def _build_memory(self) -> None:
        settings = self.settings
        regions = [Region(*region) for region in self.pool.regions()]
        if self.role == "decode" and settings["staging"] != "off":
            self.ring = RingMemory((settings["staging_ring_mb"] << 20) + _SCRATCH_BYTES)
            regions.append(Region(*self.ring.region()))
        elif self.role == "prefill":
            budget = settings["staging_buffer_mb"] << 20
            piece_bytes = min(PIECE_BYTES, budget // 2)  # two at least: one is gathered while one is on the wire
            self.buffers = StagingBuffers(self._worker_count() * (budget // piece_bytes), piece_bytes)
            regions.append(Region(*self.buffers.region()))
        self.transport.register(regions)

    def _worker_count(self) -> int:
        configured: int | None = self.settings["workers"]
        if configured is not None:
            return configured
        return 1 if len(os.sched_getaffinity(0)) <= _FEW_CORES else 4

    def _copy_threads(self) -> int:
        configured: int | None = self.settings["copy_threads"]
        if configured is not None:
            return configured
        return 1 if len(os.sched_getaffinity(0)) <= _FEW_CORES else 2

    def _build_machine(self) -> Machine:
        settings, pool, ring = self.settings, self.pool, self.ring
        ring_bytes = ring.nbytes - _SCRATCH_BYTES if ring else 0
        self.local = Local(
            name=self.name,
            role=self.role,
            coord=self.rank.coord,
            side=self.rank.side,
            shape=self.shape,
            page_size=pool.page_size,
            chunk_pages=chunk_pages(settings["chunk_tokens"], pool.page_size),
            cp_mode="rank0",
            incarnation=self.incarnation,
            transport=settings["transport"],
            metadata=self.transport.metadata(),
            pool=pool.addresses().to_wire(),
            host=host_identity(),
            pid=os.getpid(),
            ring_base=ring.addr if ring else 0,
            ring_bytes=ring_bytes,
            scratch_base=ring.addr + ring_bytes if ring else 0,
            scratch_bytes=_SCRATCH_BYTES if ring else 0,
        )
        timing = Timing(
            heartbeat_ns=_ns(settings["heartbeat_s"]),
            suspect_ns=_ns(settings["suspect_s"]),
            lost_ns=_ns(settings["lost_s"]),
            resend_ns=_ns(settings["resend_s"]),
            bootstrap_ns=_ns(settings["bootstrap_timeout_s"]),
            waiting_ns=_ns(settings["waiting_timeout_s"]),
        )
        if self.role == "decode":
            return DecodeMachine(self.local, timing, self.telemetry)
        return PrefillMachine(
            self.local,
            timing,
            self.telemetry,
            choose=lambda who, share, layers, pages: self.chooser.choose(who.ring_bytes, share, layers, pages),
            fallback=lambda who, share, layers, pages: self.chooser.without_ring(share),
        )

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
            self._control = self._build_control()
            self._start_threads()
            self._control.start()
        except BaseException:
            self.close()
            raise
        return self

    def _build_control(self) -> ControlLoop:
        """Bind and connect the control sockets; the loop owns them from here on."""
        with contextlib.ExitStack() as undo:
            self.links = Links(self._context, self.name, self.incarnation, self.telemetry)
            undo.callback(self.links.close)
            request: Register | Lookup = Lookup(self.name)
            server: RegistryServer | None = None
            if self.role == "prefill":
                if self.local.unique_rank == 0:
                    server = RegistryServer(self._context, self._bootstrap)
                    undo.callback(server.close)
                endpoint = self.links.serve(endpoints.control_address(self._bootstrap, self.name))
                side, coord = self.local.side, list(self.local.coord)
                sizes = [side.dp, side.pp, side.cp, side.tp]
                request = Register(RegisteredRank(self.name, endpoint, self.incarnation, coord, sizes))
            self.registry = RegistryClient(self._context, self._bootstrap, self.name, request)
            undo.callback(self.registry.close)
            control = ControlLoop(
                f"{self.name}-control",
                self.machine,
                self,
                self.links,
                self._mailbox,
                self.registry,
                server,
                self.telemetry,
                self.local.host,
            )
            undo.pop_all()
            return control

    def _start_threads(self) -> None:
        crew = self._crew = CopyCrew(self._copy_threads(), f"{self.name}-copy")
        if self.role == "decode":
            report = self._mailbox.put
            self._arrivals = ArrivalLoop(
                f"{self.name}-arrivals", self.transport, self.pool, self.ring, crew, report, self.telemetry
            )
            self._arrivals.start()
            return
        assert self.buffers is not None
        for number in range(self._worker_count()):
            paths: dict[str, Path] = {BULK: BulkPath(), SLICE: SlicePath(), STAGED: StagedPath(self.buffers, crew)}
            worker = TransferWorker(
                f"{self.name}-transfer-{number}",
                paths,
                AuxPath(),
                self.lanes.by_peer,
                self.transport.progress,
                self._mailbox.put,
                self.telemetry.metrics,
            )
            worker.start()
            self.workers.append(worker)

    def wait_ready(self, timeout: float) -> None:
        """Prefill: until registered. Decode: until every prefill rank of the instance has said hello.

        Raises:
            DeadlineExceeded: names who is missing.
            ConfigError: the registry or a peer refuses us; names the differing factor.
        """
        deadline = time.monotonic() + timeout
        while (waiting := self.waiting_for()) is not None:
            for peer in list(self.machine.peers.values()):
                if self.role == "decode" and peer.differences:
                    raise ConfigError(f"{peer.name} and {self.name} do not fit: {'; '.join(peer.differences)}")
            if self.registry is not None and self.registry.roster.refused:
                raise ConfigError(f"the registry refuses {self.registry.roster.refused}")
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{self.name} was not ready after {timeout:g} s: {waiting}")
            time.sleep(0.01)

    def waiting_for(self) -> str | None:
        """What keeps this agent from serving, in words; None when nothing does."""
        if self.registry is None:
            return "it has not been started"
        if self.role == "prefill":
            known = any(rank.name == self.name for rank in self.registry.roster.ranks)
            return None if known else f"no answer from the registry at {self._bootstrap}"
        if not self.registry.complete:
            return self.registry.roster.missing or f"no answer from the registry at {self._bootstrap}"
        machine = self.machine
        assert isinstance(machine, DecodeMachine)
        if not machine.roster:
            return "the roster is being read"
        missing = machine.missing_peers
        return f"no hello from {', '.join(missing)}" if missing else None

    def drain(self, timeout: float) -> None:
        """Take no new rooms and wait until those in flight have ended.

        Raises:
            DeadlineExceeded: names the rooms still in flight.
        """
        if self._state == "running":
            self._state = "draining"
        deadline = time.monotonic() + timeout
        while self._handles:
            if time.monotonic() >= deadline:
                rooms = ", ".join(str(room) for room in sorted(self._handles)[:8])
                raise DeadlineExceeded(f"{self.name}: rooms still in flight after {timeout:g} s: {rooms}")
            time.sleep(0.002)

    def close(self, timeout: float = 5.0) -> None:
        """Fail what is in flight with a cause, stop all threads, release everything; idempotent, never hangs."""
        if self._state == "closed":
            return
        deadline = time.monotonic() + timeout
        started = self._state != "new"
        self._state = "closed"
        if started:
            for room in list(self._handles):
                self._mailbox.put(ev.AbortRoom(room, f"agent {self.name} is closing"))
            while self._handles and time.monotonic() < deadline - timeout / 2:
                time.sleep(0.002)
        ended = True
        for worker in self.workers:
            ended &= worker.close(max(0.1, deadline - time.monotonic()))
        if self._arrivals is not None:
            ended &= self._arrivals.close(max(0.1, deadline - time.monotonic()))
        if self._control is not None:
            self._mailbox.put(ev.Leave(ended and all(worker.drained for worker in self.workers)))
            ended &= self._control.close(max(0.1, deadline - time.monotonic()))
        for handle in list(self._handles.values()):
            # Not released: whoever writes to these pages has not said that nothing is in flight.
            handle.tell(RoomState.FAILED, self._closing_failure())
        self._handles.clear()
        self._admin.close()
        self.transport.close()
        self._mailbox.close()
        atexit.unregister(self._at_exit)
        if ended:
            if self._crew is not None:
                self._crew.close()
            self._context.destroy(0)  # not term: it would wait for sockets of a loop that was never started
            # Memory goes last, and only when no thread can touch it any more.
            for memory in (self.buffers, self.ring):
                if memory is not None:
                    memory.close()

    def _closing_failure(self) -> Any:
        return {
            "rank": self.name,
            "code": "AGENT_CLOSED",
            "at_ns": time.time_ns(),
            "text": f"agent {self.name} was closed with the room in flight",
        }

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the engine's calls -----------------------------------------------------------------------------------

    def send(self, room: int) -> Send:
        """Prefill: take part in sending `room`; may come before or after the decode side opens it.

        Raises:
            LocalProtocolError: the room is in use here, or this is no running prefill agent.
        """
        handle = Send(room, self._mailbox.put, self.pool.num_pages, self.pool.aux_slots)
        self._add(handle, "prefill")
        self._mailbox.put(ev.SendRoom(room))
        return handle

    def receive(self, room: int, pages: Any, *, prefix_tokens: int = 0, aux_index: int | None = None) -> Receive:
        """Decode: receive `room` into `pages`.

        Args:
            room: its bootstrap_room, an unsigned 64-bit number.
            pages: page numbers in this rank's pool for the prompt after its cached prefix, in prompt order.
            prefix_tokens: tokens that this rank has cached already; whole pages.
            aux_index: row of the pool's aux tensor that receives the room's aux row; None for none.

        Raises:
            LocalProtocolError: the room is in use here, a page or aux row lies outside the pool, or this is no running
                decode agent.
            LayoutError: the prefix is not page-aligned.
        """
        numbers = page_array(pages)
        if len(numbers) and int(numbers.max()) >= self.pool.num_pages:
            raise LocalProtocolError(f"room {room}: page {numbers.max()} is outside the pool of {self.pool.num_pages}")
        if aux_index is not None and not 0 <= aux_index < self.pool.aux_slots:
            raise LocalProtocolError(f"room {room}: aux row {aux_index} is outside the pool's {self.pool.aux_slots}")
        prefix = prefix_pages(prefix_tokens, self.pool.page_size)
        handle = Receive(room, self._mailbox.put)
        self._add(handle, "decode")
        nonce = secrets.randbits(63) | 1
        aux = -1 if aux_index is None else aux_index
        self._mailbox.put(ev.OpenRoom(room, nonce, numbers, prefix, prefix + len(numbers), aux))
        return handle

    def _add(self, handle: Send | Receive, role: str) -> None:
        if self.role != role or self._state != "running":
            raise LocalProtocolError(f"agent {self.name} ({self.role}, {self._state}) takes no {role} rooms")
        if not 0 <= handle.room <= _MAX_ROOM:
            raise LocalProtocolError(f"room {handle.room} is no unsigned 64-bit number")
        with self._handles_lock:
            if handle.room in self._handles:
                raise LocalProtocolError(f"room {handle.room} is in use on {self.name}")
            self._handles[handle.room] = handle

    def set_path(self, path: str) -> None:
        """Change how parts move from now on: bulk, slice, staged or auto."""
        if path not in (AUTO, BULK, SLICE, STAGED):
            raise ConfigError(f"path {path!r}: must be auto, bulk, slice or staged")
        self.chooser.path = path
        self.lanes.calibrate_once(self._first_worker())

    def measure_lane(self) -> LaneCost:
        """Prefill: measure the lane to the first connected peer, between parts.

        Raises:
            LocalProtocolError: no peer is connected, or it offers no memory to measure with.
            DeadlineExceeded: the transfer worker was too busy.
        """
        if self._state not in ("running", "draining") or not self.workers:
            raise LocalProtocolError(f"{self.name} ({self._state}) has no lane to measure")
        return self.lanes.measure(self.workers[0])

    def _first_worker(self) -> TransferWorker | None:
        return self.workers[0] if self.workers else None

    # ---- the control loop's hands -----------------------------------------------------------------------------

    def connect_peer(self, action: ev.ConnectPeer) -> None:
        self.lanes.connect(action.peer, action.who, self._first_worker())

    def drop_peer(self, peer: str) -> None:
        self.lanes.drop(peer)

    def state_changed(self, action: ev.StateChanged) -> None:
        handle = self._handles.get(action.room)
        if handle is None:
            return
        handle.tell(action.state, action.failure)
        self._forget(handle)
        if self._on_state is not None:
            self._on_state(handle, action.state)

    def released(self, room: int) -> None:
        handle = self._handles.get(room)
        if handle is not None:
            handle.release()
            self._forget(handle)

    def refused(self, room: int, text: str) -> None:
        handle = self._handles.get(room)
        if handle is None:
            return
        handle.tell(
            RoomState.FAILED,
            {"rank": self.name, "code": "KV_ROOM_DUPLICATE", "at_ns": time.time_ns(), "text": text},
        )
        handle.release()
        self._forget(handle)
        if self._on_state is not None:
            self._on_state(handle, RoomState.FAILED)

    def _forget(self, handle: Handle) -> None:
        if handle.state.finished and handle.released:
            with self._handles_lock:
                self._handles.pop(handle.room, None)

    def move(self, order: ev.Transfer | ev.Scatter) -> None:
        if isinstance(order, ev.Scatter):
            assert self._arrivals is not None
            self._arrivals.put(order)
        else:
            # By destination and room, so that neither one peer nor one room always meets the same worker.
            self.workers[hash((order.peer, order.room)) % len(self.workers)].put(order)

    def turned(self) -> None:
        if self._arrivals is not None:
            self._arrivals.expect(self.machine.open_rooms)


def _params(text: str) -> dict[str, str]:
    pairs = [pair.strip() for pair in text.split(",") if pair.strip()]
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"transport_params: {pair!r} is no name=value pair")
    return dict(pair.split("=", 1) for pair in pairs)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _close_at_exit(agent: Agent) -> Callable[[], None]:
    """An engine that forgets to close still exits cleanly; the reference is weak so that this keeps nothing alive."""
    reference = weakref.ref(agent)

    def close() -> None:
        if (alive := reference()) is not None:
            alive.close()

    return atexit.register(close)
