"""Builds the components of an agent from its configuration, stops their threads and releases their resources.

`build_parts` starts no thread and binds no socket; `Agent.start` does.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import zmq

from kvctl_agent.contract.choices import BULK, DIRECT, SLICE, STAGED
from kvctl_agent.contract.keys import KeyPair
from kvctl_agent.contract.processors import FEW_CORES, available_cores, copy_threads, engine_threads
from kvctl_agent.contract.settings import Settings
from kvctl_agent.contract.snapshots import Integration, Role
from kvctl_agent.contract.sockets import shortage
from kvctl_agent.contract.values import encodable, shown
from kvctl_agent.device.base import Device
from kvctl_agent.errors import ConfigError, DeadlineExceeded, DeviceError, MemoryLayoutError
from kvctl_agent.export import Exports
from kvctl_agent.gil import GilSharing
from kvctl_agent.layout.chunks import chunk_pages
from kvctl_agent.layout.parallel import local_shards as layout_of
from kvctl_agent.layout.plan_inputs import differences, shape_to_wire
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.allocations import RingMemory, StagingBuffers, back_with_huge_pages
from kvctl_agent.memory.checksum import Checksums, DeviceChecksums, HostChecksums
from kvctl_agent.memory.copier import Copier
from kvctl_agent.memory.device_copier import DeviceCopier
from kvctl_agent.memory.host_copier import CopyPool, HostCopier
from kvctl_agent.memory.native_copier import BUILT, NativeCopier, NativeCopyPool
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.region import Region
from kvctl_agent.paths.base import Path
from kvctl_agent.paths.bulk import AuxPath, BulkPath
from kvctl_agent.paths.direct import DirectPath
from kvctl_agent.paths.path_chooser import AUTO, PathChooser
from kvctl_agent.paths.peer_connection import PeerConnection
from kvctl_agent.paths.slice import SlicePath
from kvctl_agent.paths.staged import StagedPath
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.bootstrap_registry import Lookup, Whereabouts
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.messages import MAX_SHARED, MAX_TEXT, SharedMemory
from kvctl_agent.protocol.peer import LocalInfo, Timing
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.recording import InputLog
from kvctl_agent.rank import Rank
from kvctl_agent.runtime import control_endpoints
from kvctl_agent.runtime.arrivals import Arrivals
from kvctl_agent.runtime.bootstrap import Registries, RegistryServer
from kvctl_agent.runtime.control_channel import ControlChannel
from kvctl_agent.runtime.control_loop import ControlLoop, Mailbox
from kvctl_agent.runtime.event_poller import EventPoller
from kvctl_agent.runtime.handles import HandleRegistry, OnState, PoolLimits
from kvctl_agent.runtime.lifecycle import Lifecycle
from kvctl_agent.runtime.liveness import host_identity, host_name
from kvctl_agent.runtime.page_owners import PageOwners
from kvctl_agent.runtime.peer_connections import PeerConnections
from kvctl_agent.runtime.pipelining import Pipelining
from kvctl_agent.runtime.transfers import Transfers
from kvctl_agent.security.curve import REGISTRY_DOMAIN, Clients, RefusedConnections, ZapAuthenticator, load_clients
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.transport.base import Transport
from kvctl_agent.transport.environment import prefer_family_of
from kvctl_agent.transport.nixl.threads import DESCRIPTORS_PER_THREAD, with_threads
from kvctl_agent.transport.nixl.threads import thread_count as engine_thread_count
from kvctl_agent.transport.registry import open_transport, parse_params

_NUMPY_COPIES = (
    "copies use numpy, which is slow beside a busy engine: reinstall kvctl where a C compiler and Python's headers are "
    "installed (Debian: gcc, python3-dev)"
)
_BINDING_POSTS = (
    "NIXL's Python binding posts the writes, which is slow beside a busy engine: use NIXL 1.5, and reinstall kvctl "
    "where a C++ compiler and Python's headers are installed (Debian: g++, python3-dev)"
)
_SCRATCH_BYTES = 64 << 20  # after the ring; writers measure their connection with it; larger than CPU caches
_FEW_CORES_BUFFER_MB, _BUFFER_MB, _DEVICE_BUFFER_MB = 64, 256, 512
_LEAST_BUFFERS = 8  # half of them may belong to one peer: some are filled while others are sent
_MAX_NAME_BYTES = 255  # of a ZMQ identity
# An agent uses about 30 descriptors with the loopback transport and 40 with NIXL on two cores; libzmq and UCX abort
# the process if there are too few.
_DESCRIPTORS = 64
_MAX_INSTANCES, _INSTANCES_SHARE = 512, 8  # prefill instances known at once: each takes two descriptors and more
_PATHS = (AUTO, BULK, SLICE, STAGED, DIRECT)


class Closable(Protocol):
    """Object that owns memory or a device stream until `close`."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class PartFactories:
    """Constructors of the agent's components that tests and fault injection replace."""

    clock: Callable[[], Clock] = Clock
    transport: Callable[..., Transport] = open_transport
    control_channel: Callable[..., ControlChannel] = ControlChannel
    arrivals: Callable[..., Arrivals] = Arrivals
    ring: Callable[..., RingMemory] = RingMemory


