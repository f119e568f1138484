"""Answers of the admin commands, built from what the agent's parts know.

Runs on the admin thread. It copies and never locks anything the hot path takes; a value may be one update old.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvctl_agent.admin.input_pages import page
from kvctl_agent.admin.interconnects import kind_of, kinds_in_use
from kvctl_agent.admin.process import process_use
from kvctl_agent.admin.registries import instances
from kvctl_agent.admin.room_diagnosis import add_diagnosis, owed_parts
from kvctl_agent.admin.staging import gated_parts, ring_use, ring_view, since
from kvctl_agent.contract.admin import PROTOCOL_MAX, PROTOCOL_MIN, ErrorCode
from kvctl_agent.contract.commands import COMMANDS
from kvctl_agent.contract.pipeline import REASONS
from kvctl_agent.contract.recording import InputPage
from kvctl_agent.contract.settings import Settings
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
    Role,
    RoomDetail,
    RoomRow,
    Staging,
    Status,
)
from kvctl_agent.contract.states import RoomState
from kvctl_agent.contract.version import VERSION
from kvctl_agent.errors import RequestRefused
from kvctl_agent.export.exports import Exports
from kvctl_agent.layout.parallel import RankCoord
from kvctl_agent.memory.buffers import RingMemory, StagingBuffers
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.local_info import LocalInfo
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.peer import Peer, PeerState
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.recording import InputLog
from kvctl_agent.protocol.registry import Roster
from kvctl_agent.runtime.control_channel import ControlChannel
from kvctl_agent.runtime.peer_connections import PeerConnections
from kvctl_agent.runtime.pipelining import Pipelining
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.telemetry.stage_times import room_rows
from kvctl_agent.transport.base import Transport

_ROWS = 1000
_DESCRIPTOR_BYTES = 512  # of lane_descriptor_ns: a token row of few heads


class QueriedAgent(Protocol):
    """What the observer sees of an agent."""

    name: str
    role: Role
    incarnation: int
    settings: Settings
    telemetry: Telemetry
    transport: Transport
    pool: KVPool
    ring: RingMemory | None
    buffers: StagingBuffers | None
    local: LocalInfo
    machine: Machine
    inputs: InputLog
    links: ControlChannel | None
    connections: PeerConnections
    pipelining: Pipelining
    exports: Exports

    @property
    def accepting(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    def waiting_for(self) -> str | None: ...

    def rosters(self) -> list[tuple[str, Roster]]: ...


class AdminQueries:
    """One method per admin command, with its arguments as keywords."""

    def __init__(self, agent: QueriedAgent) -> None:
        self._agent = agent
        self._started_ns = time.monotonic_ns()
        self._lanes: dict[str, str | list[str]] | None = None

    def handlers(self) -> Mapping[str, Callable[[dict[str, Any]], Any]]:
        """What the admin server serves of it: every declared command that is not the server's own and does not act."""
        reads = [command.name for command in COMMANDS if hasattr(self, command.name) and command.name != "hello"]
        return {name: self._handler(name) for name in reads}

    def _handler(self, name: str) -> Callable[[dict[str, Any]], Any]:
        method = getattr(self, name)
        return lambda args: method(**args)

    def hello(self) -> Hello:
        agent = self._agent
        return {
            "name": agent.name,
            "role": agent.role,
            "pid": os.getpid(),
            "version": VERSION,
            "protocol": [PROTOCOL_MIN, PROTOCOL_MAX],
            "incarnation": f"{agent.incarnation:016x}",
            "level": "",
            "capabilities": sorted(command.name for command in COMMANDS),
            "uptime_ns": time.monotonic_ns() - self._started_ns,
            "draining": agent.draining,
            "now_ns": agent.telemetry.clock.wall_ns(time.monotonic_ns()),
        }

    def inputs(self, since: int | None = None, until: int | None = None) -> InputPage:
        return page(self._agent.inputs, self._agent.local, self._agent.telemetry.clock, since, until)

    def config(self) -> list[ConfigRow]:
        return self._agent.settings.rows()

    def bootstrap(self) -> list[Bootstrap]:
        return instances(self._agent.name, self._agent.rosters())

    def status(self) -> Status:
        agent, telemetry = self._agent, self._agent.telemetry
        coord, side, pool = agent.local.coord, agent.local.side, agent.pool
        if self._lanes is None:
            self._lanes = {key: _shown(value) for key, value in agent.transport.describe().items()}
        met = list(agent.machine.peers.values())
        in_use = kinds_in_use(agent.connections, pool, agent.local, met)
        peers: dict[str, int] = {}
        for peer in met:
            peers[peer.state.value] = peers.get(peer.state.value, 0) + 1
        total = telemetry.metrics.total
        return {
            "name": agent.name,
            "role": agent.role,
            "rank": {**_axes(coord), "unique": agent.local.unique_rank},
            "sizes": {"dp": side.dp, "pp": side.pp, "cp": side.cp, "tp": side.tp},
            "pid": os.getpid(),
            "incarnation": f"{agent.incarnation:016x}",
            "version": VERSION,
            "uptime_ns": time.monotonic_ns() - self._started_ns,
            "transport": {**self._lanes, "lanes": [*self._lanes["lanes"], *in_use]},
            "device": "cpu" if pool.device is None else pool.device.name,
            "rooms": telemetry.rooms.states(),
            "rooms_finished_total": {
                state.label: int(total("kvctl_rooms_finished_total", state.label))
                for state in (RoomState.SUCCESS, RoomState.FAILED)
            },
            "bytes_total": int(total("kvctl_part_bytes_total")),
            "rate": telemetry.rate.window(time.monotonic_ns()),
            "latency": telemetry.latencies.summary(),
            "ring": ring_use(agent.machine),
            "peers": peers,
            "pipeline": self._pipeline_use(),
            "pool": {
                "pages": pool.num_pages,
                "page_size": pool.page_size,
                "bytes": pool.nbytes,
                "layers": len(agent.local.layers),
                "heads": agent.local.held[0].heads,
            },
            "waiting_for": agent.waiting_for(),
            "accepting": agent.accepting,
            "draining": agent.draining,
            "draining_age_ns": since(telemetry.drain_began_ns, time.monotonic_ns()),
            "resumed_age_ns": None if agent.draining else since(telemetry.drain_ended_ns, time.monotonic_ns()),
            "memory_gb_per_s": agent.connections.memory_gb_per_s,
            "process": process_use(),
            "metrics_url": agent.exports.metrics_url or None,
        }

    def rooms(self, state: str | None = None, limit: int = _ROWS) -> list[RoomRow]:
        rows = self._agent.telemetry.rooms.rows(state, limit)
        for row in rows:
            add_diagnosis(self._agent.machine, row)
        return rows

    def room(self, room: int) -> list[RoomDetail]:
        found = self._agent.telemetry.rooms.detail(room)
        if not found:
            raise RequestRefused(ErrorCode.UNKNOWN_ROOM, f"{self._agent.name} knows no room {room}, active or lately")
        for row in found:
            add_diagnosis(self._agent.machine, row)
            row["owed_parts"] = owed_parts(self._agent.machine, row)
        return found

    def slow(self, limit: int = _ROWS) -> list[RoomRow]:
        return self._agent.telemetry.rooms.slow(limit)

    def history(self, limit: int = _ROWS) -> list[RoomRow]:
        return self._agent.telemetry.rooms.history(limit)

    def failed(self, limit: int = _ROWS) -> FailedRooms:
        found = self._agent.telemetry.rooms.failed(limit)
        for row in found["rooms"]:
            add_diagnosis(self._agent.machine, row)
        return found

    def staging(self) -> Staging:
        agent = self._agent
        buffers = agent.buffers
        return {
            "agent": agent.name,
            "role": agent.role,
            "enabled": agent.settings["staging"] != "off",
            "ring": ring_view(agent.machine, agent.telemetry),
            "buffers": None
            if buffers is None
            else {
                "size_bytes": buffers.count * buffers.buffer_bytes,
                "piece_bytes": buffers.buffer_bytes,
                "pieces": buffers.count,
                "pieces_used": buffers.in_use,
                "pieces_high_water": buffers.high_water,
            },
            "gated": gated_parts(agent.machine),
            "fallbacks_total": int(agent.telemetry.metrics.total("kvctl_fallbacks_total")),
        }

    def layers(self, room: int | None = None) -> list[LayerRow]:
        telemetry = self._agent.telemetry
        if room is None:
            return telemetry.stages.rows()
        records = telemetry.rooms.find(room)
        if not records:
            raise RequestRefused(ErrorCode.UNKNOWN_ROOM, f"{self._agent.name} knows no room {room}, active or lately")
        return room_rows(records, telemetry.clock, self._agent.name)

    def peers(self) -> list[PeerRow]:
        rooms = self._agent.telemetry.rooms.active()
        return [self._peer(peer, rooms) for peer in list(self._agent.machine.peers.values())]

    def events(self, since: int | None = None, limit: int = _ROWS) -> Events:
        return self._agent.telemetry.recorder.since(since, limit)

    def metrics(self) -> list[MetricFamily]:
        """All counters; gauges are set here, since nobody else needs them up to date."""
        agent, metrics = self._agent, self._agent.telemetry.metrics
        states = agent.telemetry.rooms.states()
        for state in RoomState:
            metrics.set("kvctl_rooms_active", states.get(state.label, 0), state.label)
        peers = [peer.state for peer in list(agent.machine.peers.values())]
        for peer_state in PeerState:
            metrics.set("kvctl_peers", peers.count(peer_state), peer_state.value)
        if isinstance(agent.machine, PrefillMachine):
            metrics.set("kvctl_parts_parked", len(agent.machine.parked()))
        use = ring_use(agent.machine)
        if use is not None and isinstance(agent.machine, DecodeMachine):
            metrics.set("kvctl_ring_size_bytes", use["size_bytes"])
            metrics.set("kvctl_ring_used_bytes", use["used_bytes"])
            metrics.set("kvctl_ring_high_water_bytes", use["high_water_bytes"])
            metrics.set("kvctl_quarantined_bytes", agent.machine.quarantined_bytes)
        return metrics.snapshot()

    # ---- parts ------------------------------------------------------------------------------------------------

    def _pipeline_use(self) -> PipelineUse | None:
        agent = self._agent
        if agent.role != "prefill":
            return None
        options = agent.pipelining.options
        counted = agent.telemetry.metrics.totals("kvctl_pipeline_decisions_total")
        return {
            "mode": options.mode,
            "min_tokens": max(1, options.min_tokens),
            "group_size": options.group_size,
            "decisions": {reason: int(counted[reason,]) for reason in REASONS if (reason,) in counted},
        }

    def _peer(self, peer: Peer, rooms: list[Any]) -> PeerRow:
        agent, gate, who = self._agent, peer.gate, peer.who
        seen = [gate.position.round, gate.position.tail, gate.sequence] if gate.heard_ns else None
        measured = agent.connections.measured.get(peer.name)
        lane = agent.connections.by_peer.get(peer.name)
        kind = kind_of(agent.connections, agent.pool, agent.local, peer)
        role: Role = "decode" if agent.role == "prefill" else "prefill"
        return {
            "agent": agent.name,
            "peer": peer.name,
            "role": role,
            "state": peer.state.value,
            "incarnation": f"{peer.incarnation:016x}" if peer.incarnation else None,
            "endpoint": agent.links.endpoint(peer.name) if agent.links else "",
            "last_heard_ns": time.monotonic_ns() - peer.heard_ns if peer.heard_ns else None,
            "rtt_ns": peer.rtt_ns,
            "clock_offset_ns": None,
            "clock_error_ns": None,
            "control_queue": agent.links.waiting(peer.name) if agent.links else 0,
            "watermark_sent": list(peer.watermark_sent) if peer.watermark_sent else None,
            "watermark_seen": seen if agent.role == "prefill" else None,
            "lane": who.transport if who else "",
            "lane_gb_per_s": measured.cost.write_gb_per_s if measured else None,
            "lane_descriptor_ns": int(measured.cost.descriptor_us(_DESCRIPTOR_BYTES) * 1e3) if measured else None,
            "lane_measured_age_ns": time.monotonic_ns() - measured.at_ns if measured else None,
            "lane_kind": kind.name if kind else None,
            "lane_expected": kind.expected if kind else None,
            "lane_direct": lane.mapping.lane if lane and lane.mapping else None,
            "lane_why_not": lane.why_not if lane and agent.pool.device is not None and not lane.mapping else None,
            "same_host": who.host == agent.local.host if who else None,
            "process": who.process if who else None,
            "former": [f"{former.who.process} ({life:016x})" for life, former in peer.former.copy().items()],
            "rooms": sum(peer.name in record.peers for record in rooms),
            "errors_total": peer.errors_total,
            "last_error": peer.last_error,
            "differences": list(peer.differences),
        }


def _axes(coord: RankCoord) -> dict[str, int]:
    return dict(zip(coord._fields, coord, strict=True))


def _shown(value: Any) -> str | list[str]:
    """What an engine says of itself, as text."""
    if isinstance(value, dict):
        return [f"{name}={one}" for name, one in value.items()]
    return [str(one) for one in value] if isinstance(value, list) else str(value)
