"""Every health code, in the order in which they explain each other: what comes first is more often the cause."""

from __future__ import annotations

from kvctl.health.codes.corruption import CHECKSUM_MISMATCH, PAGE_REUSED, READY_VIOLATION
from kvctl.health.codes.draining import DRAINING
from kvctl.health.codes.failures import DEVICE
from kvctl.health.codes.fit import COMPAT_MISMATCH, PLAN_MISMATCH
from kvctl.health.codes.grants import CHUNK_OVERSIZED, GRANT_UNANSWERED
from kvctl.health.codes.lanes import DESCRIPTOR_FLOOD, LANE_SLOW, READY_GAP
from kvctl.health.codes.limits import FDS_LOW, INTERNAL_ERROR, PORT_CLASH, PORTS_LOW, REGISTER_FAILED, TRANSPORT
from kvctl.health.codes.lost import PEER_LOST
from kvctl.health.codes.numbers import METRIC_IMPLAUSIBLE
from kvctl.health.codes.peers import CLOCK_SKEW, PEER_BLOCKING, PEER_STALE, SUBSCRIBER_DEAD
from kvctl.health.codes.quarantine import QUARANTINE
from kvctl.health.codes.readiness import NOT_READY
from kvctl.health.codes.ring import RING_GATED_EMPTY, RING_PINNED
from kvctl.health.codes.ring_size import RING_SMALL
from kvctl.health.codes.ring_waits import RING_CYCLE
from kvctl.health.codes.stuck import STUCK_BOOTSTRAP, STUCK_SCATTER, STUCK_TRANSFER, STUCK_WAITING
from kvctl.health.codes.traffic import IDLE, ROOM_DUPLICATE
from kvctl.health.finding import Code

CODES: tuple[Code, ...] = (
    CHECKSUM_MISMATCH,
    PAGE_REUSED,
    READY_VIOLATION,
    DEVICE,
    REGISTER_FAILED,
    PORT_CLASH,
    COMPAT_MISMATCH,
    PLAN_MISMATCH,
    PEER_STALE,
    DRAINING,
    RING_GATED_EMPTY,
    RING_CYCLE,
    RING_PINNED,
    PEER_LOST,
    SUBSCRIBER_DEAD,
    GRANT_UNANSWERED,
    FDS_LOW,
    PORTS_LOW,
    LANE_SLOW,
    STUCK_SCATTER,
    STUCK_TRANSFER,
    STUCK_BOOTSTRAP,
    STUCK_WAITING,
    NOT_READY,
    TRANSPORT,
    CHUNK_OVERSIZED,
    RING_SMALL,
    DESCRIPTOR_FLOOD,
    PEER_BLOCKING,
    READY_GAP,
    QUARANTINE,
    ROOM_DUPLICATE,
    IDLE,
    INTERNAL_ERROR,
    METRIC_IMPLAUSIBLE,
    CLOCK_SKEW,
)

CODES_BY_NAME: dict[str, Code] = {code.name: code for code in CODES}
