"""Health codes about staging rings: pinned, deadlocked or too small rings, unanswered requests, quarantined memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from kvctl.client.names import natural_key
from kvctl.health.answers import NO_ROW, Row, amount, inner, number, rows, text, texts
from kvctl.health.codes.facts import absent, common_agents, how_to_resume
from kvctl.health.finding import Finding, Severity, agree, counted, health_code, listed, pair
from kvctl.health.snapshot import Agent, HistogramSum, Snapshot
from kvctl.render.units import duration, percent, size

# Age at which a region of a silent writer is reported. A region of a writer that is only slow is reported after
# _SLOW_NS, because the agent first tries to free it (it revokes an unwritten grant after 5 s).
_SILENT_NS = 3_000_000_000
_HEARTBEATS = 5
_SLOW_NS = 15_000_000_000
_MIN_PARTS = 20
_FULL = 0.9
# Gate time as a share of the time from ready to sent. A slightly small ring costs little, because parts that do not
# wait at the gate wait in a later stage instead.
_MIN_GATE_SHARE = 0.8
_MIN_GATE_S = 2.0
# A shorter observation may be an exception, unless the agent's totals since its start show the same.
_LONG_OBSERVATION_NS = 10_000_000_000
_STAGES = ("gate", "queue", "gather", "post", "wire")
_MIN_REQUESTS = 5
_MIN_ASKED_NS = 10_000_000_000
# A peer that was lost only for a short time drains and so releases the memory.
_MIN_QUARANTINE_NS = 10_000_000_000
_MIB = 1 << 20
_WATERMARK = re.compile(r"watermark round (-?\d+) tail (\d+)")


@dataclass(frozen=True, slots=True)
class GatedPart:
    """A part that waits for the watermark of a decode rank: its writer, and its row in the writer's answer."""

    writer: str
    row: Row

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """Writer, room, chunk and layers, which identify the part in every snapshot."""
        return self.writer, text(self.row, "room"), str(self.row.get("chunk")), str(self.row.get("layers"))


def _gated_by_peer(snapshot: Snapshot) -> Mapping[str, Sequence[GatedPart]]:
    """Returns the parts of all writers that wait for a watermark, by the decode rank that they wait for."""
    found: dict[str, list[GatedPart]] = {}
    for agent in snapshot.of_role("prefill"):
        for part in rows(agent.staging.get("gated")):
            if text(part, "waiting_for").startswith("watermark"):
                found.setdefault(text(part, "peer"), []).append(GatedPart(agent.name, part))
    return found


def _gated_behind(snapshot: Snapshot, decode: str) -> Sequence[GatedPart]:
    """Returns the parts of all writers that wait for this decode rank's watermark."""
    return snapshot.once(_gated_by_peer).get(decode, ())


def _ring(agent: Agent) -> Row:
    """Returns the row of the agent's staging ring; an empty row if the agent has no ring."""
    return inner(agent.staging, "ring")


def _allocations(agent: Agent) -> list[Row]:
    return rows(_ring(agent).get("allocations"))


def _nbytes(allocation: Row) -> int:
    return int(max(0, amount(allocation, "end") - amount(allocation, "offset")))


# ---- pinned ----------------------------------------------------------------------------------------------------


@health_code(
    "KV_RING_PINNED",
    Severity.CRITICAL,
    "staging",
    sees="all staged transfers to one decode rank stop, its watermark does not move",
    means="Staged parts are written to regions of the decode rank's ring, and a later region that shares bytes with an "
    "earlier one waits until that is free. One old region that its writer neither writes nor returns blocks all later "
    "ones. The agent revokes an unwritten grant after 5 s and places later grants around a region whose writer is "
    "silent; what is reported here has lasted longer: a stopped writer, or a write that does not finish.",
    remedy="Release the allocation, so that later grants go around it; then continue or end the writer. kvctl staging "
    "lists all allocations, the oldest first.",
    alert="sum by (instance) (kvctl_parts_parked) > 0 and sum by (instance) (rate(kvctl_parts_total[1m])) == 0",
)
def ring_pinned(snapshot: Snapshot) -> Iterator[Finding]:
    in_cycles = {serial for cycle in snapshot.once(_cycles) for serial in cycle.serials}
    for agent in snapshot.of_role("decode"):
        allocations = _allocations(agent)
        oldest = next((each for each in allocations if not each.get("aside")), None)
        waiting = _gated_behind(snapshot, agent.name)
        reported: set[str] = set()  # one finding for all regions of one silent writer
        for allocation in allocations:
            writer = text(allocation, "writer")
            if (agent.name, str(allocation.get("serial"))) in in_cycles or writer in reported:
                continue
            blocks = allocation is oldest and bool(waiting)
            if _is_pinned(agent, allocation, blocks):
                reported.add(writer)
                yield _pinned(snapshot, agent, allocation, waiting if allocation is oldest else [])


