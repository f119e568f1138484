"""Memory that is kept from use because somebody may still write there."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.health.answers import amount, rows, text
from kvctl.health.codes.formatting import listed
from kvctl.health.codes.ring import held_bytes, ring_of
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import size

# A peer that was lost for a moment gives it back by itself.
_LOST_AGE_NS = 10_000_000_000


def _quarantine(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.of_role("decode"):
        regions = [
            one
            for one in rows(ring_of(agent).get("allocations"))
            if text(one, "state") == "quarantined" and amount(one, "age_ns") >= _LOST_AGE_NS
        ]
        total = int(agent.total("kvctl_quarantined_bytes") or 0)
        in_ring = sum(held_bytes(one) for one in regions)
        earlier = snapshot.earlier(agent.name)
        lasting = earlier is None or (earlier.total("kvctl_quarantined_bytes") or 0) > 0
        if not regions and not (total > 0 and lasting):
            continue
        ring_bytes = amount(ring_of(agent), "size_bytes")
        former = {text(row, "peer"): _texts(row.get("former")) for row in agent.peers if row.get("former")}
        held_for = sorted({text(one, "writer") for one in regions} | _undrained(agent) | former.keys())
        processes = sorted(process for name in held_for for process in former.get(name, ()))
        room = next((text(row, "room") for row in agent.rooms if text(row, "state") == "Failed"), "")
        if regions:
            command = f"kvctl staging release {agent.name}:{regions[0].get('serial')}"
        elif room:
            command = f"kvctl staging release -e {agent.name} --room {room}"
        else:
            command = f"kvctl rooms -e {agent.name} --filter state=Failed"
        yield Finding(
            code="KV_QUARANTINE",
            severity=Severity.WARNING,
            subject=agent.name,
            agents=(agent.name, *held_for),
            since_ns=max((int(amount(one, "age_ns")) for one in regions), default=None),
            weight=max(total, in_ring),
            evidence={
                "quarantined_bytes": max(total, in_ring),
                "ring_bytes": in_ring,
                "ring_ratio": round(in_ring / ring_bytes, 3) if ring_bytes else None,
                "regions": len(regions),
                "peers": held_for,
                "processes": processes,
            },
            cause=f"{agent.name} keeps {size(max(total, in_ring))} of "
            f"{'ring and ' * bool(in_ring)}pages from use: "
            f"{listed(held_for)} may still write there, and nobody could prove the opposite"
            + (f"; replaced, but not known to have ended: {', '.join(processes)}" if processes else ""),
            remedy=f"`kvctl staging map -e {agent.name}` shows what is kept; make sure that the process of "
            f"{listed(held_for)} has ended, then `{command}`; it is given back by itself when that agent comes back",
        )


def _texts(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def _undrained(agent: Agent) -> set[str]:
    """Peers that have not drained failed rooms."""
    return {
        name
        for row in agent.rooms
        if text(row, "state") == "Failed" and isinstance(row.get("missing"), list)
        for name in row["missing"]
        if isinstance(name, str)
    }


QUARANTINE = Code(
    name="KV_QUARANTINE",
    sees="a decode rank's free memory shrinks after peers were lost",
    means="A write that was posted cannot be recalled, and taking the memory's registration away does not stop it. So "
    "ring regions and pages that a lost peer may still write are not used again until the peer has come back and "
    "drained, is proven dead, or an operator says that they are safe. A new process in its place proves nothing about "
    "the old one, which may be frozen and go on.",
    remedy="Make sure that the lost process has ended on its host, then release what it held.",
    severity=Severity.WARNING,
    find=_quarantine,
    alert="sum by (instance) (kvctl_quarantined_bytes) > 0",
)
