"""The parts of an agent, and how they are built from its configuration.

`build_parts` is the one place that knows all of them. What it builds has no running thread and no bound socket:
`Agent.start` starts them, `Agent.close` ends them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import zmq

from kvctl_agent.contract.choices import BULK, DIRECT, SLICE, STAGED
from kvctl_agent.contract.keys import KeyPair
from kvctl_agent.contract.settings import Settings
from kvctl_agent.contract.snapshots import Role
from kvctl_agent.contract.sockets import shortage
from kvctl_agent.contract.values import encodable, shown
from kvctl_agent.device.base import Device
from kvctl_agent.errors import ConfigError, DeadlineExceeded, DeviceError
from kvctl_agent.export.exports import Exports
from kvctl_agent.layout.chunks import chunk_pages
from kvctl_agent.layout.parallel import local_shards as layout_of
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.allocations import RingMemory, StagingBuffers
from kvctl_agent.memory.copier import Copier
from kvctl_agent.memory.device_copier import DeviceCopier
from kvctl_agent.memory.host_copier import CopyPool, HostCopier
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.region import Region
from kvctl_agent.paths.base import Path
from kvctl_agent.paths.bulk import AuxPath, BulkPath
from kvctl_agent.paths.direct import DirectPath
from kvctl_agent.paths.path_chooser import AUTO, PathChooser
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.paths.slice import SlicePath
from kvctl_agent.paths.staged import StagedPath
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.messages import MAX_SHARED, MAX_TEXT, SharedMemory
from kvctl_agent.protocol.peer import LocalInfo, Timing
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.recording import InputLog
from kvctl_agent.protocol.registry import Lookup
from kvctl_agent.rank import Rank
from kvctl_agent.runtime.arrival_loop import ArrivalLoop
from kvctl_agent.runtime.bootstrap import Registries, RegistryServer
from kvctl_agent.runtime.control_channel import ControlChannel
from kvctl_agent.runtime.control_loop import ControlLoop
from kvctl_agent.runtime.event_poller import EventPoller
from kvctl_agent.runtime.handles import HandleRegistry, OnState
from kvctl_agent.runtime.lifecycle import Lifecycle
from kvctl_agent.runtime.liveness import host_identity
from kvctl_agent.runtime.mailbox import Mailbox
from kvctl_agent.runtime.page_owners import Destinations
from kvctl_agent.runtime.peer_connections import PeerConnections
from kvctl_agent.runtime.pipelining import Pipelining
from kvctl_agent.runtime.transfer_worker import TransferWorker
from kvctl_agent.security.rejected_keys import RejectedKeys
from kvctl_agent.security.zap_authenticator import ZapAuthenticator
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.transport.base import Transport
from kvctl_agent.transport.registry import open_transport, parse_params

_SCRATCH_BYTES = 64 << 20  # behind the ring, larger than the caches: where writers measure their connection
_BUFFER_MB, _DEVICE_BUFFER_MB = 64, 512
_MAX_NAME_BYTES = 255  # of a ZMQ identity
# One agent has about 30 with the loopback transport and 40 with NIXL on two cores; libzmq and UCX abort without.
_DESCRIPTORS = 64
_PATHS = (AUTO, BULK, SLICE, STAGED, DIRECT)
_MOST_WORKERS = 4
_FEW_CORES = 4  # up to here, ranks that share a host have no core to spare


class Closable(Protocol):
    """Holds memory or a stream of a device until it is closed."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class PartFactories:
    """Makers of the parts that tests and fault injection replace; the defaults are what ships."""

    clock: Callable[[], Clock] = Clock
    transport: Callable[..., Transport] = open_transport
    control_channel: Callable[..., ControlChannel] = ControlChannel
    arrival_loop: Callable[..., ArrivalLoop] = ArrivalLoop
    ring: Callable[..., RingMemory] = RingMemory