def pinned_agents(snapshot: Snapshot) -> frozenset[str]:
    """Returns the decode ranks in whose ring a pinned region makes parts wait."""
    return frozenset(each.agents[0] for each in ring_pinned.find(snapshot) if each.severity is Severity.CRITICAL)


def _silent_ns(agent: Agent, writer: str) -> int | None:
    """Returns the time since a decode rank received a message from a writer, or from one of several (`a, b`).

    0 if the writer is lost and the time is unknown; None if the writer is neither lost nor silent for long.
    """
    min_ns = max(_SILENT_NS, _HEARTBEATS * agent.period_ns("heartbeat_s"))
    names = writer.split(", ")
    row = next((row for row in agent.peers if text(row, "peer") in names and text(row, "state") == "lost"), NO_ROW)
    row = row or next((row for row in agent.peers if text(row, "peer") in names), NO_ROW)
    heard = number(row, "last_heard_ns")
    if text(row, "state") == "lost":
        return int(heard or 0)
    return int(heard) if heard is not None and heard >= min_ns else None


def _is_pinned(agent: Agent, allocation: Row, blocks: bool) -> bool:
    age, state = amount(allocation, "age_ns"), text(allocation, "state")
    if agent.observes and age >= _SLOW_NS:
        # SGLang revokes nothing. After the room's success nobody writes the region any more.
        return blocks or text(allocation, "room_state") in ("Success", "Failed", "gone")
    if state == "landed":
        return False  # it is being scattered: if that does not end, its room is stuck
    if _silent_ns(agent, text(allocation, "writer")) is None:
        return blocks and age >= _SLOW_NS
    if state == "quarantined":  # KV_QUARANTINE reports it, unless parts wait for it
        return blocks and age >= _SLOW_NS
    return age >= _SILENT_NS or (state == "revoking" and blocks)  # each revoke request restarts its age


def _pinned(snapshot: Snapshot, agent: Agent, allocation: Row, waiting: Sequence[GatedPart]) -> Finding:
    serial, writer = allocation.get("serial"), text(allocation, "writer")
    nbytes, age, aside = _nbytes(allocation), int(amount(allocation, "age_ns")), bool(allocation.get("aside"))
    silent_ns = _silent_ns(agent, writer)
    of_writer = [each for each in _allocations(agent) if text(each, "writer") == writer]
    held = sum(map(_nbytes, of_writer)) if silent_ns is not None else nbytes
    writers = sorted({part.writer for part in waiting})
    cause = _region_state(agent, allocation)
    if agent.observes and text(allocation, "room_state") == "Success":
        cause += "; the room's writers are done, so it waits for this region until it fails"
    elif silent_ns is not None:
        cause += f"; it has been silent for {duration(silent_ns)}"
    if waiting:
        wait = agree(len(waiting), "waits", "wait")
        cause += f"; {counted(len(waiting), 'part')} of {listed(writers)} {wait} for this region"
    elif aside:
        cause += f"; later grants go around it, with {size(held)} less of the ring"
    release = f"kvctl staging release {agent.name}:{serial}"
    resume = f"continue the process of {writer}, or end it: {how_to_resume(snapshot, writer)}"
    if silent_ns is None:
        remedy = f"`{release}` frees the region"
    elif aside:
        remedy = (
            f"`kvctl staging map -e {agent.name}` shows the regions of {writer}, which are freed when it continues or "
            f"has ended: {resume}"
        )
    else:
        remedy = f"`{release}` lets later grants go around it; {resume}"
    return ring_pinned.finding(
        f"{agent.name} allocation {serial}",
        severity=Severity.CRITICAL if waiting else Severity.WARNING,
        agents=(agent.name, *filter(None, writer.split(", "))),
        since_ns=max(age, silent_ns or 0),
        weight=held,
        evidence={
            "room": text(allocation, "room"),
            "room_state": text(allocation, "room_state"),
            "writer": writer,
            "state": text(allocation, "state"),
            "age_ns": age,
            "allocation_bytes": nbytes,
            "held_bytes": held,
            "writer_silent_ns": silent_ns,
            "waiting_parts": len(waiting),
            "waiting_writers": writers,
        },
        cause=cause,
        remedy=remedy,
    )


