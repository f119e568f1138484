"""Handlers of the read-only admin commands.

They run on the admin thread, copy data and take no lock that the hot path takes, so a value may be one update old.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from kvctl_agent.admin.machine_views import add_diagnosis, gated_parts, owed_parts, ring_use, ring_view, since
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.admin import PROTOCOL_MAX, PROTOCOL_MIN, ErrorCode
from kvctl_agent.contract.choices import HOST, REASONS
from kvctl_agent.contract.commands import COMMANDS
from kvctl_agent.contract.recording import InputPage
from kvctl_agent.contract.snapshots import (
    Bootstrap,
    ConfigRow,
    Events,
    FailedRooms,
    Hello,
    LayerRow,
    MetricFamily,
    PeerRow,
    PipelineUse,
    ProcessUse,
    RegisteredRank,
    Role,
    RoomDetail,
    RoomRow,
    Staging,
    StagingBuffers,
    Stats,
    Status,
)
from kvctl_agent.contract.states import RoomState
from kvctl_agent.errors import LayoutError, RequestRefused
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.layout.plan_inputs import PLAN_VERSION
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.parts import AgentParts
from kvctl_agent.protocol.bootstrap_registry import Rank, Roster
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.messages import PROTOCOL_VERSION
from kvctl_agent.protocol.peer import LocalInfo, Peer, PeerState
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.runtime.peer_connections import PeerConnections
from kvctl_agent.telemetry.hub import room_rows
from kvctl_agent.transport.cost_probe import Interconnect, interconnect_of
from kvctl_agent.transport.environment import has_infiniband

_ROWS = 1000
_PROCESS_EVERY_NS = 5_000_000_000
_MOST_MISSING = 256  # ranks listed in `bootstrap`
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_DESCRIPTOR_BYTES = 512  # size in lane_descriptor_ns: a token row of few heads


class AdminQueries:
    """Read-only admin commands: each command is a method of the same name, with its arguments as keyword arguments."""

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts
        self._started_ns = time.monotonic_ns()
        self._lanes: dict[str, str | list[str]] | None = None
        self._process: ProcessUse | None = None
        self._process_due_ns = 0

    def handlers(self) -> Mapping[str, Callable[[dict[str, Any]], Any]]:
        """Returns the handlers by command name, for `AdminServer`; `hello` is passed to it separately."""
        reads: tuple[Callable[..., Any], ...] = (
            self.inputs,
            self.config,
            self.bootstrap,
            self.status,
            self.rooms,
            self.room,
            self.slow,
            self.history,
            self.failed,
            self.staging,
            self.layers,
            self.peers,
            self.events,
            self.metrics,
        )
        return {read.__name__: lambda args, read=read: read(**args) for read in reads}  # type: ignore[misc]

    def hello(self) -> Hello:
        parts = self._parts
        return {
            "name": parts.name,
            "role": parts.role,
            "pid": os.getpid(),
            "version": VERSION,
            "protocol": [PROTOCOL_MIN, PROTOCOL_MAX],
            "incarnation": f"{parts.local.incarnation:016x}",
            "level": "",
            "capabilities": sorted(command.name for command in COMMANDS),
            "uptime_ns": time.monotonic_ns() - self._started_ns,
            "draining": parts.lifecycle.draining,
            "now_ns": parts.telemetry.clock.wall_ns(time.monotonic_ns()),
        }

    def inputs(self, since: int | None = None, until: int | None = None) -> InputPage:
        """Returns a page of the state machine's recorded inputs, compressed on the admin thread.

        Args:
            since: number of the first blob; None: the oldest one stored.
            until: number after the last blob; None: up to now.
        """
        inputs, local = self._parts.inputs, self._parts.local
        pieces = inputs.pieces(since, until)
        return {
            "header": {
                "name": local.name,
                "role": local.role,
                "incarnation": f"{local.incarnation:016x}",
                "pid": os.getpid(),
                "version": VERSION,
                "protocol_version": PROTOCOL_VERSION,
                "plan_version": PLAN_VERSION,
                "clock_offset_ns": self._parts.telemetry.clock.offset_ns,
                "taken": inputs.taken,
                "missed": inputs.missed,
                "fault": inputs.fault,
            },
            "blobs": pieces.blobs,
            "next": pieces.next,
            "end": pieces.end,
            "dropped": pieces.dropped,
        }

    def config(self) -> list[ConfigRow]:
        return self._parts.settings.rows()

    def bootstrap(self) -> list[Bootstrap]:
        return bootstrap_rows(self._parts.name, self._parts.lifecycle.rosters())

    def status(self) -> Status:
        parts, telemetry = self._parts, self._parts.telemetry
        pool, stats = parts.pool, self.stats()
        if self._lanes is None:
            self._lanes = {key: _shown(value) for key, value in parts.transport.describe().items()}
        met = list(parts.machine.peers.values())
        in_use = kinds_in_use(parts.connections, pool, parts.local, met)
        return {
            "name": parts.name,
            "role": parts.role,
            "rank": self._rank,
            "sizes": self._sizes,
            "pid": os.getpid(),
            "incarnation": f"{parts.local.incarnation:016x}",
            "version": VERSION,
            "uptime_ns": time.monotonic_ns() - self._started_ns,
            "transport": {**self._lanes, "lanes": [*self._lanes["lanes"], *in_use]},
            "device": "cpu" if pool.device is None else pool.device.name,
            "rooms": stats["rooms"],
            "rooms_finished_total": stats["rooms_finished_total"],
            "bytes_total": sum(stats["bytes_total"].values()),
            "rate": telemetry.rate.window(time.monotonic_ns()),
            "latency": stats["latency"],
            "ring": stats["ring"],
            "peers": stats["peers"],
            "pipeline": self._pipeline_use(),
            "pool": self._pool,
            "waiting_for": parts.lifecycle.waiting_for(),
            "accepting": parts.lifecycle.accepting,
            "draining": parts.lifecycle.draining,
            "draining_age_ns": since(telemetry.drain_began_ns, time.monotonic_ns()),
            "resumed_age_ns": None
            if parts.lifecycle.draining
            else since(telemetry.drain_ended_ns, time.monotonic_ns()),
            "memory_gb_per_s": parts.connections.memory_gb_per_s,
            "process": self._process_use(),
            "metrics_url": parts.exports.metrics_url or None,
        }

    def rooms(self, state: str | None = None, limit: int = _ROWS) -> list[RoomRow]:
        rows = self._parts.telemetry.rooms.rows(state, limit)
        for row in rows:
            add_diagnosis(self._parts.machine, row)
        return rows

    def room(self, room: int) -> list[RoomDetail]:
        found = self._parts.telemetry.rooms.detail(room)
        if not found:
            raise RequestRefused(ErrorCode.UNKNOWN_ROOM, f"{self._parts.name} knows no room {room}, active or recent")
        for row in found:
            add_diagnosis(self._parts.machine, row)
            row["owed_parts"] = owed_parts(self._parts.machine, row)
        return found

    def slow(self, limit: int = _ROWS) -> list[RoomRow]:
        return self._parts.telemetry.rooms.slow(limit)

    def history(self, limit: int = _ROWS) -> list[RoomRow]:
        return self._parts.telemetry.rooms.history(limit)

    def failed(self, limit: int = _ROWS) -> FailedRooms:
        found = self._parts.telemetry.rooms.failed(limit)
        for row in found["rooms"]:
            add_diagnosis(self._parts.machine, row)
        return found

    def staging(self) -> Staging:
        parts = self._parts
        return {
            "agent": parts.name,
            "role": parts.role,
            "enabled": parts.settings["staging"] != "off",
            "ring": ring_view(parts.machine, parts.telemetry),
            "buffers": self._buffers(),
            "gated": gated_parts(parts.machine),
            "fallbacks_total": int(parts.telemetry.metrics.total("kvctl_fallbacks_total")),
        }

    def layers(self, room: int | None = None) -> list[LayerRow]:
        telemetry = self._parts.telemetry
        if room is None:
            return telemetry.stages.rows()
        records = telemetry.rooms.find(room)
        if not records:
            raise RequestRefused(ErrorCode.UNKNOWN_ROOM, f"{self._parts.name} knows no room {room}, active or recent")
        return room_rows(records, telemetry.clock, self._parts.name)

    def peers(self) -> list[PeerRow]:
        rooms = self._parts.telemetry.rooms.active()
        return [self._peer(peer, rooms) for peer in list(self._parts.machine.peers.values())]

    def events(self, since: int | None = None, limit: int = _ROWS) -> Events:
        return self._parts.telemetry.recorder.since(since, limit)

    def metrics(self) -> list[MetricFamily]:
        """Updates the gauges, which no other method reads, and returns all metrics."""
        parts, metrics = self._parts, self._parts.telemetry.metrics
        states = parts.telemetry.rooms.states()
        for state in RoomState:
            metrics.set("kvctl_rooms_active", states.get(state.label, 0), state.label)
        peers = [peer.state for peer in list(parts.machine.peers.values())]
        for peer_state in PeerState:
            metrics.set("kvctl_peers", peers.count(peer_state), peer_state.value)
        wait_ns = parts.telemetry.interpreter.wait_ns
        metrics.set("kvctl_interpreter_wait_seconds", None if wait_ns is None else wait_ns / 1e9)
        if isinstance(parts.machine, PrefillMachine):
            metrics.set("kvctl_parts_parked", len(parts.machine.parked()))
        use = ring_use(parts.machine)
        if use is not None and isinstance(parts.machine, DecodeMachine):
            metrics.set("kvctl_ring_size_bytes", use["size_bytes"])
            metrics.set("kvctl_ring_used_bytes", use["used_bytes"])
            metrics.set("kvctl_ring_high_water_bytes", use["high_water_bytes"])
            metrics.set("kvctl_quarantined_bytes", parts.machine.quarantined_bytes)
        return metrics.snapshot()

    def stats(self) -> Stats:
        """Returns the result of `Agent.stats`; not an admin command."""
        machine, telemetry = self._parts.machine, self._parts.telemetry
        peers = [peer.state.value for peer in list(machine.peers.values())]

        def totals(name: str) -> dict[str, int]:
            return {label: int(value) for (label,), value in telemetry.metrics.totals(name).items()}

        return {
            "rooms": telemetry.rooms.states(),
            "rooms_finished_total": {
                state.label: int(telemetry.metrics.total("kvctl_rooms_finished_total", state.label))
                for state in (RoomState.SUCCESS, RoomState.FAILED)
            },
            "failures_total": totals("kvctl_room_failures_total"),
            "parts_total": totals("kvctl_parts_total"),
            "bytes_total": totals("kvctl_part_bytes_total"),
            "latency": telemetry.latencies.summary(),
            "ring": ring_use(machine),
            "buffers": self._buffers(),
            "quarantined_bytes": machine.quarantined_bytes if isinstance(machine, DecodeMachine) else 0,
            "peers": {state: peers.count(state) for state in dict.fromkeys(peers)},
        }

    # ---- parts ------------------------------------------------------------------------------------------------

    # Constant parts of `status`: beside busy engines, whose threads evict its code and data from the caches, computing
    # them took a fifth of its time.

    @cached_property
    def _rank(self) -> dict[str, int]:
        local = self._parts.local
        return {**_axes(local.coord), "unique": local.unique_rank}

    @cached_property
    def _sizes(self) -> dict[str, int]:
        side = self._parts.local.side
        return _axes((side.dp, side.pp, side.cp, side.tp))

    @cached_property
    def _pool(self) -> dict[str, int]:
        local, pool = self._parts.local, self._parts.pool
        return {
            "pages": pool.num_pages,
            "page_size": pool.page_size,
            "bytes": pool.nbytes,
            "layers": len(local.layers),
            "heads": local.shards[0].heads,
        }

    def _buffers(self) -> StagingBuffers | None:
        buffers = self._parts.buffers
        if buffers is None:
            return None
        return {
            "size_bytes": buffers.count * buffers.buffer_bytes,
            "piece_bytes": buffers.buffer_bytes,
            "pieces": buffers.count,
            "pieces_used": buffers.in_use,
            "pieces_high_water": buffers.high_water,
        }

    def _process_use(self) -> ProcessUse:
        """Returns `process_use`; numbers of descriptors and threads, and memory, may be five seconds old.

        Counting them lists directories of /proc, which beside busy engines takes longer than the rest of `status`.
        """
        now = time.monotonic_ns()
        if self._process is None or now >= self._process_due_ns:
            self._process, self._process_due_ns = process_use(), now + _PROCESS_EVERY_NS
        return {**self._process, "fds_limit": _fds_limit(), "cpu_ns": time.process_time_ns()}

    def _pipeline_use(self) -> PipelineUse | None:
        parts = self._parts
        if parts.role != "prefill":
            return None
        options = parts.pipelining.options
        counted = parts.telemetry.metrics.totals("kvctl_pipeline_decisions_total")
        return {
            "mode": options.mode,
            "min_tokens": max(1, options.min_tokens),
            "group_size": options.group_size,
            "decisions": {reason: int(counted[reason,]) for reason in REASONS if (reason,) in counted},
        }

    def _peer(self, peer: Peer, rooms: list[Any]) -> PeerRow:
        parts, gate, info = self._parts, peer.gate, peer.info
        watermark = [gate.position.round, gate.position.tail, gate.sequence] if gate.heard_ns else None
        measured = parts.connections.measured.get(peer.name)
        connection = parts.connections.by_peer.get(peer.name)
        kind = kind_of(parts.connections, parts.pool, parts.local, peer)
        role: Role = "decode" if parts.role == "prefill" else "prefill"
        return {
            "agent": parts.name,
            "peer": peer.name,
            "role": role,
            "state": peer.state.value,
            "incarnation": f"{peer.incarnation:016x}" if peer.incarnation else None,
            "endpoint": parts.control_channel.endpoint(peer.name),
            "last_heard_ns": time.monotonic_ns() - peer.heard_ns if peer.heard_ns else None,
            "rtt_ns": peer.rtt_ns,
            "clock_offset_ns": None,
            "clock_error_ns": None,
            "control_queue": parts.control_channel.waiting(peer.name),
            "watermark_sent": list(peer.watermark_sent) if peer.watermark_sent else None,
            "watermark_seen": watermark if parts.role == "prefill" else None,
            "lane": info.transport if info else "",
            "lane_gb_per_s": measured.cost.write_gb_per_s if measured else None,
            "lane_descriptor_ns": int(measured.cost.descriptor_us(_DESCRIPTOR_BYTES) * 1e3) if measured else None,
            "lane_measured_age_ns": time.monotonic_ns() - measured.at_ns if measured else None,
            "lane_kind": kind.name if kind else None,
            "lane_expected": kind.expected if kind else None,
            "lane_direct": connection.mapping.lane if connection and connection.mapping else None,
            "lane_why_not": connection.why_not
            if connection and parts.pool.device is not None and not connection.mapping
            else None,
            "same_host": info.host == parts.local.host if info else None,
            "process": info.process if info else None,
            "former": [f"{former.info.process} ({life:016x})" for life, former in peer.former.copy().items()],
            "rooms": sum(peer.name in record.peers for record in rooms),
            "errors_total": peer.errors_total,
            "last_error": peer.last_error,
            "differences": list(peer.differences),
        }


def kind_of(connections: PeerConnections, pool: KVPool, local: LocalInfo, peer: Peer) -> Interconnect | None:
    """Infers the interconnect to a peer from its measured rate; None if not measured, or if the pool is host memory."""
    measured = connections.measured.get(peer.name)
    if measured is None or peer.info is None or pool.device is None or pool.device.index == HOST:
        return None
    return interconnect_of(measured.cost.write_gb_per_s, peer.info.host == local.host, has_infiniband())


def kinds_in_use(connections: PeerConnections, pool: KVPool, local: LocalInfo, peers: Iterable[Peer]) -> list[str]:
    """Returns one text per kind of interconnect in use, with its best measured rate: `rdma (inferred: 48 GB/s)`."""
    best: dict[str, float] = {}
    for peer in peers:
        kind, measured = kind_of(connections, pool, local, peer), connections.measured.get(peer.name)
        if kind is not None and measured is not None:
            best[kind.name] = max(best.get(kind.name, 0.0), measured.cost.write_gb_per_s)
    return [f"{name} (inferred: {rate:.3g} GB/s)" for name, rate in sorted(best.items())]


def _shown(value: Any) -> str | list[str]:
    """Formats a value of the transport's description: a list or dict as a list of texts, any other value as text."""
    if isinstance(value, dict):
        return [f"{name}={item}" for name, item in value.items()]
    return [str(item) for item in value] if isinstance(value, list) else str(value)


