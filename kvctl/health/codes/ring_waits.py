"""Who waits for whom on the rings, and whether anybody waits for itself.

A gated part waits for the regions before its own. A region waits for its part to be written: if that part is gated
too, for what that waits for; if it is not even computed, its writer's forward may be waiting for memory, which is held
by the rooms that are computed and gated there. A cycle of such waits, all of them old, ends by itself only when
somebody gives something up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvctl.health.answers import Row, amount, inner, rows, text
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Snapshot
from kvctl.render.units import duration

# Unwritten grants are taken back after 5 s, which breaks such a cycle: an older one has outlasted that.
_OLD_NS = 15_000_000_000
_WATERMARK = re.compile(r"watermark round (-?\d+) tail (\d+)")


class Part(NamedTuple):
    """One part on its way from a writer to a decode rank."""

    room: str
    writer: str
    decode: str
    chunk: str
    layers: str


@dataclass(frozen=True, slots=True)
class Cycle:
    """Parts that wait for one another in this order, the last one for the first.

    Attributes:
        for_memory: at each place, whether the part waits for its forward to get memory; else it waits for the ring.
        serials: the unwritten regions in it, as (decode rank, serial).
        age_ns: of its youngest wait.
    """

    parts: tuple[Part, ...]
    for_memory: tuple[bool, ...]
    serials: tuple[tuple[str, str], ...]
    age_ns: int


def cycles(snapshot: Snapshot) -> list[Cycle]:
    """At most one for each part; use `snapshot.once(cycles)`."""
    gated = _old_gated(snapshot)
    if not gated:
        return []
    held = dict(_old_regions(snapshot))
    idle = _not_begun(snapshot)
    found: list[Cycle] = []
    seen: set[Part] = set()
    for start in gated:
        if start not in seen:
            path = _walk(start, gated, held, idle, seen)
            if path:
                found.append(_cycle(path, gated, held))
    return found


def _old_gated(snapshot: Snapshot) -> dict[Part, Row]:
    return {
        Part(text(row, "room"), agent.name, text(row, "peer"), str(row.get("chunk")), str(row.get("layers"))): row
        for agent in snapshot.of_role("prefill")
        for row in rows(agent.staging.get("gated"))
        if amount(row, "age_ns") >= _OLD_NS and _WATERMARK.fullmatch(text(row, "waiting_for"))
    }


def _old_regions(snapshot: Snapshot) -> Iterator[tuple[Part, Row]]:
    for agent in snapshot.of_role("decode"):
        for row in rows(inner(agent.staging, "ring").get("allocations")):
            if text(row, "state") == "granted" and not row.get("aside") and not row.get("posted"):
                layers = str(row.get("layers"))
                part = Part(text(row, "room"), text(row, "writer"), agent.name, str(row.get("chunk")), layers)
                if amount(row, "age_ns") >= _OLD_NS:
                    yield part, row


def _not_begun(snapshot: Snapshot) -> set[tuple[str, str]]:
    """(writer, room) of forwards that have not begun."""
    return {
        (agent.name, text(row, "room"))
        for agent in snapshot.of_role("prefill")
        for row in agent.rooms
        if text(row, "state") == "WaitingForInput"
    }


def _waits_for(
    part: Part, gated: Mapping[Part, Row], held: Mapping[Part, Row], idle: set[tuple[str, str]]
) -> Iterator[Part]:
    if part in gated:
        match = _WATERMARK.fullmatch(text(gated[part], "waiting_for"))
        assert match is not None  # `_old_gated` has looked
        position = int(match[1]), int(match[2])
        for other, region in held.items():
            before = (amount(region, "round"), amount(region, "offset")) < position
            if before and other.decode == part.decode and other != part:
                yield other
    elif (part.writer, part.room) in idle:
        yield from (other for other in gated if other.writer == part.writer and other.room != part.room)


def _walk(
    start: Part,
    gated: Mapping[Part, Row],
    held: Mapping[Part, Row],
    idle: set[tuple[str, str]],
    seen: set[Part],
) -> list[Part]:
    """A cycle that is reached from `start`; empty where there is none. Deep, but without recursion."""
    path: list[Part] = []
    steps: list[Iterator[Part]] = [iter((start,))]
    while steps:
        part = next(steps[-1], None)
        if part is None:
            steps.pop()
            if path:
                path.pop()
        elif part in path:
            return path[path.index(part) :]
        elif part not in seen:
            seen.add(part)
            path.append(part)
            steps.append(_waits_for(part, gated, held, idle))
    return []


def _cycle(parts: list[Part], gated: Mapping[Part, Row], held: Mapping[Part, Row]) -> Cycle:
    ages = [amount(gated[part] if part in gated else held[part], "age_ns") for part in parts]
    return Cycle(
        parts=tuple(parts),
        for_memory=tuple(part not in gated for part in parts),
        serials=tuple((part.decode, str(held[part].get("serial"))) for part in parts if part in held),
        age_ns=int(min(ages)),
    )


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
