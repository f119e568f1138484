"""Rooms that wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.health.codes.ring_waits import Cycle, cycles
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot
from kvctl.render.units import duration


def _cycles(snapshot: Snapshot) -> Iterator[Finding]:
    for cycle in snapshot.once(cycles):
        rooms = list(dict.fromkeys(part.room for part in cycle.parts))
        agents = dict.fromkeys(name for part in cycle.parts for name in (part.decode, part.writer))
        decode, serial = cycle.serials[0]
        yield Finding(
            code="KV_RING_CYCLE",
            severity=Severity.CRITICAL,
            subject=f"room {min(rooms, key=lambda room: (len(room), room))}",
            agents=tuple(agents),
            since_ns=cycle.age_ns,
            weight=len(rooms),
            evidence={"cycle": _steps(cycle), "rooms": rooms, "age_ns": cycle.age_ns},
            cause=f"{len(rooms)} rooms have waited for each other for {duration(cycle.age_ns)}: "
            + "; ".join(_steps(cycle)),
            remedy=f"`kvctl staging release {decode}:{serial}` breaks it; and give {decode} a larger staging_ring_mb"
            + (" or the prefill ranks more pages" if any(cycle.for_memory) else ""),
        )


def _steps(cycle: Cycle) -> list[str]:
    after = (*cycle.parts[1:], cycle.parts[0])
    return [
        f"room {part.room} on {part.writer} waits "
        + (
            f"for memory that room {other.room} holds there"
            if for_memory
            else f"behind room {other.room} of {other.writer} in {part.decode}'s ring"
        )
        for part, other, for_memory in zip(cycle.parts, after, cycle.for_memory, strict=True)
    ]


RING_CYCLE = Code(
    name="KV_RING_CYCLE",
    sees="nothing moves, nothing has failed",
    means="Rooms wait for each other in a circle: a computed part waits for the ring regions before its own, one of "
    "those is granted to a room whose forward has not begun, and that forward waits for memory which the computed "
    "rooms hold until they are sent. The agent takes unwritten grants back after 5 s to break such circles; this one "
    "has lasted longer.",
    remedy="Release one region of the circle; then give the ring, or the prefill ranks' pools, more room.",
    severity=Severity.CRITICAL,
    find=_cycles,
)