def process_use() -> ProcessUse:
    """Returns the current use of descriptors, threads, memory and CPU by this process."""
    try:
        used = _entries("/proc/self/fd") - 1  # without the descriptor that lists them
        threads = _entries("/proc/self/task")
        rss_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        used, threads = resource.getrlimit(resource.RLIMIT_NOFILE)[0], threading.active_count()
        rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10  # the peak, as an approximation
    return {
        "fds": used,
        "fds_limit": _fds_limit(),
        "threads": threads,
        "rss_bytes": rss_bytes,
        "cpu_ns": time.process_time_ns(),
    }


def _fds_limit() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _entries(directory: str) -> int:
    return len(os.listdir(directory))  # noqa: PTH208 -- half the time of Path.iterdir


def bootstrap_rows(agent: str, rosters: Iterable[tuple[str, Roster]]) -> list[Bootstrap]:
    """Returns the reply to `bootstrap`; `rosters` are pairs of a registry's endpoint and the roster it last sent."""
    return [_instance(agent, endpoint, roster) for endpoint, roster in rosters]


def _instance(agent: str, endpoint: str, roster: Roster) -> Bootstrap:
    side = _side(roster.ranks[0].sizes) if roster.ranks else None
    registered = {tuple(rank.coord) for rank in roster.ranks}
    absent = [side.coord(unique) for unique in range(side.size)] if side is not None else []
    return {
        "agent": agent,
        "registry": endpoint,
        "expected": roster.size or None,
        "sizes": _axes((side.dp, side.pp, side.cp, side.tp)) if side is not None else None,
        "registered": [_rank(rank) for rank in roster.ranks],
        "missing": [_axes(coord) for coord in absent if tuple(coord) not in registered][:_MOST_MISSING],
        "text": roster.refused or roster.missing,
    }


def _rank(rank: Rank) -> RegisteredRank:
    return {
        "name": rank.name,
        "endpoint": rank.endpoint,
        "incarnation": f"{rank.incarnation:016x}",
        "rank": _axes(rank.coord),
    }


def _side(sizes: list[int]) -> ParallelConfig | None:
    """Returns the parallel sizes [dp, pp, cp, tp] of an instance; None if the registry sent invalid sizes."""
    try:
        dp, pp, cp, tp = sizes
        return ParallelConfig(dp, pp, cp, tp)
    except (LayoutError, ValueError):
        return None


def _axes(coord: Iterable[int]) -> dict[str, int]:
    return dict(zip(RankCoord._fields, coord, strict=False))