def _region_state(agent: Agent, allocation: Row) -> str:
    """Describes which writer a ring region was granted to, for which room, and whether the writer has written it."""
    writer, room, state = (text(allocation, key) for key in ("writer", "room", "state"))
    writers = writer.split(", ")
    has, was, still = (agree(len(writers), *each) for each in (("has", "have"), ("was", "were"), ("is", "are")))
    nbytes, room_state = size(_nbytes(allocation)), text(allocation, "room_state")
    if not writer:
        words = (
            f"{agent.name} granted {nbytes} of its ring again, {duration(amount(allocation, 'age_ns'))} ago, for a "
            f"chunk of room {room} that had arrived: nobody writes it"
        )
    elif state == "revoking":
        words = (
            f"{writer} has {nbytes} of {agent.name}'s ring for room {room}, has not written it, and does not answer "
            "the revoke request"
        )
    else:
        done = f"{has} neither written nor returned it"
        if state == "quarantined":
            done = "may still write it"
        elif allocation.get("posted"):
            done = f"{still} still writing it"
        age = duration(amount(allocation, "age_ns"))
        words = f"{listed(writers)} {was} granted {nbytes} of {agent.name}'s ring {age} ago for room {room} and {done}"
    if room_state in ("Failed", "Success", "gone") and writer:
        words += f", though the room is {room_state.lower()}"
    return words


# ---- deadlocks -------------------------------------------------------------------------------------------------


def _is_empty(ring: Row) -> bool:
    return number(ring, "used_bytes") == 0 and ring.get("allocations") == []


@health_code(
    "KV_RING_GATED_EMPTY",
    Severity.CRITICAL,
    "staging",
    sees="all staged transfers to one decode rank stop, and its ring is empty",
    means="A writer waits for the watermark to pass its region, and the ring has no live allocation that could move "
    "it: a provable deadlock. Freeing the last allocation begins a new round and opens every region, so this is a bug.",
    remedy="Save a recording and report it; abort the waiting rooms.",
)
def ring_gated_empty(snapshot: Snapshot) -> Iterator[Finding]:
    """Yields a finding for each decode rank with an empty ring behind which parts are gated.

    To exclude a race, the ring must be empty in both snapshots without a grant between them, and the same part must
    wait in both.
    """
    for agent in snapshot.of_role("decode"):
        before = snapshot.earlier(agent.name)
        if before is None or snapshot.before is None or snapshot.since_ns < agent.period_ns("heartbeat_s"):
            continue
        ring, earlier = _ring(agent), _ring(before)
        if not (_is_empty(ring) and _is_empty(earlier)) or ring.get("granted_total") != earlier.get("granted_total"):
            continue
        waited = {part.identity for part in _gated_behind(snapshot.before, agent.name)}
        stuck = [part for part in _gated_behind(snapshot, agent.name) if part.identity in waited]
        if not stuck:
            continue
        writers = sorted({part.writer for part in stuck})
        yield ring_gated_empty.finding(
            f"{agent.name} ring",
            agents=(agent.name, *writers),
            since_ns=max(int(amount(part.row, "age_ns")) for part in stuck),
            weight=len(stuck),
            evidence={
                "gated_parts": len(stuck),
                "gated_writers": writers,
                "rooms": sorted({text(part.row, "room") for part in stuck}),
                "watermark": dict(inner(ring, "watermark")),
            },
            cause=f"{counted(len(stuck), 'part')} of {listed(writers)} {agree(len(stuck), 'waits', 'wait')} for the "
            f"watermark of {agent.name}, whose ring is empty: no allocation is left that could move it",
            remedy=f"`kvctl staging -e {agent.name} -e {writers[0]}` shows the empty ring and the waiting parts; "
            "`kvctl record incident.kvrec --for 2s` saves the data for a report, because this is a bug; "
            f"`kvctl rooms abort {text(stuck[0].row, 'room')}` ends the wait",
        )