@dataclass(frozen=True)
class AgentParts:
    """All parts of one agent but its admin endpoint, which reads these.

    A prefill rank has staging buffers, workers and, where its pool is on a device, a thread that waits for the engine's
    events; a decode rank has a ring (unless staging is off) and an arrival loop.
    """

    name: str
    role: Role
    local: LocalInfo
    settings: Settings
    pool: KVPool
    telemetry: Telemetry
    exports: Exports
    chooser: PathChooser
    transport: Transport
    buffers: StagingBuffers | None
    ring: RingMemory | None
    crew: CopyPool
    copiers: tuple[Closable, ...]
    forwards: EventPoller | None
    workers: tuple[TransferWorker, ...]
    arrivals: ArrivalLoop | None
    connections: PeerConnections
    pipelining: Pipelining
    inputs: InputLog
    machine: PrefillMachine | DecodeMachine
    handles: HandleRegistry
    mailbox: Mailbox
    context: zmq.Context[zmq.Socket[bytes]]
    control_channel: ControlChannel
    control: ControlLoop
    lifecycle: Lifecycle

    @property
    def threads(self) -> tuple[EventPoller | TransferWorker | ArrivalLoop, ...]:
        """The threads that move parts, in the order in which they start and end."""
        return tuple(each for each in (self.forwards, *self.workers, self.arrivals) if each is not None)


