"""Registry of all health codes.

Each health code is a function of a snapshot, declared with `health_code` in one of these modules:

- `processes`: workers that have ended, are stopped or hang
- `ready`: agents that cannot serve
- `peers`: pairs of agents
- `staging`: rings, grants, quarantined memory
- `stuck_rooms`: rooms that make no progress
- `rooms`: corrupt data, traffic
- `leases`: handshakes, leases and recomputed prompts of vLLM's own connectors
- `transport`: lanes, engines, GPUs, limits, metrics
- `nics`: network devices of the hosts
- `network`: the network between two hosts
- `engine_metrics`: engines without an agent

Functions that several of these modules use are in `facts`; `advice` has the remedies that depend on the engine.
"""

from __future__ import annotations

from kvctl.health.codes import (
    engine_metrics,
    leases,
    network,
    nics,
    peers,
    processes,
    ready,
    rooms,
    staging,
    stuck_rooms,
    transport,
)
from kvctl.health.finding import Code

CODES: tuple[Code, ...] = (
    rooms.checksum_mismatch,
    rooms.page_reused,
    rooms.ready_violation,
    leases.read_after_free,
    transport.device_error,
    transport.register_failed,
    processes.process_ended,
    processes.process_stopped,
    processes.loop_starved,
    processes.engine_silent,
    ready.port_clash,
    peers.compat_mismatch,
    peers.plan_mismatch,
    rooms.wrong_role,
    peers.peer_stale,
    ready.agent_draining,
    leases.handshake_failed,
    network.data_blocked,
    staging.ring_gated_empty,
    staging.ring_cycle,
    staging.ring_pinned,
    peers.peer_lost,
    peers.subscriber_dead,
    staging.grant_unanswered,
    transport.fds_low,
    transport.ports_low,
    nics.nic_down,
    nics.nic_errors,
    nics.gid_unroutable,
    nics.lane_not_rdma,
    nics.rail_idle,
    nics.numa_far,
    transport.lane_slow,
    stuck_rooms.stuck_scatter,
    stuck_rooms.stuck_transfer,
    stuck_rooms.stuck_bootstrap,
    stuck_rooms.stuck_waiting,
    engine_metrics.queue_stuck,
    rooms.room_unclaimed,
    leases.blocks_unread,
    rooms.hold_expired,
    engine_metrics.requests_failed,
    engine_metrics.no_tokens,
    engine_metrics.recomputed,
    ready.not_ready,
    transport.transport_error,
    staging.chunk_oversized,
    staging.ring_small,
    transport.descriptor_flood,
    peers.peer_blocking,
    transport.gil_wait,
    transport.ready_gap,
    staging.quarantine,
    rooms.room_duplicate,
    rooms.idle,
    rooms.internal_error,
    transport.metric_implausible,
    peers.clock_skew,
)
"""All health codes; causes come before their consequences, because equally severe findings are listed in this order."""

CODES_BY_NAME: dict[str, Code] = {code.name: code for code in CODES}
