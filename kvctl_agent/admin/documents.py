"""Documents of an agent: what it publishes for the observer, built from its components.

The control loop builds them in pieces between other work, so a builder copies what it iterates over, and the rooms,
peers and parts of one document may be as of slightly different times. A builder makes no call that releases the
interpreter, such as one of a file system: beside a spinning engine it gets it back 16 to 170 ms later.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from kvctl_agent.admin import machine_views
from kvctl_agent.admin.transfer_costs import peer_costs
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.addresses import host_of, ip_address
from kvctl_agent.contract.choices import HOST, REASONS
from kvctl_agent.contract.snapshots import (
    Bootstrap,
    Integration,
    PeerRow,
    PipelineUse,
    RegisteredRank,
    Role,
    StagingBuffers,
)
from kvctl_agent.errors import LayoutError
from kvctl_agent.layout.parallel import ParallelConfig, RankCoord
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.observer.documents import Builder
from kvctl_agent.observer.nics import NIC_SETTINGS
from kvctl_agent.parts import AgentParts
from kvctl_agent.protocol.bootstrap_registry import Rank, Roster
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.peer import LocalInfo, Peer
from kvctl_agent.runtime.peer_connections import PeerConnections
from kvctl_agent.telemetry.engine_calls import CALLS
from kvctl_agent.telemetry.region import Document
from kvctl_agent.transport.base import described
from kvctl_agent.transport.cost_probe import Interconnect, interconnect_of
from kvctl_agent.transport.environment import has_infiniband

_Pieces = Iterator[Mapping[str, Any]]

_COSTS_EVERY_NS = 1_000_000_000
_MOST_MISSING = 256  # ranks listed in `bootstrap`
_INTERFACE = re.compile(r"[\w.-]*")  # in an IPv6 address, behind %
_DESCRIPTOR_BYTES = 512  # size in lane_descriptor_ns: a token row of few heads


def builders(parts: AgentParts, integration: Integration | None) -> dict[Document, Builder]:
    """Returns the builder of each document of an agent.

    Args:
        integration: the engine that the agent is part of; None if it is embedded otherwise.
    """
    protocol = str(parts.transport.describe().get("protocol", ""))  # that the transfer engine tells; "" for none
    network = protocol, has_infiniband()
    found: dict[Document, Builder] = {
        Document.STATE: partial(_state, parts, network),
        Document.STAGING: partial(_staging, parts),
        Document.ROOMS: partial(_rooms, parts),
        Document.PEERS: partial(_peers, parts, network),
        Document.BOOTSTRAP: partial(_bootstrap, parts),
        Document.CONFIG: partial(_config, parts),
        Document.IDENTITY: partial(_identity, parts, integration),
    }
    if parts.role == "prefill":
        found[Document.COSTS] = partial(peer_costs, parts)
    return found


def versions(parts: AgentParts) -> dict[Document, Callable[[], object]]:
    """Returns values of the documents that seldom change, for `DocumentPublisher`."""
    return {
        Document.IDENTITY: lambda: parts.local.incarnation,
        Document.CONFIG: lambda: parts.settings.changes,
        Document.COSTS: lambda: (time.monotonic_ns() // _COSTS_EVERY_NS, _peer_states(parts)),
    }


# ---- documents -------------------------------------------------------------------------------------------------


def _identity(parts: AgentParts, integration: Integration | None) -> _Pieces:
    local, pool, device = parts.local, parts.pool, parts.pool.device
    side = local.side
    yield {
        "version": VERSION,
        "host": local.hostname,
        "incarnation": f"{local.incarnation:016x}",
        "rank": {**_axes(local.coord), "unique": local.unique_rank},
        "sizes": _axes((side.dp, side.pp, side.cp, side.tp)),
        "transport": described(parts.transport),
        "device": "cpu" if device is None else device.name,
        "gpu_pci": None if device is None else device.pci,
        "pool": {
            "pages": pool.num_pages,
            "page_size": pool.page_size,
            "bytes": pool.nbytes,
            "layers": len(local.layers),
            "heads": local.shards[0].heads,
        },
        "dtypes": pool.dtypes,
        "integration": integration,
        "environment": {name: value for name in NIC_SETTINGS if (value := os.environ.get(name))},
        "staging": parts.settings["staging"] != "off",
        "calls": list(CALLS),
        "suspect_s": float(parts.settings["suspect_s"]),
        "lost_s": float(parts.settings["lost_s"]),
    }


def _state(parts: AgentParts, network: tuple[str, bool]) -> _Pieces:
    lifecycle, machine = parts.lifecycle, parts.machine
    decode = parts.role == "decode"
    not_connected = lifecycle.not_connected()
    yield {
        "state": lifecycle.state,
        "accepting": lifecycle.accepting,
        "draining": lifecycle.draining,
        "not_ready": lifecycle.not_ready(),
        "not_connected": not_connected,
        "waiting_for": lifecycle.waiting_for(),
        "registry": None if decode else lifecycle.instances[0],
        "serving": len(lifecycle.serving()) if decode else 0,
        "instances": len(lifecycle.all_instances),
        "lanes": kinds_in_use(parts.connections, parts.pool, parts.local, list(machine.peers.values()), network),
        "memory_gb_per_s": parts.connections.memory_gb_per_s,
        "quarantined_bytes": quarantined_bytes(parts),
        "ring": machine_views.ring_use(machine),
        "buffers": _buffers(parts),
        "pipeline": _pipeline(parts),
        "peers": _peer_states(parts),
        "gated": machine_views.gated_count(machine),
        "engine_rooms": parts.handles.count,
    }


def _config(parts: AgentParts) -> _Pieces:
    yield {}
    yield from parts.settings.rows()


def _bootstrap(parts: AgentParts) -> _Pieces:
    yield {}
    for endpoint, roster in parts.lifecycle.rosters():
        yield bootstrap_row(parts.name, endpoint, roster)


def _peers(parts: AgentParts, network: tuple[str, bool]) -> _Pieces:
    machine = parts.machine
    listed = {name for instance in machine.instances for name in machine.roster(instance)}
    yield {}
    for peer in list(machine.peers.values()):
        yield _peer(parts, peer, network, needed=parts.role == "prefill" or peer.name in listed)


def _staging(parts: AgentParts) -> _Pieces:
    if parts.role == "decode":
        yield {"ring": machine_views.ring_state(parts.machine)}
        yield from machine_views.allocations(parts.machine)
    else:
        yield {}
        yield from machine_views.gated_parts(parts.machine)


def _rooms(parts: AgentParts) -> _Pieces:
    yield {}
    yield from machine_views.diagnoses(parts.machine)


# ---- parts of them ---------------------------------------------------------------------------------------------


def quarantined_bytes(parts: AgentParts) -> int:
    """Returns the memory that is not reused because a write to it may still be in flight."""
    machine = parts.machine
    return machine.quarantined_bytes if isinstance(machine, DecodeMachine) else 0


def _peer_states(parts: AgentParts) -> dict[str, int]:
    """Returns the number of peers by state."""
    states = [peer.state.value for peer in list(parts.machine.peers.values())]
    return {state: states.count(state) for state in dict.fromkeys(states)}


def _buffers(parts: AgentParts) -> StagingBuffers | None:
    buffers = parts.buffers
    if buffers is None:
        return None
    return {
        "size_bytes": buffers.count * buffers.buffer_bytes,
        "piece_bytes": buffers.buffer_bytes,
        "pieces": buffers.count,
        "pieces_used": buffers.in_use,
        "pieces_high_water": buffers.high_water,
    }


def _pipeline(parts: AgentParts) -> PipelineUse | None:
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


def _peer(parts: AgentParts, peer: Peer, network: tuple[str, bool], *, needed: bool) -> PeerRow:
    """Returns the row of a peer; the observer, which has the rooms, fills in `rooms` and `tcp`."""
    gate, info, now_ns = peer.gate, peer.info, time.monotonic_ns()
    endpoint = parts.control_channel.endpoint(peer.name)
    watermark = [gate.position.round, gate.position.tail, gate.sequence] if gate.heard_ns else None
    measured = parts.connections.measured.get(peer.name)
    connection = parts.connections.by_peer.get(peer.name)
    kind = kind_of(parts.connections, parts.pool, parts.local, peer, network)
    role: Role = "decode" if parts.role == "prefill" else "prefill"
    return {
        "agent": parts.name,
        "peer": peer.name,
        "role": role,
        "state": peer.state.value,
        "incarnation": f"{peer.incarnation:016x}" if peer.incarnation else None,
        "endpoint": endpoint,
        "last_heard_ns": now_ns - peer.heard_ns if peer.heard_ns else None,
        "unheard_ns": now_ns - peer.echoed_ns if peer.echoed_ns else None,
        "rtt_ns": peer.rtt_ns,
        "clock_offset_ns": None,
        "clock_error_ns": None,
        "control_queue": parts.control_channel.waiting(peer.name),
        "watermark_sent": list(peer.watermark_sent) if peer.watermark_sent else None,
        "watermark_seen": watermark if parts.role == "prefill" else None,
        "lane": info.transport if info else "",
        "lane_gb_per_s": measured.cost.write_gb_per_s if measured else None,
        "lane_descriptor_ns": int(measured.cost.descriptor_us(_DESCRIPTOR_BYTES) * 1e3) if measured else None,
        "lane_measured_age_ns": now_ns - measured.at_ns if measured else None,
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
        "needed": needed and not peer.departed,
        "former": [f"{former.info.process} ({life:016x})" for life, former in peer.former.copy().items()],
        "rooms": 0,
        "errors_total": peer.errors_total,
        "last_error": peer.last_error,
        "differences": list(peer.differences),
    }


def _numeric(host: str) -> str | None:
    """Returns a host that is a numeric address, which peers may choose freely; None for any other text."""
    address = ip_address(host)
    return str(address) if address is not None and _INTERFACE.fullmatch(str(address).partition("%")[2]) else None


def kind_of(
    connections: PeerConnections, pool: KVPool, local: LocalInfo, peer: Peer, network: tuple[str, bool] = ("", False)
) -> Interconnect | None:
    """Returns the interconnect to a peer; None if its rate is not measured, or if the pool is host memory.

    `network` is the protocol that the engine tells, without which the rate decides, and whether this machine has an
    RDMA device.
    """
    measured = connections.measured.get(peer.name)
    if measured is None or peer.info is None or pool.device is None or pool.device.index == HOST:
        return None
    protocol, infiniband = network
    return interconnect_of(measured.cost.write_gb_per_s, peer.info.host == local.host, infiniband, protocol)


def kinds_in_use(
    connections: PeerConnections,
    pool: KVPool,
    local: LocalInfo,
    peers: Iterable[Peer],
    network: tuple[str, bool] = ("", False),
) -> list[str]:
    """Returns one text per kind of interconnect in use, with its best measured rate: `rdma (inferred: 48 GB/s)`."""
    best: dict[Interconnect, float] = {}
    for peer in peers:
        if (kind := kind_of(connections, pool, local, peer, network)) is not None:
            best[kind] = max(best.get(kind, 0.0), connections.measured[peer.name].cost.write_gb_per_s)
    return [
        f"{kind.name} ({'inferred: ' * (kind.source == 'rate')}{rate:.3g} GB/s)" for kind, rate in sorted(best.items())
    ]


def bootstrap_row(agent: str, endpoint: str, roster: Roster) -> Bootstrap:
    """Returns a row of the reply to `bootstrap`: the roster that the registry at `endpoint` has sent last."""
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
