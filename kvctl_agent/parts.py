"""Builds the components of an agent from its configuration, stops their threads and releases their resources."""

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
from kvctl_agent.contract.settings import Settings
from kvctl_agent.contract.snapshots import Integration, Role
from kvctl_agent.contract.values import encodable, shown
from kvctl_agent.device.base import Device
from kvctl_agent.errors import ConfigError, DeadlineExceeded, DeviceError, MemoryLayoutError
from kvctl_agent.host.keys import KeyPair
from kvctl_agent.host.processors import FEW_CORES, available_cores, copy_threads, engine_threads
from kvctl_agent.host.sockets import shortage
from kvctl_agent.layout.chunks import chunk_pages
from kvctl_agent.layout.parallel import local_shards as layout_of
from kvctl_agent.layout.plan_inputs import differences, shape_to_wire
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.allocations import RingMemory, StagingBuffers, back_with_huge_pages
from kvctl_agent.memory.checksum import Checksums, DeviceChecksums, HostChecksums
from kvctl_agent.memory.copier import Copier
from kvctl_agent.memory.device_copier import DeviceCopier
from kvctl_agent.memory.host_copier import CopyPool, HostCopier
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.region import Region
from kvctl_agent.observer.exports import check_exports
from kvctl_agent.observer.link import new_region
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
from kvctl_agent.runtime.waiting import InputWait, turns_of_loop
from kvctl_agent.security.curve import REGISTRY_DOMAIN, Clients, RefusedConnections, ZapAuthenticator, load_clients
from kvctl_agent.telemetry.clock import Clock
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.nvtx_ranges import NvtxRanges
from kvctl_agent.transport.base import Transport
from kvctl_agent.transport.environment import prefer_family_of
from kvctl_agent.transport.nixl.threads import DESCRIPTORS_PER_THREAD, with_threads
from kvctl_agent.transport.nixl.threads import thread_count as engine_thread_count
from kvctl_agent.transport.registry import open_transport, parse_params

_BINDING_POSTS = "NIXL's Python binding posts the writes, which is slow beside a busy engine: "
_THREADS_IGNORED = "num_threads of transport_params has no effect: the pool is on a GPU, whose copy engines copy"
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
class AgentSpec:
    """Description of an agent that stays the same until its end; `Agent.register` builds new components from it.

    Attributes:
        name: whole name of the agent.
        model: shape of the whole model's KV; None: the pool has all layers.
        keys: the fleet's key pair, for control sockets over TCP; None without encryption.
        factories: constructors of the replaceable components.
        integration: the engine that the agent is part of.
    """

    name: str
    role: Role
    rank: Rank
    model: ModelShape | None
    on_state: OnState | None
    settings: Settings
    keys: KeyPair | None
    factories: PartFactories
    integration: Integration | None


