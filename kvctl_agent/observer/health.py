"""The answer to `health`: what the health codes of kvctl read, without rows that are plainly in order.

A large fleet is asked for this first. It has about 5 kB where the separate commands have 100 kB and more. The limits
below which something counts as in order are lower than those of every health code.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvctl_agent.contract.health import FAILED_NS, HEALTH_SETTINGS
from kvctl_agent.contract.snapshots import (
    ConfigRow,
    FailedRooms,
    Health,
    MetricFamily,
    PeerRow,
    RoomRow,
    Staging,
    Status,
)

_YOUNG_ROOM_NS = 5_000_000_000
_SHORT_WAIT_NS = 2_000_000_000  # of a gated part, and of a region of the ring
_HEARD_NS = 2_000_000_000
_SHORT_WRITE_NS = 1_000_000_000
_SHORT_WIRE_NS, _ODD_WIRE = 10_000_000, 3
_SHORT_QUEUE = 10
_MOST_FAILED = 20
_MOST_PEERS = 100


def health(
    status: Status,
    rooms: Sequence[RoomRow],
    failed: FailedRooms,
    staging: Staging,
    peers: Sequence[PeerRow],
    metrics: list[MetricFamily],
    config: Sequence[ConfigRow],
    now_ns: int,
) -> Health:
    """Returns the answer, from those to the commands of the same names.

    Args:
        metrics: those of `HEALTH_METRICS`, without buckets.
        now_ns: the agent's wall clock.
    """
    old = [row for row in rooms if row["state_age_ns"] >= _YOUNG_ROOM_NS or row["state"] == "Failed"]
    recent = [row for row in failed["rooms"] if now_ns - (row["finished_at_ns"] or now_ns) <= FAILED_NS]
    least_wire_ns = min((row["wire_ns"] for row in peers if row["wire_ns"] is not None), default=0)
    odd = [row for row in peers if not _in_order(row, status, least_wire_ns)]
    kept = _waiting_only(staging)
    mentioned = _mentioned([*old, *recent[:_MOST_FAILED]], kept)
    return {
        "status": status,
        "rooms": old,
        "failed": {**failed, "rooms": recent[:_MOST_FAILED]},
        "staging": kept,
        "peers": odd[:_MOST_PEERS],
        "metrics": metrics,
        "config": [{"key": row["key"], "value": row["value"]} for row in config if row["key"] in HEALTH_SETTINGS],
        "oldest_room_ns": max((row["age_ns"] for row in rooms), default=0),
        "omitted": {
            "rooms": len(rooms) - len(old),
            "failed": max(0, len(recent) - _MOST_FAILED),
            "peers": len(peers) - min(len(odd), _MOST_PEERS),
        },
        "mentioned": [
            {"peer": row["peer"], "incarnation": row["incarnation"], "peer_host": row["peer_host"]}
            for row in peers
            if row["peer"] in mentioned
        ],
    }


def _in_order(row: PeerRow, status: Status, least_wire_ns: int) -> bool:
    """Returns whether no health code can report this peer; `least_wire_ns` is the least of any peer's parts."""
    integration, memory, lane = status["integration"], status["memory_gb_per_s"], row["lane_gb_per_s"]
    if integration is not None and integration["mode"] == "observe":
        return False  # its engine does not notice the end of a peer; kvctl does
    heard = row["state"] == "ready" and max(row["last_heard_ns"] or 0, row["unheard_ns"] or 0) < _HEARD_NS
    fluent = (row["oldest_write_ns"] or 0) < _SHORT_WRITE_NS
    fluent = fluent and (row["wire_ns"] or 0) < max(_SHORT_WIRE_NS, _ODD_WIRE * least_wire_ns)
    fast = row["lane_kind"] == row["lane_expected"] if row["lane_expected"] else True
    if memory is not None and lane is not None and row["same_host"] and not row["lane_kind"]:
        fast = fast and lane >= memory
    queued = (row["control_queue"] or 0) >= _SHORT_QUEUE
    return heard and fluent and fast and not (queued or row["differences"] or row["former"])


def _waiting_only(staging: Staging) -> Staging:
    """Leaves out the gated parts, and the regions of the ring, unless one of them is old.

    All or none are left out: which region is the oldest that others wait for depends on their order.
    """
    ring = staging["ring"]
    if all(max(part["age_ns"], part["asked_age_ns"] or 0) < _SHORT_WAIT_NS for part in staging["gated"]):
        staging = {**staging, "gated": []}
    if ring is not None and all(
        each["age_ns"] < _SHORT_WAIT_NS and each["state"] not in ("revoking", "quarantined") and not each["aside"]
        for each in ring["allocations"]
    ):
        staging = {**staging, "ring": {**ring, "allocations": []}}
    return staging


def _mentioned(rooms: Sequence[RoomRow], staging: Staging) -> set[str]:
    """Returns the names of the peers in rooms, regions and gated parts."""
    ring = staging["ring"]
    found = {name for row in rooms for name in (*row["peers"], *row["missing"], *row["owed"])}
    found.update(row["failure"]["rank"] for row in rooms if row["failure"] is not None)
    found.update(part["peer"] for part in staging["gated"])
    found.update(name for each in (ring["allocations"] if ring else ()) for name in each["writer"].split(", "))
    return found