class _Part(NamedTuple):
    """Identity of a part that a writer sends to a decode rank."""

    room: str
    writer: str
    decode: str
    chunk: str
    layers: str


@dataclass(frozen=True, slots=True)
class _Cycle:
    """A deadlock: each part waits for the next part in the tuple, the last part for the first.

    Attributes:
        for_memory: for each part, True if its forward waits for memory, False if the part waits for its ring region.
        serials: the unwritten regions of the parts, as (decode rank, serial).
        age_ns: age of the most recent wait.
    """

    parts: tuple[_Part, ...]
    for_memory: tuple[bool, ...]
    serials: tuple[tuple[str, str], ...]
    age_ns: int


class _WaitGraph:
    """Directed graph of parts that wait for other parts; only waits that last long are included.

    A gated part waits for the parts whose ring regions come before its own region. A part whose forward has not begun
    waits for memory on its writer, which is held by rooms whose parts are computed and gated there. A cycle of such
    waits ends only if some part gives up its ring region.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        # Agents revoke unwritten grants after 5 s, which breaks such a cycle; only longer waits are included.
        self.gated = {
            self._part(row, agent.name, text(row, "peer")): row
            for agent in snapshot.of_role("prefill")
            for row in rows(agent.staging.get("gated"))
            if amount(row, "age_ns") >= _SLOW_NS and _WATERMARK.fullmatch(text(row, "waiting_for"))
        }
        self.regions = {
            self._part(row, text(row, "writer"), agent.name): row
            for agent in snapshot.of_role("decode")
            for row in _allocations(agent)
            if text(row, "state") == "granted"
            and not row.get("aside")
            and not row.get("posted")
            and amount(row, "age_ns") >= _SLOW_NS
        }
        # (writer, room) of forwards that have not begun.
        self.not_begun = {
            (agent.name, text(row, "room"))
            for agent in snapshot.of_role("prefill")
            for row in agent.rooms
            if text(row, "state") == "WaitingForInput"
        }

    @staticmethod
    def _part(row: Row, writer: str, decode: str) -> _Part:
        return _Part(text(row, "room"), writer, decode, str(row.get("chunk")), str(row.get("layers")))

    def waits_for(self, part: _Part) -> Iterator[_Part]:
        if part in self.gated:
            match = _WATERMARK.fullmatch(text(self.gated[part], "waiting_for"))
            assert match is not None
            position = int(match[1]), int(match[2])
            for other, region in self.regions.items():
                before = (amount(region, "round"), amount(region, "offset")) < position
                if before and other.decode == part.decode and other != part:
                    yield other
        elif (part.writer, part.room) in self.not_begun:
            yield from (other for other in self.gated if other.writer == part.writer and other.room != part.room)

    def cycle_from(self, start: _Part, visited: set[_Part]) -> list[_Part]:
        """Returns a cycle of parts reachable from `start`, [] if there is none; adds all parts reached to `visited`."""
        path: list[_Part] = []
        steps: list[Iterator[_Part]] = [iter((start,))]
        while steps:
            part = next(steps[-1], None)
            if part is None:
                steps.pop()
                if path:
                    path.pop()
            elif part in path:
                return path[path.index(part) :]
            elif part not in visited:
                visited.add(part)
                path.append(part)
                steps.append(self.waits_for(part))
        return []


def _cycles(snapshot: Snapshot) -> list[_Cycle]:
    """Returns the cycles in the wait graph; no part is in more than one cycle."""
    graph = _WaitGraph(snapshot)
    found: list[_Cycle] = []
    visited: set[_Part] = set()
    for start in graph.gated:
        parts = [] if start in visited else graph.cycle_from(start, visited)
        if parts:
            ages = [amount(graph.gated.get(part) or graph.regions[part], "age_ns") for part in parts]
            serials = [(part.decode, str(graph.regions[part].get("serial"))) for part in parts if part in graph.regions]
            for_memory = tuple(part not in graph.gated for part in parts)
            found.append(_Cycle(tuple(parts), for_memory, tuple(serials), int(min(ages))))
    return found


@health_code(
    "KV_RING_CYCLE",
    Severity.CRITICAL,
    "staging",
    sees="nothing moves, nothing has failed",
    means="Rooms wait for each other in a cycle: a computed part waits for the ring regions before its own, one of "
    "those is granted to a room whose forward has not begun, and that forward waits for memory that the computed rooms "
    "hold until they are sent. The agent revokes unwritten grants after 5 s to break such cycles; this one has lasted "
    "longer.",
    remedy="Release one region of the cycle; then enlarge the ring, or the prefill ranks' pools.",
)
def ring_cycle(snapshot: Snapshot) -> Iterator[Finding]:
    for cycle in snapshot.once(_cycles):
        rooms = list(dict.fromkeys(part.room for part in cycle.parts))
        decode, serial = cycle.serials[0]
        steps = _steps(cycle)
        yield ring_cycle.finding(
            f"room {min(rooms, key=lambda room: (len(room), room))}",
            agents=(name for part in cycle.parts for name in (part.decode, part.writer)),
            since_ns=cycle.age_ns,
            weight=len(rooms),
            evidence={"cycle": steps, "rooms": rooms, "age_ns": cycle.age_ns},
            cause=f"parts of {counted(len(rooms), 'room')} have waited for each other for {duration(cycle.age_ns)}: "
            + "; ".join(steps),
            remedy=f"`kvctl staging release {decode}:{serial}` breaks it; and give {decode} a larger staging_ring_mb"
            + (" or the prefill ranks more pages" if any(cycle.for_memory) else ""),
        )


def _steps(cycle: _Cycle) -> list[str]:
    return [
        f"room {part.room} on {part.writer} waits "
        + (
            f"for memory that room {other.room} holds there"
            if for_memory
            else f"behind room {other.room} of {other.writer} in {part.decode}'s ring"
        )
        for part, other, for_memory in zip(
            cycle.parts, (*cycle.parts[1:], cycle.parts[0]), cycle.for_memory, strict=True
        )
    ]


# ---- too small -------------------------------------------------------------------------------------------------


class GateTime(NamedTuple):
    """Time that one writer's parts were gated: as a share of the time from ready to sent, and in seconds per part."""

    share: float
    seconds: float


