"""From settings, rank and pool to what an agent is built of: staging memory, what it says of itself, deadlines."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvctl_agent.contract.choices import BULK, DIRECT, SLICE, STAGED
from kvctl_agent.contract.descriptors import shortage
from kvctl_agent.contract.values import encodable, shown
from kvctl_agent.device.base import Device
from kvctl_agent.errors import ConfigError, DeadlineExceeded, DeviceError
from kvctl_agent.layout.chunks import chunk_pages
from kvctl_agent.layout.shape import ModelShape
from kvctl_agent.memory.buffers import RingMemory, StagingBuffers
from kvctl_agent.memory.copier import Copier
from kvctl_agent.memory.copy_pool import CopyPool
from kvctl_agent.memory.device_copier import DeviceCopier
from kvctl_agent.memory.host_copier import HostCopier
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.memory.region import Region
from kvctl_agent.paths.path_chooser import AUTO, PathChooser
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.local_info import LocalInfo, Timing
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.messages import MAX_SHARED, MAX_TEXT, SharedMemory
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.recording import InputLog
from kvctl_agent.rank import Rank
from kvctl_agent.runtime.liveness import host_identity
from kvctl_agent.runtime.page_owners import Destinations
from kvctl_agent.telemetry.flight_recorder import FlightRecorder
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.transport.base import Transport

_SCRATCH_BYTES = 64 << 20  # behind the ring, larger than the caches: where writers measure their connection
_BUFFER_MB, _DEVICE_BUFFER_MB = 64, 512
_MAX_NAME_BYTES = 255  # of a ZMQ identity
# One agent has about 30 with the loopback transport and 40 with NIXL on two cores; libzmq and UCX abort without.
_DESCRIPTORS = 64
_PATHS = (AUTO, BULK, SLICE, STAGED, DIRECT)
_MOST_WORKERS = 4
_FEW_CORES = 4  # up to here, ranks that share a host have no core to spare

Settings = Mapping[str, Any]


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


def workers(settings: Settings, device: Device | None) -> int:
    """Transfer workers of a prefill rank: one where a device does the copying."""
    return threads(settings["workers"], _MOST_WORKERS if device is None else 1)


def check_settings(settings: Settings, pool: KVPool) -> None:
    """Raises ConfigError for what does not go with where the pool is, or with what the process may open."""
    if (text := shortage(_DESCRIPTORS)) is not None:
        raise ConfigError(f"this process cannot hold an agent: {text}")
    check_path(settings["path"], pool)
    if pool.device is not None and settings["checksum"]:
        raise ConfigError(
            "checksum: on a GPU parts have none, because it would read every byte back; set checksum = false"
        )


def threads(configured: int | None, most: int) -> int:
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
    role: str, settings: Settings, device: Device | None
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
        pieces = workers(settings, device) * (budget // piece_bytes)
        return StagingBuffers(pieces, piece_bytes, device, mem_pool), None
    if settings["staging"] == "off":
        return None, None
    return None, RingMemory((settings["staging_ring_mb"] << 20) + _SCRATCH_BYTES, device, mem_pool)


class Closable(Protocol):
    """What an agent has on a device."""

    def close(self) -> None: ...


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


def copier_of(device: Device | None, crew: CopyPool) -> Copier:
    """One thread's: by the crew in host memory, else by a stream of the device."""
    return HostCopier(crew) if device is None else DeviceCopier(device.copies())


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
    """What an agent knows of itself."""
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
    role: str,
    local: LocalInfo,
    settings: Settings,
    telemetry: Telemetry,
    chooser: PathChooser,
    inputs: InputLog,
    reaches: Callable[[str], bool],
) -> Machine:
    """The rank's machine, recorded from its first moment on; what it asks of the chooser is recorded, too.

    Args:
        reaches: whether the memory of the peer of this name is mapped here.
    """
    timing = timing_of(settings)
    if local.unshared:
        telemetry.recorder.record("direct", f"no writer can map our memory: {local.unshared}", "warning")
    if role == "decode":
        return inputs.begin(DecodeMachine(local, timing, telemetry))
    return inputs.begin(
        PrefillMachine(
            local,
            timing,
            telemetry,
            choose=inputs.asked(
                lambda who, share, n, pages: chooser.choose(who.ring_bytes, share, n, pages, reaches(who.name))
            ),
            fallback=inputs.asked(lambda who, share, n, pages: chooser.without_ring(share, reaches(who.name))),
            early_send=settings["pp_early_send"],
        )
    )