@dataclass(frozen=True)
class AgentParts:
    """All components of one agent except its admin server.

    A prefill rank has staging buffers, transfers and, if its pool is on a device, a poller of the engine's events; a
    decode rank has a staging ring (unless staging is off) and arrivals.
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
    copy_pool: CopyPool | NativeCopyPool
    copiers: tuple[Closable, ...]
    forwards: EventPoller | None
    transfers: Transfers | None
    arrivals: Arrivals | None
    connections: PeerConnections
    pipelining: Pipelining
    inputs: InputLog
    machine: PrefillMachine | DecodeMachine
    handles: HandleRegistry
    mailbox: Mailbox
    context: zmq.Context[zmq.Socket[bytes]]
    control_channel: ControlChannel
    registries: Registries
    control: ControlLoop
    lifecycle: Lifecycle

    @cached_property
    def limits(self) -> PoolLimits:
        """Limits of what the engine may pass to `send` and `receive`."""
        pool, local = self.pool, self.local
        slots = tuple(memory.num_slots for memory in pool.segments if memory.shard.segment.state)
        groups = tuple(memory.num_slots for memory in pool.segments if memory.shard.segment.table)
        sizes = tuple(group.page_size for group in local.shape.groups)
        page_tokens = pool.page_size * (local.side.cp if self.role == "decode" else 1)
        return PoolLimits(pool.num_pages, pool.aux_slots, local.layers, slots, groups, sizes, page_tokens)

    def start(self, admin: str, socket: str) -> Sequence[str]:
        """Binds and connects the control sockets, and starts the threads. Raises as `Agent.start`.

        Args:
            admin: tcp:// endpoint of the admin server; "" if it has none.
            socket: path of the admin server's Unix socket.

        Returns:
            the endpoints of the registries that the control loop registers with or looks up.
        """
        at = Whereabouts(admin, socket, self.local.hostname)
        opened = self.control.open(self.lifecycle.instances, self.settings["listen"], at)
        if self.role == "prefill":  # its registry may have chosen a port; those of a decode rank may change meanwhile
            self.lifecycle.instances = opened
        else:
            self.mailbox.put(*map(ev.ConnectInstance, opened))
        self.copy_pool.start()
        self.control.start()
        return opened

    def stop(self, timeout: float) -> bool:
        """Stops the control loop, which fails the open rooms; returns whether it has ended with nothing in progress.

        May be repeated, as `release`.
        """
        ended = self.control.close(timeout)
        self.handles.close()
        return ended

    def release(self, *, ended: bool) -> bool:
        """Closes transport and sockets; frees memory only if the loop has `ended` and no copy runs.

        Returns:
            whether that is so, and nothing accesses the pool any more.
        """
        self.transport.close()
        if not ended:
            return False
        copied = copies_ended(self.copiers, self.telemetry.recorder)
        if copied:
            self.connections.close()
        self.copy_pool.close()
        self.mailbox.close()  # after all that write to its descriptor, whose number may be in use again at once
        self.context.destroy(0)  # not term: it would wait for the sockets of a loop that was never started
        if copied:
            close_all((self.buffers, self.ring))
        return copied


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
    integration: Integration | None = None,
    former: AgentParts | None = None,
) -> AgentParts:
    """Builds all components of an agent. Raises as `Agent`, and then releases the components built so far.

    Args:
        instances: endpoints of the bootstrap registries.
        model: shape of the whole model's KV; None: `pool` has all layers.
        keys: the fleet's key pair, for control sockets over TCP; None without encryption.
        make: constructors of the replaceable components.
        integration: the engine that the agent is part of.
        former: released components of the same agent, whose telemetry, exporters and life cycle continue; None for a
            new agent.
    """
    # Identity and telemetry.
    clock = make.clock() if former is None else former.telemetry.clock
    born = clock.wall_ns(clock.now_ns())
    incarnation = born >> 20 << 20 | secrets.randbits(20) | 1  # increases with each start
    if former is None:
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
    else:
        exports, telemetry = former.exports, former.telemetry
    if model is None and rank.pp_size > 1:
        raise ConfigError("with pipeline stages a rank's pool is not the whole model: pass model= to the agent")
    shape = model or pool.shape()
    pool.assign_shards(layout_of(shape, pool.page_size, rank.parallel_config, rank.coord))
    check_pages(settings, role, rank, pool.page_size, shape)
    address = peers_address(role, name, instances, settings["listen"])
    prefer_family_of(address)
    params = engine_params(settings, role, rank, pool.device, address)
    check_settings(settings, pool, engine_thread_count(params))

    with contextlib.ExitStack() as undo:
        # The transport and the memory that it registers.
        memory: list[Closable | None] = []
        undo.callback(close_all, memory)
        few_cores = available_cores() <= FEW_CORES
        sharing = GilSharing(few_cores)
        mailbox = Mailbox()
        undo.callback(mailbox.close)
        if settings["copy_threads"] is None:
            settings.complete("copy_threads", copy_threads(available_cores(), ranks_of(rank)))
        # Native threads that post copy, too: a piece is written by the core that has gathered it.
        threads = (engine_thread_count(params) if BUILT else 0) or settings["copy_threads"]
        copy_pool = copy_pool_of(threads, name, mailbox)
        undo.callback(copy_pool.close)
        native_pool = copy_pool if isinstance(copy_pool, NativeCopyPool) else None
        transport = make.transport(settings["transport"], name, params, pool.device, sharing, native_pool)
        undo.callback(transport.close)
        buffers, ring = staging_memory(role, settings, pool.device, make.ring)
        memory += [buffers, ring]
        if pool.device is None:
            back_with_huge_pages(pool.regions())
        transport.register(regions(pool, buffers or ring))
        local = local_of(name, role, rank, shape, pool, incarnation, settings, transport, ring, integration, address)

        # What transfers parts.
        if not BUILT and pool.device is None:
            telemetry.recorder.record("copy", _NUMPY_COPIES, "warning")
        if role == "prefill" and pool.device is None and transport.describe().get("posts") == "binding":
            telemetry.recorder.record("transport", _BINDING_POSTS, "warning")
        copiers: list[Closable] = []
        undo.callback(close_all, copiers)
        by_peer: dict[str, PeerConnection] = {}
        direct_sms: int | None = settings["direct_sms"]
        reported: deque[ev.Event] = deque()
        transfers: Transfers | None = None
        arrivals: Arrivals | None = None
        forwards: EventPoller | None = None
        if buffers is not None:
            copier = copier_of(pool.device, copy_pool, copiers)
            transfers = Transfers(
                paths_of(pool.device, copier, buffers, direct_sms, copiers),
                AuxPath(),
                by_peer,
                transport.progress,
                reported.append,
                mailbox.wake,
                telemetry,
                many=not few_cores,
                checksums=checksums_of(pool, copier) if settings["checksum"] else None,
                on_device=pool.device is not None,
                sharing=sharing,
            )
            forwards = EventPoller(pool.device, mailbox.wake) if pool.device is not None else None

        # The machine, and the connections whose costs determine its choice of paths.
        chooser = PathChooser(shape, pool.page_size, settings["path"], settings["staging"])
        connections = PeerConnections(
            name,
            transport,
            pool,
            buffers,
            chooser,
            telemetry.recorder,
            by_peer,
            transfers,
            direct_sms,
            settings["checksum"],
        )
        pipelining = Pipelining(local.layers, pool.page_size, settings, telemetry.metrics)
        inputs = InputLog(settings["record_inputs"])
        machine = machine_of(local, settings, telemetry, chooser, inputs, connections)
        if transfers is None:
            copier = copier_of(pool.device, copy_pool, copiers)
            arrivals = make.arrivals(
                transport,
                pool,
                ring,
                copier,
                checksums_of(pool, copier),
                lambda *events: reported.extend(events),
                lambda: machine.open_rooms,
                telemetry,
                lambda: {peer.inputs.decode_split for peer in machine.peers.values() if peer.inputs is not None},
                settings["checksum"],
                few_cores,
            )

        # The engine's handles, the control channel and its loop.
        handles = HandleRegistry(name, on_state, page_owners_of(pool) if role == "decode" else None)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # takes no descriptor before its first socket
        channel = make.control_channel(context, name, incarnation, telemetry, keys)
        registries = Registries(context, Lookup(name), keys)
        server = authenticator = None
        refused = RefusedConnections(telemetry.metrics, telemetry.recorder).add
        clients: Clients | None = None
        if role == "prefill" and local.unique_rank == 0:
            if keys is not None and not instances[0].startswith("ipc://"):
                clients = load_clients(
                    settings["admin_clients"], lambda text: telemetry.recorder.record("bootstrap", text, "warning")
                )
            server = RegistryServer(context, instances[0], keys, clients, refused)
        if keys is not None:
            admitted = partial(admits, keys.public, clients)
            authenticator = partial(ZapAuthenticator, context, f"{name}-keys", admitted, refused)
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
            transfers=transfers,
            arrivals=arrivals,
            forwards=forwards,
            reported=reported,
            few_cores=few_cores,
            sharing=sharing,
            server=server,
            authenticator=authenticator,
            inputs=inputs if settings["record_inputs"] else None,
        )
        if former is None:
            lifecycle = Lifecycle(local, instances, registries, machine, telemetry, mailbox, handles)
        else:
            lifecycle = former.lifecycle
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
        copy_pool=copy_pool,
        copiers=tuple(copiers),
        forwards=forwards,
        transfers=transfers,
        arrivals=arrivals,
        connections=connections,
        pipelining=pipelining,
        inputs=inputs,
        machine=machine,
        handles=handles,
        mailbox=mailbox,
        context=context,
        control_channel=channel,
        registries=registries,
        control=control,
        lifecycle=lifecycle,
    )


def admits(public: bytes, clients: Clients | None, key: bytes, domain: bytes) -> bool:
    """Returns whether the owner of `key` may connect: an agent to any socket, a permitted client to the registry.

    Args:
        public: the fleet's public key.
        clients: clients that may ask the registry for the list of agents.
        domain: ZAP domain of the socket.
    """
    return key == public or (domain == REGISTRY_DOMAIN and clients is not None and clients.level(key) is not None)


def check_arguments(role: object, rank: object, pool: object, name: object, model: object, on_state: object) -> None:
    """Raises ConfigError if an argument of `Agent` has the wrong type or the name is unusable."""
    if not isinstance(role, str) or role not in ("prefill", "decode"):
        raise ConfigError(f"role {shown(role)}: must be 'prefill' or 'decode'")
    check_name(name)
    for argument, value, kind in (("rank", rank, Rank), ("pool", pool, KVPool), ("model", model, ModelShape)):
        if not isinstance(value, kind) and (value is not None or kind is not ModelShape):
            raise ConfigError(f"{argument} is {shown(value)}: it must be a {kind.__name__}")
    if on_state is not None and not callable(on_state):
        raise ConfigError(f"on_state is {shown(on_state)}: it must be callable")


def check_name(name: object) -> None:
    """Raises ConfigError if the name of an agent is unusable."""
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
        raise ConfigError(f"name is {shown(name)}: it must be 1 to {_MAX_NAME_BYTES} bytes of printable text")


def with_suffix(name: str, suffix: str) -> str:
    """Returns the whole name of an agent, with the configured `name_suffix`; raises ConfigError if it is unusable."""
    if not suffix:
        return name
    whole = f"{name}@{socket.gethostname() if suffix == 'hostname' else suffix}"
    check_name(whole)
    return whole


def check_same_geometry(former: AgentParts, pool: KVPool, model: ModelShape | None) -> None:
    """Raises MemoryLayoutError if peers could not use `pool` in place of the pool of `former`."""
    local = former.local

    def geometry(shape: ModelShape, rows: Iterable[int], of: KVPool) -> dict[str, int | str]:
        name = "cpu" if of.device is None else of.device.name
        dtypes = {f"{segment} dtype": dtype for segment, dtype in of.dtypes.items()}
        device = {"aux_row_bytes": str(list(rows)), "device": name}
        return {**shape_to_wire(shape), "page_size": of.page_size, **device, **dtypes}

    before = geometry(local.shape, local.aux_row_bytes, former.pool)
    after = geometry(model or pool.shape(), pool.addresses().aux_row_bytes, pool)
    if factors := differences(before, after):
        raise MemoryLayoutError(f"{former.name}: the pool differs from the former one: {'; '.join(map(str, factors))}")


def instances_of(role: str, bootstrap: object) -> tuple[str, ...]:
    """Returns the bootstrap endpoints as a tuple; empty for a decode rank that is given its instances later.

    Raises:
        ConfigError: a prefill rank has none or several, or `bootstrap` is neither None nor a text or a sequence.
    """
    if bootstrap is None:
        bootstrap = ()
    if not isinstance(bootstrap, str | Sequence):
        raise ConfigError(f"bootstrap is {shown(bootstrap)}: it must be an endpoint or a list of endpoints")
    found = (bootstrap,) if isinstance(bootstrap, str) else tuple(bootstrap)
    if role == "prefill" and len(found) != 1:
        raise ConfigError(f"{len(found)} bootstrap endpoints: a prefill agent needs exactly one")
    return found


def check_pages(settings: Settings, role: str, rank: Rank, page_size: int, shape: ModelShape) -> None:
    """Raises ConfigError if chunks do not end with pages of KV groups, or interleaved tokens with pages."""
    cell = chunk_pages(settings["chunk_tokens"], page_size) * page_size
    for group in shape.groups if role == "prefill" else ():
        if cell % group.page_size:
            raise ConfigError(
                f"chunk_tokens = {settings['chunk_tokens']}: chunks have {cell} tokens, not a multiple of the page of "
                f"{group.page_size} tokens of KV group {group.name}; set chunk_tokens to a multiple of "
                f"{math.lcm(page_size, group.page_size)}"
            )
    if role == "decode" and rank.cp_size > 1 and page_size % settings["cp_interleave"]:
        raise ConfigError(
            f"cp_interleave = {settings['cp_interleave']}: it must divide the page of {page_size} tokens, since "
            f"{rank.cp_size} cp ranks share each prompt"
        )


def page_owners_of(pool: KVPool) -> PageOwners:
    """Creates the `PageOwners` of a decode rank's pool; its kinds of memory are in the order of `written`."""
    groups = [memory for memory in pool.segments if memory.shard.segment.table]
    states = [memory for memory in pool.segments if memory.shard.segment.state]
    kinds = [(f"page of group {memory.shard.segment.name}", memory.num_slots) for memory in groups]
    kinds += [(f"item of state {memory.shard.segment.name}", memory.num_slots) for memory in states]
    return PageOwners([("page", pool.num_pages), ("aux row", pool.aux_slots), *kinds])