def build_parts(
    name: str,
    role: Role,
    rank: Rank,
    pool: KVPool,
    instances: tuple[str, ...],
    model: ModelShape | None,
    on_state: OnState | None,
    settings: Settings,
    keys: KeyPair | None,
    make: PartFactories,
) -> AgentParts:
    """Build all parts of an agent; raises as `Agent`, and holds nothing then.

    Args:
        instances: endpoints of the registries.
        keys: the fleet's key pair, for control sockets over TCP.
        make: makers of the parts that may be replaced.
    """
    # Identity and telemetry.
    clock = make.clock()
    born = clock.wall_ns(clock.now_ns())
    incarnation = born >> 20 << 20 | secrets.randbits(20) | 1  # grows from life to life
    exports = Exports(settings, name, role)
    telemetry = Telemetry(
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
    shape = model or pool.shape()
    pool.assign_shards(layout_of(shape, pool.page_size, rank.parallel_config, rank.coord))
    check_settings(settings, pool)

    with contextlib.ExitStack() as undo:
        # The transport, and the memory that it registers.
        memory: list[Closable | None] = []
        undo.callback(close_all, memory)
        params = parse_params(settings["transport_params"])
        transport = make.transport(settings["transport"], name, params, pool.device)
        undo.callback(transport.close)
        mailbox = Mailbox()
        undo.callback(mailbox.close)
        buffers, ring = staging_memory(role, settings, pool.device, make.ring)
        memory += [buffers, ring]
        transport.register(regions(pool, buffers or ring))
        local = local_of(name, role, rank, shape, pool, incarnation, settings, transport, ring)

        # The threads that move parts.
        crew = CopyPool(thread_count(settings["copy_threads"], 2), f"{name}-copy")
        copiers: list[Closable] = []
        undo.callback(close_all, copiers)
        by_peer: dict[str, PeerConnection] = {}
        direct_sms: int | None = settings["direct_sms"]
        workers: tuple[TransferWorker, ...] = ()
        arrivals: ArrivalLoop | None = None
        forwards: EventPoller | None = None
        if buffers is not None:
            workers = tuple(
                TransferWorker(
                    f"{name}-transfer-{number}",
                    paths_of(pool.device, crew, buffers, direct_sms, copiers),
                    AuxPath(),
                    by_peer,
                    transport.progress,
                    mailbox.put,
                    telemetry.metrics,
                    settings["checksum"],
                    pool.device is not None,
                )
                for number in range(worker_count(settings, pool.device))
            )
            forwards = EventPoller(f"{name}-forwards", pool.device) if pool.device is not None else None
        else:
            copier = copier_of(pool.device, crew, copiers)
            arrivals = make.arrival_loop(f"{name}-arrivals", transport, pool, ring, copier, mailbox.put, telemetry)

        # The machine, and the costs and forwards that its choices depend on.
        chooser = PathChooser(shape, pool.page_size, settings["path"], settings["staging"])
        connections = PeerConnections(
            name,
            transport,
            pool,
            buffers,
            chooser,
            telemetry.recorder,
            by_peer,
            next(iter(workers), None),
            direct_sms,
        )
        pipelining = Pipelining(local.layers, pool.page_size, settings, telemetry.metrics)
        inputs = InputLog(settings["record_inputs"])
        machine = machine_of(local, settings, telemetry, chooser, inputs, connections)

        # The engine's handles, the control channel and its loop.
        handles = HandleRegistry(name, on_state, destinations_of(pool) if role == "decode" else None)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # takes no descriptor before its first socket
        channel = make.control_channel(context, name, incarnation, telemetry, keys)
        registries = Registries(context, Lookup(name), keys)
        server = guard = None
        if role == "prefill" and local.unique_rank == 0:
            server = RegistryServer(context, instances[0], keys)
        if keys is not None:
            public, refused = keys.public, RejectedKeys(telemetry.metrics, telemetry.recorder).refused
            guard = partial(ZapAuthenticator, context, f"{name}-keys", lambda key: key == public, refused)
        control = ControlLoop(
            local,
            machine,
            mailbox,
            channel,
            registries,
            telemetry,
            handles,
            connections,
            pipelining,
            workers=workers,
            arrivals=arrivals,
            server=server,
            guard=guard,
            inputs=inputs if settings["record_inputs"] else None,
        )
        lifecycle = Lifecycle(local, instances, registries, machine, telemetry, mailbox)
        undo.pop_all()
    return AgentParts(
        name=name,
        role=role,
        local=local,
        settings=settings,
        pool=pool,
        telemetry=telemetry,
        exports=exports,
        chooser=chooser,
        transport=transport,
        buffers=buffers,
        ring=ring,
        crew=crew,
        copiers=tuple(copiers),
        forwards=forwards,
        workers=workers,
        arrivals=arrivals,
        connections=connections,
        pipelining=pipelining,
        inputs=inputs,
        machine=machine,
        handles=handles,
        mailbox=mailbox,
        context=context,
        control_channel=channel,
        control=control,
        lifecycle=lifecycle,
    )


def check_arguments(role: object, rank: object, pool: object, name: object, model: object, on_state: object) -> None:
    """Raises ConfigError for an argument of `Agent` that is of the wrong type, or a name that nobody could type."""
    if not isinstance(role, str) or role not in ("prefill", "decode"):
        raise ConfigError(f"role {shown(role)}: must be 'prefill' or 'decode'")
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
        raise ConfigError(f"name is {shown(name)}: it must be 1 to {_MAX_NAME_BYTES} bytes of printable text")
    for argument, value, kind in (("rank", rank, Rank), ("pool", pool, KVPool), ("model", model, ModelShape)):
        if not isinstance(value, kind) and (value is not None or kind is not ModelShape):
            raise ConfigError(f"{argument} is {shown(value)}: it must be a {kind.__name__}")
    if on_state is not None and not callable(on_state):
        raise ConfigError(f"on_state is {shown(on_state)}: it must be callable")


def instances_of(role: str, bootstrap: object) -> tuple[str, ...]:
    """Endpoints of the registries; raises ConfigError for no list, none, or several of a prefill agent."""
    if not isinstance(bootstrap, str | Sequence):
        raise ConfigError(f"bootstrap is {shown(bootstrap)}: it must be an endpoint or a list of endpoints")
    found = (bootstrap,) if isinstance(bootstrap, str) else tuple(bootstrap)
    if not found or (role == "prefill" and len(found) > 1):
        raise ConfigError(f"{len(found)} bootstrap endpoints: a {role} agent needs exactly one, or more")
    return found


def destinations_of(pool: KVPool) -> Destinations:
    """A decode rank's memory that rooms are received into, in the order of `runtime.page_owners.written`."""
    states = [memory for memory in pool.segments if memory.shard.segment.state]
    kinds = [(f"item of state {memory.shard.segment.name}", memory.num_slots) for memory in states]
    return Destinations([("page", pool.num_pages), ("aux row", pool.aux_slots), *kinds])


def worker_count(settings: Settings, device: Device | None) -> int:
    """Transfer workers of a prefill rank: one where a device does the copying."""
    return thread_count(settings["workers"], _MOST_WORKERS if device is None else 1)


def check_settings(settings: Settings, pool: KVPool) -> None:
    """Raises ConfigError for what does not go with where the pool is, or with what the process may open."""
    if (text := shortage(_DESCRIPTORS)) is not None:
        raise ConfigError(f"this process cannot hold an agent: {text}")
    check_path(settings["path"], pool)
    if pool.device is not None and settings["checksum"]:
        raise ConfigError(
            "checksum: on a GPU parts have none, because it would read every byte back; set checksum = false"
        )


def thread_count(configured: int | None, most: int) -> int:
    """As many as configured; else 1 on few cores, or `most`."""
    if configured is not None:
        return configured
    return 1 if len(os.sched_getaffinity(0)) <= _FEW_CORES else most


def check_path(path: str, pool: KVPool) -> None:
    """Raises ConfigError for a path that there is not, or not for this pool."""
    if not isinstance(path, str) or path not in _PATHS:
        raise ConfigError(f"path {shown(path)}: must be {', '.join(_PATHS)}")
    if path == DIRECT and pool.device is None:
        raise ConfigError("path direct needs a pool on a GPU, and this one is host memory; auto serves both")


def staging_memory(
    role: str, settings: Settings, device: Device | None, make_ring: Callable[..., RingMemory]
) -> tuple[StagingBuffers | None, RingMemory | None]:
    """A writer's buffers, or a reader's ring (None where staging is off), where the pool is.

    Raises:
        DeviceError, MemoryLayoutError: they cannot be had; says how much was asked for.
    """
    mem_pool = settings["mem_pool"]
    if role == "prefill":
        copier = HostCopier if device is None else DeviceCopier
        budget = (settings["staging_buffer_mb"] or (_BUFFER_MB if device is None else _DEVICE_BUFFER_MB)) << 20
        piece_bytes = min(copier.piece_bytes, budget // 2)  # two at least: one is gathered while one is on the wire
        pieces = worker_count(settings, device) * (budget // piece_bytes)
        return StagingBuffers(pieces, piece_bytes, device, mem_pool), None
    if settings["staging"] == "off":
        return None, None
    return None, make_ring((settings["staging_ring_mb"] << 20) + _SCRATCH_BYTES, device, mem_pool)


def close_all(held: Iterable[Closable | None]) -> None:
    """All that is there, also on a device that is lost: nothing runs there any more, and rooms have said why."""
    for each in held:
        if each is not None:
            with contextlib.suppress(DeviceError):
                each.close()


def copies_ended(copiers: Iterable[Closable], recorder: FlightRecorder) -> bool:
    """Close what copies; False where a copy does not end, and may still touch staging, the ring or a peer's memory."""
    try:
        close_all(copiers)
    except DeadlineExceeded as error:
        recorder.record("device", str(error), "error")
        return False
    return True


def copier_of(device: Device | None, crew: CopyPool, copiers: list[Closable]) -> Copier:
    """A copier for one thread: by the crew in host memory, else by a stream of the device. Appended to `copiers`."""
    copier = HostCopier(crew) if device is None else DeviceCopier(device.copies())
    copiers.append(copier)
    return copier


def paths_of(
    device: Device | None, crew: CopyPool, buffers: StagingBuffers, direct_sms: int | None, copiers: list[Closable]
) -> dict[str, Path]:
    """Paths of one worker, by name. What copies for them is appended to `copiers`."""
    staged = StagedPath(buffers, copier_of(device, crew, copiers))
    paths: dict[str, Path] = {BULK: BulkPath(), SLICE: SlicePath(), STAGED: staged}
    if device is not None:
        copies = device.copies()
        copiers.append(copies)
        paths[DIRECT] = DirectPath(copies, direct_sms)
    return paths


def regions(pool: KVPool, staging: StagingBuffers | RingMemory | None) -> list[Region]:
    """All memory that the transport must know."""
    found = [Region(*region) for region in pool.regions()]
    return found if staging is None else [*found, Region(*staging.region())]


def local_of(
    name: str,
    role: str,
    rank: Rank,
    shape: ModelShape,
    pool: KVPool,
    incarnation: int,
    settings: Settings,
    transport: Transport,
    ring: RingMemory | None,
) -> LocalInfo:
    """The agent's identity: its place, its memory, its addresses."""
    ring_bytes = ring.nbytes - _SCRATCH_BYTES if ring else 0
    shared, unshared = _shared(pool, ring) if role == "decode" else ((), "")
    return LocalInfo(
        name=name,
        role=role,
        coord=rank.coord,
        side=rank.parallel_config,
        shape=shape,
        page_size=pool.page_size,
        chunk_pages=chunk_pages(settings["chunk_tokens"], pool.page_size),
        cp_mode=settings["cp_mode"],
        incarnation=incarnation,
        transport=settings["transport"],
        metadata=transport.metadata(),
        pool=pool.addresses().to_wire(),
        host=host_identity(),
        pid=os.getpid(),
        ring_base=ring.addr if ring else 0,
        ring_bytes=ring_bytes,
        scratch_base=ring.addr + ring_bytes if ring else 0,
        scratch_bytes=_SCRATCH_BYTES if ring else 0,
        shared=shared,
        unshared=unshared,
        hostname=socket.gethostname()[:256],
    )


def _shared(pool: KVPool, ring: RingMemory | None) -> tuple[tuple[SharedMemory, ...], str]:
    """What writers may map of a decode rank's memory on a device; or why they cannot."""
    device = pool.device
    if device is None:
        return (), ""
    found = [(region.addr, region.nbytes) for region in regions(pool, ring) if region.device == device.index]
    try:
        exports = device.export(found)
    except DeviceError as error:
        return (), encodable(str(error))[:MAX_TEXT]
    if len(exports) > MAX_SHARED:  # a Hello with more of them would be refused as a whole
        return (), f"its memory is {len(exports)} allocations, and writers map {MAX_SHARED} at most: make it one"
    return tuple(SharedMemory(*export) for export in exports), ""


def timing_of(settings: Settings) -> Timing:
    """Every period and deadline."""
    return Timing(
        heartbeat_ns=_ns(settings["heartbeat_s"]),
        suspect_ns=_ns(settings["suspect_s"]),
        lost_ns=_ns(settings["lost_s"]),
        resend_ns=_ns(settings["resend_s"]),
        bootstrap_ns=_ns(settings["bootstrap_timeout_s"]),
        waiting_ns=_ns(settings["waiting_timeout_s"]),
    )


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def machine_of(
    local: LocalInfo,
    settings: Settings,
    telemetry: Telemetry,
    chooser: PathChooser,
    inputs: InputLog,
    connections: PeerConnections,
) -> PrefillMachine | DecodeMachine:
    """The rank's machine, recorded from its first moment on; what it asks of the chooser is recorded, too."""
    timing, reaches = timing_of(settings), connections.reaches
    if local.unshared:
        telemetry.recorder.record("direct", f"no writer can map our memory: {local.unshared}", "warning")
    if local.role == "decode":
        return inputs.begin(DecodeMachine(local, timing, telemetry))
    return inputs.begin(
        PrefillMachine(
            local,
            timing,
            telemetry,
            choose=inputs.recording_paths(
                lambda who, share, n, pages: chooser.choose(who.ring_bytes, share, n, pages, reaches(who.name))
            ),
            fallback=inputs.recording_paths(
                lambda who, share, n, pages: chooser.without_ring(share, reaches(who.name))
            ),
            early_send=settings["pp_early_send"],
        )
    )
