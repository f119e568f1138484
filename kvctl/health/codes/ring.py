"""The decode rank's ring: who holds it, who waits for it, and what of it is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvctl.health.answers import NO_ROW, Row, amount, inner, number, rows, text
from kvctl.health.codes.formatting import counted, listed
from kvctl.health.codes.ring_waits import cycles
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration, size

# A silent writer's region is named from here on; one that is only slow, when the agent's own ways (it takes an
# unwritten grant back after 5 s) have had their time.
_SILENT_NS = 3_000_000_000
_HEARTBEATS = 5
_SLOW_NS = 15_000_000_000


@dataclass(frozen=True, slots=True)
class Gated:
    """A part that waits for the watermark of a decode rank."""

    writer: str
    row: Row

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """The same part in another snapshot."""
        return self.writer, text(self.row, "room"), str(self.row.get("chunk")), str(self.row.get("layers"))


def gated_behind(snapshot: Snapshot, decode: str) -> list[Gated]:
    """Parts of all writers that wait for this decode rank's watermark."""
    return [
        Gated(agent.name, part)
        for agent in snapshot.of_role("prefill")
        for part in rows(agent.staging.get("gated"))
        if text(part, "peer") == decode and text(part, "waiting_for").startswith("watermark")
    ]


def ring_of(agent: Agent) -> Row:
    """An empty one where there is none."""
    return inner(agent.staging, "ring")


def held_bytes(allocation: Row) -> int:
    """Ring bytes of one allocation."""
    return int(max(0, amount(allocation, "end") - amount(allocation, "offset")))


# ---- pinned ----------------------------------------------------------------------------------------------------


def _pinned(snapshot: Snapshot) -> Iterator[Finding]:
    in_cycles = {serial for cycle in snapshot.once(cycles) for serial in cycle.serials}
    for agent in snapshot.of_role("decode"):
        allocations = rows(ring_of(agent).get("allocations"))
        oldest = next((one for one in allocations if not one.get("aside")), None)
        waiting = gated_behind(snapshot, agent.name)
        named: set[str] = set()  # one finding for all that one silent writer holds
        for allocation in allocations:
            writer = text(allocation, "writer")
            if (agent.name, str(allocation.get("serial"))) in in_cycles or writer in named:
                continue
            if not _holds_up(agent, allocation, is_oldest=allocation is oldest, waiting=len(waiting)):
                continue
            named.add(writer)
            yield _pin(agent, allocation, allocation is oldest, waiting)


def held_up(snapshot: Snapshot) -> frozenset[str]:
    """Decode ranks whose ring is pinned while others wait for it; use `snapshot.once(held_up)`."""
    return frozenset(one.agents[0] for one in _pinned(snapshot) if one.severity is Severity.CRITICAL)


def _silence_ns(agent: Agent, writer: str) -> int | None:
    """For how long this decode rank has not heard the writer, whatever it calls that; None where it hears it."""
    shortest_ns = max(_SILENT_NS, _HEARTBEATS * agent.period_ns("heartbeat_s"))
    row = next((row for row in agent.peers if text(row, "peer") == writer), NO_ROW)
    heard = number(row, "last_heard_ns")
    if text(row, "state") == "lost":
        return int(heard or 0)
    return int(heard) if heard is not None and heard >= shortest_ns else None


def _holds_up(agent: Agent, allocation: Row, *, is_oldest: bool, waiting: int) -> bool:
    age, state = amount(allocation, "age_ns"), text(allocation, "state")
    if state == "landed":
        return False  # it is being scattered: if that does not end, its room is stuck
    blocks = is_oldest and waiting > 0
    if _silence_ns(agent, text(allocation, "writer")) is None:
        return blocks and age >= _SLOW_NS
    if state == "quarantined":  # given up for good: what it costs is said once, unless others wait for it
        return blocks and age >= _SLOW_NS
    return age >= _SILENT_NS or (state == "revoking" and blocks)  # each demand to give it back begins its age anew


def _pin(agent: Agent, allocation: Row, is_oldest: bool, waiting: list[Gated]) -> Finding:
    serial, writer, room = allocation.get("serial"), text(allocation, "writer"), text(allocation, "room")
    nbytes, age, state = held_bytes(allocation), int(amount(allocation, "age_ns")), text(allocation, "state")
    silent_ns = _silence_ns(agent, writer)
    mine = [one for one in rows(ring_of(agent).get("allocations")) if text(one, "writer") == writer]
    held = sum(held_bytes(one) for one in mine) if silent_ns is not None else nbytes
    writers = sorted({one.writer for one in waiting})
    blocks = is_oldest and bool(waiting)
    cause = _held_how(agent, allocation)
    if silent_ns is not None:
        cause += f"; it has been silent for {duration(silent_ns)}"
    if blocks:
        cause += f"; {counted(len(waiting), 'part')} of {listed(writers)} wait behind it"
    elif allocation.get("aside"):
        cause += f"; later grants go round it, with {size(held)} less of the ring"
    release = f"kvctl staging release {agent.name}:{serial}"
    regions = f"`kvctl staging map -e {agent.name}`"
    hangs = f"continue the process of {writer}, or end it; `kvctl stacks -e {writer}` shows where it hangs"
    if silent_ns is None:
        remedy = f"`{release}` gives the region back"
    elif allocation.get("aside"):
        remedy = f"{regions} shows what {writer} holds, which comes back when it goes on or has ended: {hangs}"
    else:
        remedy = f"`{release}` lets the others go round it; {hangs}"
    return Finding(
        code="KV_RING_PINNED",
        severity=Severity.CRITICAL if blocks else Severity.WARNING,
        subject=f"{agent.name} allocation {serial}",
        agents=(agent.name, writer),
        since_ns=max(age, silent_ns or 0),
        weight=held,
        evidence={
            "room": room,
            "room_state": text(allocation, "room_state"),
            "writer": writer,
            "state": state,
            "age_ns": age,
            "allocation_bytes": nbytes,
            "held_bytes": held,
            "writer_silent_ns": silent_ns,
            "waiting_parts": len(waiting) if is_oldest else 0,
            "waiting_writers": writers if is_oldest else [],
        },
        cause=cause,
        remedy=remedy,
    )