def gated_writers(snapshot: Snapshot) -> Mapping[str, GateTime]:
    """Returns the gate times of the writers whose parts are gated for most of their time, by the writer's name."""
    found: dict[str, GateTime] = {}
    metric = "kvctl_stage_seconds"
    for agent in snapshot.of_role("prefill"):
        recent = [snapshot.histogram_since_before(agent.name, metric, stage=stage) for stage in _STAGES]
        gate = _gate_time([each for each in recent if each is not None])
        if gate is None or gate.share < _MIN_GATE_SHARE or gate.seconds < _MIN_GATE_S:
            continue
        life = _gate_time([agent.histogram(metric, stage=stage) for stage in _STAGES])
        lifelong = life and life.share >= _MIN_GATE_SHARE / 2 and life.seconds >= _MIN_GATE_S / 2
        if snapshot.since_ns >= _LONG_OBSERVATION_NS or lifelong:
            found[agent.name] = gate
    return found


def _gate_time(stages: Sequence[HistogramSum]) -> GateTime | None:
    total = sum(stage.seconds for stage in stages)
    if not stages or stages[0].observations < _MIN_PARTS or not total:
        return None
    return GateTime(stages[0].seconds / total, stages[0].mean_s)


@health_code(
    "KV_RING_SMALL",
    Severity.WARNING,
    "staging",
    sees="throughput rises and falls repeatedly, writers are gated most of the time",
    means="The ring has been full, and the writers' parts spend most of their time waiting for the watermark of a full "
    "ring, two seconds or more each. A ring larger by the parts that wait now would have sufficed.",
    remedy="Raise staging_ring_mb on the decode rank.",
    alert='sum by (instance) (rate(kvctl_stage_seconds_sum{stage="gate"}[5m])) > sum by (instance) '
    '(rate(kvctl_stage_seconds_count{stage="gate"}[5m]))',
)
def ring_small(snapshot: Snapshot) -> Iterator[Finding]:
    gates = snapshot.once(gated_writers)
    if not gates:
        return
    for agent in snapshot.of_role("decode"):
        ring = _ring(agent)
        total, high = amount(ring, "size_bytes"), amount(ring, "high_water_bytes")
        waiting = [part for part in _gated_behind(snapshot, agent.name) if part.writer in gates]
        if not waiting or not total or high < _FULL * total or snapshot.once(absent):
            continue
        waiting_bytes = int(sum(amount(part.row, "bytes") for part in waiting))
        needed = ceil((total + waiting_bytes) / _MIB)
        writers = sorted({part.writer for part in waiting})
        share, mean_s = max(gates[name] for name in writers)
        yield ring_small.finding(
            f"{agent.name} ring",
            agents=(agent.name, *writers),
            since_ns=snapshot.since_ns,
            weight=waiting_bytes,
            evidence={
                "gate_ratio": round(share, 3),
                "gate_a_part_ns": round(mean_s * 1e9),
                "ring_bytes": int(total),
                "high_water_bytes": int(high),
                "waiting_bytes": waiting_bytes,
                "waiting_parts": len(waiting),
                "needed_ring_mb": needed,
            },
            cause=f"parts of {listed(writers)} waited {duration(mean_s * 1e9)} each for {agent.name}'s ring of "
            f"{size(total)}, {percent(share)} of the time from ready to sent; "
            f"{counted(len(waiting), 'part')} ({size(waiting_bytes)}) {agree(len(waiting), 'waits', 'wait')} now",
            remedy=f"`kvctl staging -e {agent.name} -e {writers[0]}` shows the ring and the waiting parts; start "
            f"{agent.name} with a staging_ring_mb of {needed} or more, which would have held them",
        )