def peers_address(role: str, name: str, instances: tuple[str, ...], listen: str) -> str:
    """Returns the address of this host at which other hosts reach the agent; "" if its peers are all on this host."""
    if role == "prefill":
        return control_endpoints.own_address(control_endpoints.control_address(instances[0], name, listen))
    return next(filter(None, map(control_endpoints.own_address, instances)), "")


def engine_params(settings: Settings, role: str, rank: Rank, device: Device | None, address: str) -> dict[str, str]:
    """Returns the transport's parameters, and adds the automatic ones to the settings, for `kvctl config`.

    Only prefill ranks write, and only between host memories the CPU copies: with a pool on a GPU, threads are used only
    if they are configured.

    Args:
        address: address of this host at which other hosts reach the agent; "" if its peers are all on this host.

    Raises:
        ConfigError: the configured parameters are malformed.
    """
    params = parse_params(settings["transport_params"])
    if settings["transport"] == "nixl":
        writes = role == "prefill" and device is None
        params = with_threads(params, engine_threads(available_cores(), ranks_of(rank), BUILT) if writes else 0)
    elif settings["transport"] == "mooncake" and address:
        params = {"host": address, **params}
    if params:
        settings.complete("transport_params", ",".join(f"{name}={value}" for name, value in params.items()))
    return params


