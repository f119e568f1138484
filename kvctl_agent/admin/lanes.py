"""What is said of lanes between GPUs: what carries them, by the rate they were measured at, and what could."""

from __future__ import annotations

from collections.abc import Iterable

from kvctl_agent.contract.memory import HOST
from kvctl_agent.memory.pool import KVPool
from kvctl_agent.protocol.local import Local
from kvctl_agent.protocol.peer import Peer
from kvctl_agent.runtime.lanes import Lanes
from kvctl_agent.transport.environment import has_infiniband
from kvctl_agent.transport.lane_kind import LaneKind, lane_kind


def kind_of(lanes: Lanes, pool: KVPool, local: Local, peer: Peer) -> LaneKind | None:
    """What carries bytes from our pool to this peer's; None where ours is on no GPU, or it was not measured."""
    measured = lanes.measured.get(peer.name)
    if measured is None or peer.who is None or pool.device is None or pool.device.index == HOST:
        return None
    return lane_kind(measured.cost.write_gb_per_s, peer.who.host == local.host, has_infiniband())


def kinds_in_use(lanes: Lanes, pool: KVPool, local: Local, peers: Iterable[Peer]) -> list[str]:
    """All kinds of lanes that were measured, each with its best rate."""
    best: dict[str, float] = {}
    for peer in peers:
        kind, measured = kind_of(lanes, pool, local, peer), lanes.measured.get(peer.name)
        if kind is not None and measured is not None:
            best[kind.name] = max(best.get(kind.name, 0.0), measured.cost.write_gb_per_s)
    return [f"{name} (inferred: {rate:.3g} GB/s)" for name, rate in sorted(best.items())]