def _held_how(agent: Agent, allocation: Row) -> str:
    """Who has the region, and what it did with it."""
    writer, room, state = (text(allocation, key) for key in ("writer", "room", "state"))
    nbytes, room_state = size(held_bytes(allocation)), text(allocation, "room_state")
    if state == "revoking":
        how = (
            f"{writer} has {nbytes} of {agent.name}'s ring for room {room}, has not written it, and does not answer "
            "the demand to give it back"
        )
    else:
        done = "has neither written nor given it back"
        if state == "quarantined":
            done = "may still write it"
        elif allocation.get("posted"):
            done = "is writing it still"
        age = duration(amount(allocation, "age_ns"))
        how = f"{writer} was granted {nbytes} of {agent.name}'s ring {age} ago for room {room} and {done}"
    if room_state in ("Failed", "Success", "gone"):
        how += f", though the room is {room_state.lower()}"
    return how


RING_PINNED = Code(
    name="KV_RING_PINNED",
    sees="all staged transfers to one decode rank stop, its watermark does not move",
    means="Staged parts are written into regions of the decode rank's ring, and a later region that shares bytes with "
    "an earlier one waits until that is free. One old region that its writer neither writes nor gives back holds up "
    "everybody behind it. The agent takes an unwritten grant back after 5 s, and leads the others round a region whose "
    "writer is silent, so what is reported here has outlasted that: a writer that is stopped, or a write that never "
    "ends.",
    remedy="Release the allocation, so that the others go round it; then continue or end the writer. kvctl staging "
    "shows all allocations, the oldest first.",
    severity=Severity.CRITICAL,
    find=_pinned,
    alert="sum by (instance) (kvctl_parts_parked) > 0 and sum by (instance) (rate(kvctl_parts_total[1m])) == 0",
)


# ---- gated by an empty ring ------------------------------------------------------------------------------------


def _is_empty(ring: Row) -> bool:
    return number(ring, "used_bytes") == 0 and ring.get("allocations") == []


def _gated_empty(snapshot: Snapshot) -> Iterator[Finding]:
    """An empty ring at both moments, no grant between them, and a part that waited for it all the while: no race."""
    for agent in snapshot.of_role("decode"):
        then = snapshot.earlier(agent.name)
        if then is None or snapshot.before is None or snapshot.since_ns < agent.period_ns("heartbeat_s"):
            continue
        ring, earlier = ring_of(agent), ring_of(then)
        if not (_is_empty(ring) and _is_empty(earlier)) or ring.get("granted_total") != earlier.get("granted_total"):
            continue
        waited = {gated.identity for gated in gated_behind(snapshot.before, agent.name)}
        stuck = [gated for gated in gated_behind(snapshot, agent.name) if gated.identity in waited]
        if not stuck:
            continue
        writers, age = sorted({one.writer for one in stuck}), max(int(amount(one.row, "age_ns")) for one in stuck)
        yield Finding(
            code="KV_RING_GATED_EMPTY",
            severity=Severity.CRITICAL,
            subject=f"{agent.name} ring",
            agents=(agent.name, *writers),
            since_ns=age,
            weight=len(stuck),
            evidence={
                "gated_parts": len(stuck),
                "gated_writers": writers,
                "rooms": sorted({text(one.row, "room") for one in stuck}),
                "watermark": dict(inner(ring, "watermark")),
            },
            cause=f"{counted(len(stuck), 'part')} of {listed(writers)} wait for the watermark of {agent.name}, whose "
            "ring is empty: nothing is left that could move it",
            remedy=f"`kvctl staging -e {agent.name} -e {writers[0]}` shows the empty ring and the parts that wait for "
            "it; `kvctl debug bundle bundle.tar.zst` saves what is to be reported, since this is a bug; "
            f"`kvctl rooms abort {text(stuck[0].row, 'room')}` ends the wait",
        )


RING_GATED_EMPTY = Code(
    name="KV_RING_GATED_EMPTY",
    sees="all staged transfers to one decode rank stop, and its ring is empty",
    means="A writer waits for the watermark to pass its region, and the ring has no live allocation that could move "
    "it: a provable deadlock. Freeing the last allocation begins a new round and opens every region, so this is a bug.",
    remedy="Save a debug bundle and report it; abort the waiting rooms.",
    severity=Severity.CRITICAL,
    find=_gated_empty,
)
