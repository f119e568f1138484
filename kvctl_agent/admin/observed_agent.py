"""An agent as the read-only admin commands see it: `ObservedRank` over the agent's components."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Set
from functools import cached_property
from typing import Any

from kvctl_agent.admin import machine_views
from kvctl_agent.admin.observed_rank import RankDescription
from kvctl_agent.admin.tcp_connections import connections_to
from kvctl_agent.admin.transfer_costs import TransferCosts
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.addresses import host_of, ip_address
from kvctl_agent.contract.choices import HOST, REASONS
from kvctl_agent.contract.recording import InputPage
from kvctl_agent.contract.snapshots import (
    Bootstrap,
    ConfigRow,
    GatedPart,
    Integration,
    OwedParts,
    PeerRow,
    PipelineUse,
    RegisteredRank,
    RingUse,
    RingView,
    Role,
    RoomRow,
    StagingBuffers,
    TransferCost,
)
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.layout.plan_inputs import PLAN_VERSION
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.parts import AgentParts
from kvctl_agent.protocol.bootstrap_registry import Rank, Roster
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.messages import PROTOCOL_VERSION
from kvctl_agent.protocol.peer import LocalInfo, Peer, PeerState
from kvctl_agent.runtime.peer_connections import PeerConnections
from kvctl_agent.telemetry.hub import Telemetry
from kvctl_agent.transport.cost_probe import Interconnect, interconnect_of
from kvctl_agent.transport.environment import has_infiniband

_MOST_MISSING = 256  # ranks listed in `bootstrap`
_INTERFACE = re.compile(r"[\w.-]*")  # in an IPv6 address, behind %
_DESCRIPTOR_BYTES = 512  # size in lane_descriptor_ns: a token row of few heads


class ObservedAgent:
    """`ObservedRank` of an agent.

    Args:
        parts: the agent's components.
        integration: the engine that the agent is part of; None if it is embedded otherwise.
    """

    def __init__(self, parts: AgentParts, integration: Integration | None = None) -> None:
        self._parts = parts
        self._integration = integration
        self._costs = TransferCosts(parts)

    @property
    def name(self) -> str:
        return self._parts.name

    @property
    def role(self) -> Role:
        return self._parts.role

    @property
    def host(self) -> str:
        return self._parts.local.hostname

    @property
    def gpu_pci(self) -> str | None:
        device = self._parts.pool.device
        return None if device is None else device.pci

    @property
    def incarnation(self) -> int:
        return self._parts.local.incarnation

    @property
    def telemetry(self) -> Telemetry:
        return self._parts.telemetry

    @property
    def accepting(self) -> bool:
        return self._parts.lifecycle.accepting

    @property
    def draining(self) -> bool:
        return self._parts.lifecycle.draining

    @property
    def staging_enabled(self) -> bool:
        return bool(self._parts.settings["staging"] != "off")

    @property
    def quarantined_bytes(self) -> int:
        machine = self._parts.machine
        return machine.quarantined_bytes if isinstance(machine, DecodeMachine) else 0

    @property
    def memory_gb_per_s(self) -> float | None:
        return self._parts.connections.memory_gb_per_s

    @cached_property
    def _transport(self) -> dict[str, str | list[str]]:
        return {key: _shown(value) for key, value in self._parts.transport.describe().items()}

    @property
    def _protocol(self) -> str:
        """Protocol that the engine tells; "" for none."""
        return str(self._transport.get("protocol", ""))

    def describe(self) -> RankDescription:
        parts, pool = self._parts, self._parts.pool
        met = list(parts.machine.peers.values())
        in_use = kinds_in_use(parts.connections, pool, parts.local, met, self._protocol)
        return {
            "rank": self._rank,
            "sizes": self._sizes,
            "registry": parts.lifecycle.instances[0] if parts.role == "prefill" else None,
            "transport": {**self._transport, "lanes": [*self._transport["lanes"], *in_use]},
            "device": "cpu" if pool.device is None else pool.device.name,
            "pool": self._pool,
            "dtypes": pool.dtypes,
            "integration": self._integration,
            "metrics_url": parts.exports.metrics_url or None,
        }

    def waiting_for(self) -> str | None:
        return self._parts.lifecycle.waiting_for()

    def not_ready(self) -> str | None:
        return self._parts.lifecycle.not_ready()

    def inputs(self, since: int | None, until: int | None) -> InputPage:
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

    def peers(self) -> list[PeerRow]:
        rooms, machine = self._parts.telemetry.rooms.active(), self._parts.machine
        listed = {name for instance in machine.instances for name in machine.roster(instance)}
        rows = [self._peer(peer, rooms, listed) for peer in list(machine.peers.values())]
        troubled = [row for row in rows if row["address"] and self._troubled(row)]
        if troubled:  # reading the kernel's tables takes a millisecond for each thousand connections of the host
            connections = connections_to({row["address"] or "" for row in troubled})
            for row in troubled:
                row["tcp"] = connections[row["address"] or ""]
        return rows

    def _troubled(self, row: PeerRow) -> bool:
        """Returns whether a peer is silent or does not hear this agent, or a write to it takes as long."""
        waits_ns = max(row["oldest_write_ns"] or 0, row["unheard_ns"] or 0)
        silent = row["state"] in (PeerState.CONNECTING, PeerState.SUSPECT, PeerState.LOST)
        return silent or bool(waits_ns >= self._parts.settings["suspect_s"] * 1e9)

    def costs(self, tokens: int) -> tuple[int, list[TransferCost]]:
        return self._costs.read(tokens)

    def peer_states(self) -> list[str]:
        return [peer.state.value for peer in list(self._parts.machine.peers.values())]

    def complete(self, row: RoomRow) -> None:
        machine_views.add_diagnosis(self._parts.machine, row)

    def owed_parts(self, row: RoomRow) -> list[OwedParts]:
        return machine_views.owed_parts(self._parts.machine, row)

    def ring_use(self) -> RingUse | None:
        return machine_views.ring_use(self._parts.machine)

    def ring_view(self) -> RingView | None:
        return machine_views.ring_view(self._parts.machine, self._parts.telemetry)

    def gated_parts(self) -> list[GatedPart]:
        return machine_views.gated_parts(self._parts.machine)

    def buffers(self) -> StagingBuffers | None:
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

    def pipeline(self) -> PipelineUse | None:
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

    def _peer(self, peer: Peer, rooms: list[Any], listed: Set[str]) -> PeerRow:
        parts, gate, info = self._parts, peer.gate, peer.info
        endpoint = parts.control_channel.endpoint(peer.name)
        watermark = [gate.position.round, gate.position.tail, gate.sequence] if gate.heard_ns else None
        measured = parts.connections.measured.get(peer.name)
        connection = parts.connections.by_peer.get(peer.name)
        kind = kind_of(parts.connections, parts.pool, parts.local, peer, self._protocol)
        role: Role = "decode" if parts.role == "prefill" else "prefill"
        return {
            "agent": parts.name,
            "peer": peer.name,
            "role": role,
            "state": peer.state.value,
            "incarnation": f"{peer.incarnation:016x}" if peer.incarnation else None,
            "endpoint": endpoint,
            "last_heard_ns": time.monotonic_ns() - peer.heard_ns if peer.heard_ns else None,
            "unheard_ns": time.monotonic_ns() - peer.echoed_ns if peer.echoed_ns else None,
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
            "lane_source": kind.source if kind else None,
            "lane_direct": connection.mapping.lane if connection and connection.mapping else None,
            "lane_why_not": connection.why_not
            if connection and parts.pool.device is not None and not connection.mapping
            else None,
            "same_host": info.host == parts.local.host if info else None,
            "peer_host": info.hostname if info else None,
            "address": _numeric(info.address if info else "") or _numeric(host_of(endpoint)),
            "wire_ns": connection.usual_wire_ns if connection else None,
            "oldest_write_ns": parts.transfers.oldest_write_ns(peer.name) if parts.transfers else None,
            "tcp": None,
            "process": info.process if info else None,
            "needed": not peer.departed and (parts.role == "prefill" or peer.name in listed),
            "former": [f"{former.info.process} ({life:016x})" for life, former in peer.former.copy().items()],
            "rooms": sum(peer.name in record.peers for record in rooms),
            "errors_total": peer.errors_total,
            "last_error": peer.last_error,
            "differences": list(peer.differences),
        }


def _numeric(host: str) -> str | None:
    """Returns a host that is a numeric address, which peers may choose freely; None for any other text."""
    address = ip_address(host)
    return str(address) if address is not None and _INTERFACE.fullmatch(str(address).partition("%")[2]) else None


def kind_of(
    connections: PeerConnections, pool: KVPool, local: LocalInfo, peer: Peer, protocol: str = ""
) -> Interconnect | None:
    """Returns the interconnect to a peer; None if its rate is not measured, or if the pool is host memory.

    `protocol` is the one that the engine tells, without which the rate decides.
    """
    measured = connections.measured.get(peer.name)
    if measured is None or peer.info is None or pool.device is None or pool.device.index == HOST:
        return None
    return interconnect_of(measured.cost.write_gb_per_s, peer.info.host == local.host, has_infiniband(), protocol)


def kinds_in_use(
    connections: PeerConnections, pool: KVPool, local: LocalInfo, peers: Iterable[Peer], protocol: str = ""
) -> list[str]:
    """Returns one text per kind of interconnect in use, with its best measured rate: `rdma (inferred: 48 GB/s)`."""
    best: dict[Interconnect, float] = {}
    for peer in peers:
        kind, measured = kind_of(connections, pool, local, peer, protocol), connections.measured.get(peer.name)
        if kind is not None and measured is not None:
            best[kind] = max(best.get(kind, 0.0), measured.cost.write_gb_per_s)
    return [
        f"{kind.name} ({'inferred: ' * (kind.source == 'rate')}{rate:.3g} GB/s)" for kind, rate in sorted(best.items())
    ]


def _shown(value: Any) -> str | list[str]:
    """Formats a value of the transport's description: a list or dict as a list of texts, any other value as text."""
    if isinstance(value, dict):
        return [f"{name}={item}" for name, item in value.items()]
    return [str(item) for item in value] if isinstance(value, list) else str(value)


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