class AgentParts:
    """All components of one agent except the link to its observer.

    A prefill rank has staging buffers, transfers and, if its pool is on a device, a poller of the engine's events; a
    decode rank has a staging ring (unless staging is off) and arrivals.
    """

    telemetry: Telemetry
    transport: Transport
    buffers: StagingBuffers | None
    ring: RingMemory | None
    mailbox: Mailbox
    machine: PrefillMachine | DecodeMachine
    handles: HandleRegistry
    registries: Registries
    lifecycle: Lifecycle

    def __init__(
        self, spec: AgentSpec, pool: KVPool, instances: tuple[str, ...], former: AgentParts | None = None
    ) -> None:
        """Builds all components. Raises as `Agent`, and then releases the components built so far.

        Args:
            pool: the rank's pool.
            instances: endpoints of the bootstrap registries.
            former: released components of the same agent, whose telemetry and life cycle continue; None for a new
                agent.
        """
        settings, rank, model = spec.settings, spec.rank, spec.model
        self.spec, self.pool = spec, pool
        self.name, self.role, self.settings = spec.name, spec.role, settings
        clock = spec.factories.clock() if former is None else former.telemetry.clock
        incarnation = clock.wall_ns(clock.now_ns()) >> 20 << 20 | secrets.randbits(20) | 1  # increases with each start
        if model is None and rank.pp_size > 1:
            raise ConfigError("with pipeline stages a rank's pool is not the whole model: pass model= to the agent")
        shape = model or pool.shape()
        pool.assign_shards(layout_of(shape, pool.page_size, rank.parallel_config, rank.coord))
        check_pages(settings, spec.role, rank, pool.page_size, shape)
        address = peers_address(spec.role, spec.name, instances, settings["listen"])
        prefer_family_of(address)
        params = engine_params(settings, spec.role, rank, pool.device, address)
        self._engine_threads = engine_thread_count(params) if pool.device is None else 0
        check_settings(settings, pool, self._engine_threads)
        self._few_cores = available_cores() <= FEW_CORES
        self._turns = turns_of_loop(self._few_cores)
        self._event_query = pool.device.event_query if pool.device is not None else 0
        self._reported: deque[ev.Event] = deque()
        with contextlib.ExitStack() as undo:
            self.telemetry = self._new_telemetry(clock, incarnation, undo) if former is None else former.telemetry
            self._open_transport(params, undo)
            self.local = local_of(spec, shape, pool, incarnation, self.transport, self.ring, address)
            self._create_transfers(undo)
            self._create_control(instances)
            self.lifecycle = (
                Lifecycle(
                    self.local, instances, self.registries, self.machine, self.telemetry, self.mailbox, self.handles
                )
                if former is None
                else former.lifecycle
            )
            undo.pop_all()

    def _new_telemetry(self, clock: Clock, incarnation: int, undo: contextlib.ExitStack) -> Telemetry:
        check_exports(self.settings)
        warnings: list[str] = []
        region = new_region(self.settings, self.name, self.role, incarnation, clock, warnings.append)
        undo.callback(region.close)
        telemetry = Telemetry(self.name, self.role, region, clock)
        if self.settings["nvtx"]:
            telemetry.ranges = NvtxRanges()
        for text in warnings:
            telemetry.recorder.record("observer", text, "warning")
        return telemetry

    def _open_transport(self, params: dict[str, str], undo: contextlib.ExitStack) -> None:
        """Creates the transport, and the memory that it registers."""
        settings, device, record = self.settings, self.pool.device, self.telemetry.recorder.record
        memory: list[Closable | None] = []
        undo.callback(close_all, memory)
        self.mailbox = Mailbox()
        undo.callback(self.mailbox.close)
        if settings["copy_threads"] is None:
            settings.complete("copy_threads", copy_threads(available_cores(), ranks_of(self.spec.rank)))
        # Native threads that post copy, too: a piece is written by the core that has gathered it.
        threads = self._engine_threads or settings["copy_threads"]
        self.copy_pool = copy_pool_of(threads, self.mailbox)
        undo.callback(self.copy_pool.close)
        make = self.spec.factories
        self.transport = make.transport(settings["transport"], self.name, params, device, self.copy_pool)
        undo.callback(self.transport.close)
        self.buffers, self.ring = staging_memory(self.role, settings, device, make.ring)
        memory += [self.buffers, self.ring]
        if device is None:
            back_with_huge_pages(self.pool.regions())
        self.transport.register(regions(self.pool, self.buffers or self.ring))
        if device is not None and engine_thread_count(params):
            record("transport", _THREADS_IGNORED, "warning")
        if self.role == "prefill" and (why := self.transport.describe().get("why_binding")):
            record("transport", _BINDING_POSTS + why, "warning")

    def _create_transfers(self, undo: contextlib.ExitStack) -> None:
        """Creates what transfers parts, and the machine that says which, by the costs of the connections."""
        settings, pool, telemetry = self.settings, self.pool, self.telemetry
        self.copiers: list[Closable] = []
        undo.callback(close_all, self.copiers)
        copier = copier_of(pool.device, self.copy_pool, self.copiers)
        by_peer: dict[str, PeerConnection] = {}
        self.transfers: Transfers | None = None
        self.arrivals: Arrivals | None = None
        self.event_poller: EventPoller | None = None
        if self.buffers is not None:
            self.transfers = Transfers(
                paths_of(pool.device, copier, self.buffers, settings["direct_sms"], self.copiers),
                AuxPath(),
                by_peer,
                self.transport.progress,
                self._reported.append,
                self.mailbox.wake,
                telemetry,
                many=not self._few_cores,
                checksums=checksums_of(pool, copier) if settings["checksum"] else None,
                on_device=pool.device is not None,
                yield_if_due=self._turns.yield_if_due,
                event_query=bool(self._event_query),
                wait_for_tags=self.transport.wait_for_tags,
            )
            self.event_poller = EventPoller(pool.device, self.mailbox.wake) if pool.device is not None else None
        self.chooser = PathChooser(self.local.shape, pool.page_size, settings["path"], settings["staging"])
        self.connections = PeerConnections(
            self.name,
            self.transport,
            pool,
            self.chooser,
            telemetry.recorder,
            by_peer,
            buffers=self.buffers,
            transfers=self.transfers,
            direct_programs=settings["direct_sms"],
            checksum=settings["checksum"],
        )
        self.pipelining = Pipelining(self.local.layers, pool.page_size, settings, telemetry.metrics)
        machine = self.machine = machine_of(self.local, settings, telemetry, self.chooser, self.connections)
        if self.transfers is None:
            self.arrivals = self.spec.factories.arrivals(
                self.transport,
                pool,
                self.ring,
                copier,
                checksums_of(pool, copier),
                lambda *events: self._reported.extend(events),
                lambda: machine.open_rooms,
                telemetry,
                lambda: {peer.inputs.decode_split for peer in machine.peers.values() if peer.inputs is not None},
                settings["checksum"],
                self._few_cores,
            )

    def _create_control(self, instances: tuple[str, ...]) -> None:
        """Creates the engine's handles, the control channel and its loop."""
        name, keys, telemetry, settings = self.name, self.spec.keys, self.telemetry, self.settings
        owners = page_owners_of(self.pool) if self.role == "decode" else None
        self.handles = HandleRegistry(name, self.spec.on_state, owners)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # takes no descriptor before its first socket
        self.control_channel = self.spec.factories.control_channel(
            self.context, name, self.local.incarnation, telemetry, keys
        )
        self.registries = Registries(self.context, Lookup(name), keys)
        server = authenticator = None
        refused = RefusedConnections(telemetry.metrics, telemetry.recorder).add
        clients: Clients | None = None
        if self.role == "prefill" and self.local.unique_rank == 0:
            if keys is not None and not instances[0].startswith("ipc://"):
                clients = load_clients(
                    settings["admin_clients"], lambda text: telemetry.recorder.record("bootstrap", text, "warning")
                )
            server = RegistryServer(self.context, instances[0], keys, clients, refused)
        if keys is not None:
            admitted = partial(admits, keys.public, clients)
            authenticator = partial(ZapAuthenticator, self.context, f"{name}-keys", admitted, refused)
        self.control = ControlLoop(
            self.local,
            self.machine,
            self.mailbox,
            self.control_channel,
            self.registries,
            telemetry,
            self.handles,
            self.connections,
            self.pipelining,
            transfers=self.transfers,
            arrivals=self.arrivals,
            event_poller=self.event_poller,
            reported=self._reported,
            wait=InputWait(
                self._turns,
                telemetry.waited,
                self.arrivals,
                self.transfers,
                few_cores=self._few_cores,
                event_query=self._event_query,
            ),
            server=server,
            authenticator=authenticator,
        )

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

    Only prefill ranks write, and only between host memories the CPU copies: with a pool on a GPU, no threads post.

    Args:
        address: address of this host at which other hosts reach the agent; "" if its peers are all on this host.

    Raises:
        ConfigError: the configured parameters are malformed.
    """
    params = parse_params(settings["transport_params"])
    if settings["transport"] == "nixl":
        writes = role == "prefill" and device is None
        params = with_threads(params, engine_threads(available_cores(), ranks_of(rank)) if writes else 0)
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


def copy_pool_of(threads: int, mailbox: Mailbox) -> CopyPool:
    """Returns a copy pool that wakes the control loop."""
    return CopyPool(threads, mailbox.fileno(), considerate=available_cores() <= FEW_CORES)


def copier_of(device: Device | None, copy_pool: CopyPool, copiers: list[Closable]) -> Copier:
    """Creates a copier for one thread, and appends it to `copiers`."""
    copier: Copier = HostCopier(copy_pool) if device is None else DeviceCopier(device.copies())
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
    spec: AgentSpec,
    shape: ModelShape,
    pool: KVPool,
    incarnation: int,
    transport: Transport,
    ring: RingMemory | None,
    address: str,
) -> LocalInfo:
    """Returns the description of this rank that the protocol uses and sends to peers."""
    settings, rank, integration = spec.settings, spec.rank, spec.integration
    ring_bytes = ring.nbytes - _SCRATCH_BYTES if ring else 0
    shared, unshared = _shared(pool, ring) if spec.role == "decode" else ((), "")
    return LocalInfo(
        name=spec.name,
        role=spec.role,
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
    connections: PeerConnections,
) -> PrefillMachine | DecodeMachine:
    """Creates the rank's protocol state machine."""
    timing, reaches, runs = timing_of(settings), connections.reaches, connections.runs
    if local.unshared:
        telemetry.recorder.record("direct", f"writers cannot map this rank's memory: {local.unshared}", "warning")
    if local.role == "decode":
        return DecodeMachine(local, timing, telemetry)
    return PrefillMachine(
        local,
        timing,
        telemetry,
        choose=lambda peer, share, n, pages: chooser.choose(
            peer.ring_bytes, share, n, pages, reaches(peer.name), runs(peer.name, share)
        ),
        fallback=lambda peer, share, n, pages: chooser.without_ring(share, reaches(peer.name), runs(peer.name, share)),
        early_send=settings["pp_early_send"],
        checksums=settings["checksum"],
    )
