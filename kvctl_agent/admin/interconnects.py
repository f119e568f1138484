"""What is said of connections between GPUs: what carries them, by the rate they were measured at, and what could."""

from __future__ import annotations

from collections.abc import Iterable

from kvctl_agent.contract.memory import HOST
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.protocol.local_info import LocalInfo
from kvctl_agent.protocol.peer import Peer
from kvctl_agent.runtime.peer_connections import PeerConnections
from kvctl_agent.transport.environment import has_infiniband
from kvctl_agent.transport.interconnect import Interconnect, interconnect_of


def kind_of(connections: PeerConnections, pool: KVPool, local: LocalInfo, peer: Peer) -> Interconnect | None:
    """What carries bytes from our pool to this peer's; None where ours is on no GPU, or it was not measured."""
    measured = connections.measured.get(peer.name)
    if measured is None or peer.who is None or pool.device is None or pool.device.index == HOST:
        return None
    return interconnect_of(measured.cost.write_gb_per_s, peer.who.host == local.host, has_infiniband())


def kinds_in_use(connections: PeerConnections, pool: KVPool, local: LocalInfo, peers: Iterable[Peer]) -> list[str]:
    """All kinds of connections that were measured, each with its best rate."""
    best: dict[str, float] = {}
    for peer in peers:
        kind, measured = kind_of(connections, pool, local, peer), connections.measured.get(peer.name)
        if kind is not None and measured is not None:
            best[kind.name] = max(best.get(kind.name, 0.0), measured.cost.write_gb_per_s)
    return [f"{name} (inferred: {rate:.3g} GB/s)" for name, rate in sorted(best.items())]
