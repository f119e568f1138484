"""What the admin command `staging` says of a reader's ring and of a writer's gated parts."""

from __future__ import annotations

import time

from kvctl_agent.contract.snapshots import GatedPart, RingAllocation, RingUse, RingView
from kvctl_agent.protocol.decode import DecodeMachine
from kvctl_agent.protocol.machine import Machine
from kvctl_agent.protocol.prefill import PrefillMachine
from kvctl_agent.protocol.prefill.send_room import Part, PeerTransfer, Wait
from kvctl_agent.protocol.ring import GrantedRegion, RegionState
from kvctl_agent.telemetry.hub import Telemetry

GONE = "gone"


def ring_use(machine: Machine) -> RingUse | None:
    """None where there is no ring."""
    if not isinstance(machine, DecodeMachine) or not machine.ring.size_bytes:
        return None
    ring = machine.ring
    return {
        "size_bytes": ring.size_bytes,
        "used_bytes": min(ring.used_bytes, ring.size_bytes),
        "high_water_bytes": ring.high_water_bytes,
        "live": len(machine.holdings()),
    }


def ring_view(machine: Machine, telemetry: Telemetry) -> RingView | None:
    """None where there is no ring."""
    if not isinstance(machine, DecodeMachine) or not machine.ring.size_bytes:
        return None
    now = time.monotonic_ns()
    ring = machine.ring
    allocations = [_allocation(machine, holding, now) for holding in machine.holdings()]
    metrics, watermark = telemetry.metrics, ring.watermark
    pin = next((allocation for allocation in allocations if not allocation["aside"]), None)
    return {
        "size_bytes": ring.size_bytes,
        "head_bytes": ring.head,
        "round": ring.round,
        "used_bytes": ring.used_bytes,
        "high_water_bytes": ring.high_water_bytes,
        "watermark": {
            "round": watermark.round,
            "tail": watermark.tail,
            "age_ns": pin["age_ns"] if pin else 0,
        },
        "allocations": allocations,
        "copies": {
            "waiting": sum(allocation["state"] == RegionState.LANDED.value for allocation in allocations),
            "copying_age_ns": since(telemetry.copying_since_ns, now),
            "turn_age_ns": since(telemetry.arrival_turn_ns, now),
        },
        "granted_total": int(metrics.total("kvctl_ring_grants_total")),
        "refused_total": int(metrics.total("kvctl_ring_refusals_total")),
        "refused_largest_bytes": machine.refused_largest_bytes or None,
        "revoked_total": int(metrics.total("kvctl_ring_revokes_total")),
    }


def since(at_ns: int, now_ns: int) -> int | None:
    """Time since a monotonic moment; None for 0, which is none."""
    return max(0, now_ns - at_ns) if at_ns else None


def _allocation(machine: DecodeMachine, holding: GrantedRegion, now_ns: int) -> RingAllocation:
    region, key = holding.region, holding.key
    room = machine.rooms.get(holding.room.room)
    known = room is not None and room.nonce == holding.room.nonce
    return {
        "serial": region.serial,
        "room": str(holding.room.room),
        "nonce": str(holding.room.nonce),
        "writer": holding.room.peer,
        "chunk": key.chunk,
        "layers": [key.lo, key.hi],
        "offset": region.offset,
        "end": region.end,
        "round": region.round,
        "age_ns": now_ns - holding.granted_ns,
        "state": holding.state.value,
        "posted": holding.posted,
        "room_state": room.state.label if room is not None and known else GONE,
        "aside": machine.ring.is_aside(region.serial),
    }


def gated_parts(machine: Machine) -> list[GatedPart]:
    """Parts that are ready and may not go; none on a decode rank."""
    if not isinstance(machine, PrefillMachine):
        return []
    now = time.monotonic_ns()
    return [_gated(machine, leg, part, now) for leg, part in machine.parked()]


def _gated(machine: PrefillMachine, leg: PeerTransfer, part: Part, now_ns: int) -> GatedPart:
    grant, asked_ns = part.grant, part.asked_ns
    waits = machine.waits_for(leg, part).value
    if grant is not None and waits == Wait.WATERMARK.value:
        waits = f"{waits} round {grant.round - 1} tail {grant.end}"
    return {
        "room": str(leg.room),
        "peer": leg.peer,
        "chunk": part.key.chunk,
        "layers": [part.key.lo, part.key.hi],
        "bytes": part.nbytes,
        "waiting_for": waits,
        "age_ns": now_ns - part.ready_ns,
        "requests": part.asks,
        "asked_age_ns": now_ns - asked_ns if asked_ns else None,
    }