def ranks_of(rank: Rank) -> int:
    """Returns the number of ranks of the rank's instance, which are assumed to share this host."""
    return math.prod((rank.dp_size, rank.pp_size, rank.cp_size, rank.tp_size))


def check_settings(settings: Settings, pool: KVPool, engine_threads: int) -> None:
    """Raises ConfigError if settings do not suit the pool's device, or the process can open too few descriptors."""
    workers = engine_threads + 1 if engine_threads else 0  # of UCX, beside the one that every agent has
    if (text := shortage(_DESCRIPTORS + workers * DESCRIPTORS_PER_THREAD)) is not None:
        raise ConfigError(f"this process cannot hold an agent: {text}")
    check_path(settings["path"], pool)


def check_path(path: str, pool: KVPool) -> None:
    """Raises ConfigError if the path is unknown or this pool does not support it."""
    if not isinstance(path, str) or path not in _PATHS:
        raise ConfigError(f"path {shown(path)}: must be {', '.join(_PATHS)}")
    if path == DIRECT and pool.device is None:
        raise ConfigError("path direct needs a pool on a GPU, and this pool is host memory; auto works with both")


def staging_memory(
    role: str, settings: Settings, device: Device | None, make_ring: Callable[..., RingMemory]
) -> tuple[StagingBuffers | None, RingMemory | None]:
    """Allocates a prefill rank's staging buffers or a decode rank's ring.

    Args:
        device: device of the pool; None for host memory.
        make_ring: constructor of the ring.

    Returns:
        (buffers, ring); buffers is None on a decode rank, ring on a prefill rank and if staging is off.

    Raises:
        DeviceError, MemoryLayoutError: the memory cannot be allocated; the message has the size.
    """
    mem_pool = settings["mem_pool"]
    if role == "prefill":
        copier = HostCopier if device is None else DeviceCopier
        automatic = _DEVICE_BUFFER_MB
        if device is None:
            automatic = _FEW_CORES_BUFFER_MB if available_cores() <= FEW_CORES else _BUFFER_MB
        budget = (settings["staging_buffer_mb"] or automatic) << 20
        piece_bytes = min(copier.piece_bytes, budget // _LEAST_BUFFERS)
        pieces = budget // piece_bytes
        return StagingBuffers(pieces, piece_bytes, device, mem_pool), None
    if settings["staging"] == "off":
        return None, None
    return None, make_ring((settings["staging_ring_mb"] << 20) + _SCRATCH_BYTES, device, mem_pool)


def close_all(parts: Iterable[Closable | None]) -> None:
    """Closes the objects that are not None; ignores DeviceError, because nothing runs any more on a lost device."""
    for each in parts:
        if each is not None:
            with contextlib.suppress(DeviceError):
                each.close()


def copies_ended(copiers: Iterable[Closable], recorder: FlightRecorder) -> bool:
    """Closes the copiers; returns False if a copy has not ended and may still access staging or a peer's memory."""
    try:
        close_all(copiers)
    except DeadlineExceeded as error:
        recorder.record("device", str(error), "error")
        return False
    return True


def copy_pool_of(threads: int, name: str, mailbox: Mailbox) -> CopyPool | NativeCopyPool:
    """Returns a copy pool that wakes the control loop: the native one, if the extension has been built."""
    if not BUILT:
        return CopyPool(threads, f"{name}-copy", mailbox.wake)
    return NativeCopyPool(threads, mailbox.fileno(), considerate=available_cores() <= FEW_CORES)


def copier_of(device: Device | None, copy_pool: CopyPool | NativeCopyPool, copiers: list[Closable]) -> Copier:
    """Creates a copier for one thread, and appends it to `copiers`."""
    copier: Copier
    if device is not None:
        copier = DeviceCopier(device.copies())
    else:
        copier = NativeCopier(copy_pool) if isinstance(copy_pool, NativeCopyPool) else HostCopier(copy_pool)
    copiers.append(copier)
    return copier


def checksums_of(pool: KVPool, copier: Copier) -> Checksums:
    """Creates what computes checksums in the thread, and on a device on the stream, of the copier."""
    return DeviceChecksums(pool, copier.copies) if isinstance(copier, DeviceCopier) else HostChecksums(pool)


def paths_of(
    device: Device | None,
    copier: Copier,
    buffers: StagingBuffers,
    direct_sms: int | None,
    copiers: list[Closable],
) -> dict[str, Path]:
    """Returns the transfer paths by name, and appends the copies of path direct to `copiers`."""
    paths: dict[str, Path] = {BULK: BulkPath(), SLICE: SlicePath(), STAGED: StagedPath(buffers, copier)}
    if device is not None:
        copies = device.copies()
        copiers.append(copies)
        paths[DIRECT] = DirectPath(copies, direct_sms)
    return paths


def regions(pool: KVPool, staging: StagingBuffers | RingMemory | None) -> list[Region]:
    """Returns the memory regions of the pool and of staging, all of which the transport registers."""
    found = [Region(*region) for region in pool.regions()]
    return found if staging is None else [*found, Region(*staging.region())]


def _max_instances() -> int:
    """Returns the number of prefill instances to know at once, for which the process has descriptors enough."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors == resource.RLIM_INFINITY:
        return _MAX_INSTANCES
    return max(1, min(_MAX_INSTANCES, descriptors // _INSTANCES_SHARE))


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
    integration: Integration | None,
    address: str,
) -> LocalInfo:
    """Returns the description of this rank that the protocol uses and sends to peers."""
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
        cp_interleave=settings["cp_interleave"],
        incarnation=incarnation,
        transport=settings["transport"],
        metadata=transport.metadata(),
        max_instances=_max_instances(),
        pool=pool.addresses().to_wire(),
        host=host_identity(),
        pid=os.getpid(),
        ring_base=ring.addr if ring else 0,
        ring_bytes=ring_bytes,
        scratch_base=ring.addr + ring_bytes if ring else 0,
        scratch_bytes=_SCRATCH_BYTES if ring else 0,
        shared=shared,
        unshared=unshared,
        hostname=host_name(settings["host"]),
        address=address,
        engine=integration["engine"] if integration else "",
        dtypes=pool.dtypes,
    )


def _shared(pool: KVPool, ring: RingMemory | None) -> tuple[tuple[SharedMemory, ...], str]:
    """Returns exports of a decode rank's device memory for writers to map, and the reason if it cannot be exported."""
    device = pool.device
    if device is None:
        return (), ""
    found = [(region.addr, region.nbytes) for region in regions(pool, ring) if region.device == device.index]
    try:
        exports = device.export(found)
    except DeviceError as error:
        return (), encodable(str(error))[:MAX_TEXT]
    if len(exports) > MAX_SHARED:  # peers would reject a Hello with more of them
        return (), f"its memory consists of {len(exports)} allocations, and writers map {MAX_SHARED} at most: use one"
    return tuple(SharedMemory(*export) for export in exports), ""


def timing_of(settings: Settings) -> Timing:
    """Returns the protocol's periods and deadlines in ns, from the settings."""
    return Timing(
        heartbeat_ns=_ns(settings["heartbeat_s"]),
        suspect_ns=_ns(settings["suspect_s"]),
        lost_ns=_ns(settings["lost_s"]),
        resend_ns=_ns(settings["resend_s"]),
        bootstrap_ns=_ns(settings["bootstrap_timeout_s"]),
        waiting_ns=_ns(settings["waiting_timeout_s"]),
        unclaimed_ns=_ns(settings["unclaimed_s"]),
        hold_ns=_ns(settings["hold_s"] or 0),
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
    """Creates the rank's protocol state machine; `inputs` records its events and the path chooser's results."""
    timing, reaches, runs = timing_of(settings), connections.reaches, connections.runs
    if local.unshared:
        telemetry.recorder.record("direct", f"writers cannot map this rank's memory: {local.unshared}", "warning")
    if local.role == "decode":
        return inputs.begin(DecodeMachine(local, timing, telemetry))
    return inputs.begin(
        PrefillMachine(
            local,
            timing,
            telemetry,
            choose=inputs.recording_paths(
                lambda peer, share, n, pages: chooser.choose(
                    peer.ring_bytes, share, n, pages, reaches(peer.name), runs(peer.name, share)
                )
            ),
            fallback=inputs.recording_paths(
                lambda peer, share, n, pages: chooser.without_ring(share, reaches(peer.name), runs(peer.name, share))
            ),
            early_send=settings["pp_early_send"],
        )
    )