@health_code(
    "KV_CHUNK_OVERSIZED",
    Severity.WARNING,
    "staging",
    sees="some rooms are suddenly many times slower, most often those with long prompts",
    means="A part that is larger than the decode rank's whole ring can never be staged. It takes the path that needs "
    "no ring, which for unequal heads sends one descriptor per token and is many times slower.",
    remedy="Raise staging_ring_mb of the decode rank to the size of the largest part, or lower chunk_tokens of the "
    "prefill ranks.",
    alert="sum by (instance) (increase(kvctl_ring_refusals_total[10m])) > 0",
)
def chunk_oversized(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.of_role("decode"):
        ring = _ring(agent)
        refused, total = amount(ring, "refused_total"), amount(ring, "size_bytes")
        largest = number(ring, "refused_largest_bytes")
        grown = snapshot.since_before(agent.name, "kvctl_ring_refusals_total")
        if not refused or (largest is not None and largest <= total):
            continue  # a part that fits the whole ring was refused because of quarantined bytes
        then = "their rooms fail" if agent.observes else "took a slower path"
        cause = f"{counted(refused, 'part')} did not fit {agent.name}'s ring of {size(total)}: {then}"
        shown = f"`kvctl staging -e {agent.name} -o wide` shows the ring, and how many parts it refused"
        remedy = f"{shown}; start {agent.name} with a larger staging_ring_mb"
        if largest is not None:
            cause = (
                f"a part needs {size(largest)}, {agent.name}'s ring has {size(total)}: {counted(refused, 'part')} "
                f"refused, {then}"
            )
            remedy = f"{shown}; start {agent.name} with a staging_ring_mb of {ceil(largest / _MIB)} or more"
            chunk = max((each.setting("chunk_tokens") for each in snapshot.of_role("prefill")), default=0)
            if chunk and total:
                fitting = int(chunk * total / largest)
                remedy += f", or the prefill ranks with chunk_tokens of at most {fitting} (now {chunk:.0f})"
        yield chunk_oversized.finding(
            f"{agent.name} ring",
            severity=Severity.CRITICAL if agent.observes else Severity.WARNING,
            agents=(agent.name,),
            weight=refused,
            evidence={
                "refused_total": int(refused),
                "refused_since_last_reading": grown,
                "largest_part_bytes": largest,
                "ring_bytes": int(total),
            },
            cause=cause + (", some of them just now" if grown else ""),
            remedy=remedy,
        )


# ---- unanswered requests ---------------------------------------------------------------------------------------


class UnansweredRequest(NamedTuple):
    """A gated part whose writer has repeatedly requested a ring region without an answer.

    Attributes:
        peer: decode rank that does not answer.
    """

    writer: str
    peer: str
    asked_ns: float
    requests: float
    room: str


def unanswered_requests(snapshot: Snapshot) -> Mapping[tuple[str, str], Sequence[UnansweredRequest]]:
    """Returns overdue requests for ring regions by (writer, decode rank); silent decode ranks are left out."""
    found: dict[tuple[str, str], list[UnansweredRequest]] = {}
    for agent in snapshot.of_role("prefill"):
        patience_ns = max(_MIN_ASKED_NS, 2 * _MIN_REQUESTS * agent.period_ns("resend_s"))
        for part in rows(agent.staging.get("gated")):
            asked_ns, requests, peer = amount(part, "asked_age_ns"), amount(part, "requests"), text(part, "peer")
            # An observed rank does not repeat its requests.
            overdue = (requests >= _MIN_REQUESTS or agent.observes) and asked_ns >= patience_ns
            # A silent peer grants nothing, and has a finding of its own.
            if overdue and text(part, "waiting_for") == "grant" and peer not in snapshot.once(absent):
                request = UnansweredRequest(agent.name, peer, asked_ns, requests, text(part, "room"))
                found.setdefault((agent.name, peer), []).append(request)
    return found


@health_code(
    "KV_GRANT_UNANSWERED",
    Severity.CRITICAL,
    "staging",
    sees="a room stays in Transferring, nothing is logged, the workers are idle",
    means="A writer asks the decode rank for a ring region for each staged part, and repeats the request every "
    "resend_s. The decode rank answers every request at once, with a grant or a refusal. After this many requests, "
    "either the peer does not hear the writer although the writer hears it, or the peer's control thread hangs. Peers "
    "that are completely silent are KV_PEER_LOST.",
    remedy="Check whether the decode rank hears the writer, and what its control thread does.",
    alert='sum by (instance) (rate(kvctl_control_resends_total{type="staging-request"}[2m])) > 0.5',
)
def grant_unanswered(snapshot: Snapshot) -> Iterator[Finding]:
    """Yields one finding for all unanswered requests of one writer, or to one decode rank."""
    pairs = snapshot.once(unanswered_requests)
    for common, concerned in common_agents(list(pairs)):
        requests = [request for each in concerned for request in pairs[each]]
        first = max(requests, key=lambda request: request.asked_ns)
        rooms = sorted({request.room for request in requests}, key=natural_key)
        writers, peers = (sorted({each[side] for each in concerned}, key=natural_key) for side in (0, 1))
        others = peers if common == writers[0] else writers
        yield grant_unanswered.finding(
            common if len(concerned) > 1 else pair(*concerned[0]),
            agents=(common, *others) if len(concerned) > 1 else (*peers, *writers),
            since_ns=int(first.asked_ns),
            weight=len(requests),
            evidence={
                "requests": int(first.requests),
                "asked_age_ns": int(first.asked_ns),
                "waiting_parts": len(requests),
                "writers": writers,
                "peers": peers,
                "rooms": rooms,
            },
            cause=f"{listed(writers)} asked {listed(peers)} for staging of {counted(len(rooms), 'room')} and got "
            f"neither grant nor refusal: {counted(first.requests, 'request')} in {duration(first.asked_ns)} for room "
            f"{first.room}; {counted(len(requests), 'part')} {agree(len(requests), 'waits', 'wait')}",
            remedy=f"`kvctl staging -e {first.writer}` lists the parts that wait for a grant and their number of "
            f"requests; `kvctl stacks -e {first.peer}` shows what its control thread does; `kvctl rooms abort "
            f"{first.room}` fails the room",
        )


# ---- quarantine ------------------------------------------------------------------------------------------------


def _hosts_of(agent: Agent, peers: Sequence[str]) -> list[str]:
    """Returns the names of peers, as `prefill-0 on node-3` of those on other hosts, unless they were replaced."""
    away = [row for row in agent.peers if row.get("same_host") is False and not row.get("former")]
    hosts = {text(row, "peer"): text(row, "peer_host") for row in away}
    return [f"{name} on {hosts[name]}" if hosts.get(name) else name for name in peers]


@health_code(
    "KV_QUARANTINE",
    Severity.WARNING,
    "staging",
    sees="a decode rank's free memory shrinks after peers were lost",
    means="A posted write cannot be cancelled, and deregistering the memory does not stop it. So ring regions and "
    "pages that a lost peer may still write are not used again until the peer has come back and drained, is proven "
    "dead, or an operator releases them. A new process in its place proves nothing about the old one, which may be "
    "frozen and continue later.",
    remedy="Make sure that the lost process has ended on its host, then release the memory.",
    alert="sum by (instance) (kvctl_quarantined_bytes) > 0",
)
def quarantine(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.of_role("decode"):
        regions = [
            each
            for each in _allocations(agent)
            if text(each, "state") == "quarantined" and amount(each, "age_ns") >= _MIN_QUARANTINE_NS
        ]
        in_ring = sum(map(_nbytes, regions))
        total = int(agent.total("kvctl_quarantined_bytes") or 0)
        earlier = snapshot.earlier(agent.name)
        lasting = earlier is None or (earlier.total("kvctl_quarantined_bytes") or 0) > 0
        if not regions and not (total > 0 and lasting):
            continue
        nbytes = max(total, in_ring)
        ring_bytes = amount(_ring(agent), "size_bytes")
        former = {text(row, "peer"): texts(row, "former") for row in agent.peers if row.get("former")}
        failed = [row for row in agent.rooms if text(row, "state") == "Failed"]
        undrained = {name for row in failed for name in texts(row, "missing")}
        writers = sorted({text(each, "writer") for each in regions} | undrained | former.keys())
        processes = sorted(process for name in writers for process in former.get(name, ()))
        room = next((text(row, "room") for row in failed), "")
        elsewhere = _hosts_of(agent, writers)
        if regions:
            command = f"kvctl staging release {agent.name}:{regions[0].get('serial')}"
        elif room:
            command = f"kvctl staging release -e {agent.name} --room {room}"
        else:
            command = f"kvctl rooms -e {agent.name} --filter state=Failed"
        yield quarantine.finding(
            agent.name,
            agents=(agent.name, *writers),
            since_ns=max((int(amount(each, "age_ns")) for each in regions), default=None),
            weight=nbytes,
            evidence={
                "quarantined_bytes": nbytes,
                "ring_bytes": in_ring,
                "ring_ratio": round(in_ring / ring_bytes, 3) if ring_bytes else None,
                "regions": len(regions),
                "peers": writers,
                "processes": processes,
            },
            cause=f"{agent.name} does not use {size(nbytes)} of {'ring and ' * bool(in_ring)}pages: {listed(elsewhere)}"
            " may still write there, and it is not proven that they cannot"
            + (f"; replaced, but not known to have ended: {', '.join(processes)}" if processes else ""),
            remedy=f"`kvctl staging map -e {agent.name}` shows the quarantined memory; make sure that the process of "
            f"{listed(elsewhere)} has ended, then `{command}`; it is released by itself when that agent comes back",
        )
