"""Facts about a snapshot that several health codes use: failed rooms, silent agents, drains, slow writers.

Functions whose only argument is the snapshot are called as in `snapshot.once(failed_rooms)`, which caches the result.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvctl.client.faults import SILENT, Fault, FaultCode
from kvctl.health.answers import Row, amount, inner, number, text, texts
from kvctl.health.finding import Code, Finding, Severity, named_in
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration
from kvctl_agent.contract.health import FAILED_NS

BOOTSTRAP = "KV_ROOM_STUCK_BOOTSTRAP"
# With a short suspect_s, an agent becomes suspect as soon as its process gets no core for a short time.
_MIN_SILENCE_NS = 3_000_000_000
# Two ranks of a room may differ in the room's age by this much.
_CLOCK_SLACK_NS = 2_000_000_000
# Minimum number of parts of a writer for its times to be compared with those of other writers.
_MIN_PARTS = 20
_SLOW_FACTOR = 5.0
# On a busy machine, shorter times depend on which process gets a core.
_MIN_WIRE_S = 0.1
# Fewer failed rooms do not show that every room fails.
_SEVERAL = 3
_OF_PEERS = frozenset({"KV_PEER_LOST", "KV_TRANSPORT"})
_LOST_PEER = re.compile(r"\bpeer (\S+) \(incarnation")


# ---- failed rooms ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FailedRoom:
    """One failed room, reported by one or several ranks.

    Attributes:
        rank: agent that detected the failure first.
        known_to: agents that report the failure, in the order of their names.
        peers: agents at the other ends of the room, according to those that report the failure.
        ago_ns: time since the failure, by the clocks of the reporting agents; the longest if they differ.
    """

    room: str
    code: str
    rank: str
    text: str
    known_to: tuple[str, ...]
    peers: tuple[str, ...]
    ago_ns: int


def failed_rooms(snapshot: Snapshot) -> Mapping[str, Sequence[FailedRoom]]:
    """Returns the rooms that failed within the last 10 minutes, by failure code, the most recent first."""
    found: dict[tuple[str, str, str, str], FailedRoom] = {}
    for agent in snapshot.agents.values():
        for row in agent.known_rooms:
            failure = inner(row, "failure")
            code, rank, message = (text(failure, key) for key in ("code", "rank", "text"))
            at_ns = number(failure, "at_ns") if number(row, "finished_at_ns") is None else number(row, "finished_at_ns")
            if not code or at_ns is None:
                continue
            ago_ns = max(0, agent.now_ns - int(at_ns))
            if ago_ns > FAILED_NS:
                continue
            key = (text(row, "room"), code, rank, message)
            known = found.get(key) or FailedRoom(*key, known_to=(), peers=(), ago_ns=0)
            found[key] = replace(
                known,
                known_to=tuple(dict.fromkeys((*known.known_to, agent.name))),
                peers=tuple(dict.fromkeys((*known.peers, *texts(row, "peers"), *texts(row, "missing")))),
                ago_ns=max(known.ago_ns, ago_ns),
            )
    by_code: dict[str, list[FailedRoom]] = {}
    for failed in sorted(found.values(), key=lambda failed: failed.ago_ns):
        by_code.setdefault(failed.code, []).append(failed)
    return by_code


def failed_by_rank(snapshot: Snapshot, code: str) -> Mapping[str, Sequence[FailedRoom]]:
    """Returns the rooms that failed with this code, by the agent that detected the failure, the most recent first."""
    found: dict[str, list[FailedRoom]] = {}
    for failed in snapshot.once(failed_rooms).get(code, ()):
        found.setdefault(failed.rank, []).append(failed)
    return found


def failed_by_instance(snapshot: Snapshot, code: str) -> Mapping[str, Sequence[FailedRoom]]:
    """Returns the rooms that failed with this code, each once, by the instance whose rank detected the failure first.

    The ranks of an instance meet the same failure, so grouping by rank would report it several times. The rooms of an
    instance are in the order of their failures, the most recent first.
    """
    first: dict[str, FailedRoom] = {}
    for failed in snapshot.once(failed_rooms).get(code, ()):
        later = first.get(failed.room)
        known_to = failed.known_to if later is None else tuple(dict.fromkeys((*failed.known_to, *later.known_to)))
        first[failed.room] = replace(failed, known_to=known_to)
    found: dict[str, list[FailedRoom]] = {}
    for failed in sorted(first.values(), key=lambda failed: failed.ago_ns):
        found.setdefault(snapshot.instances.get(failed.rank, failed.rank), []).append(failed)
    return found


def failed_by_peer(snapshot: Snapshot) -> Mapping[str, Sequence[FailedRoom]]:
    """Returns the rooms that failed because a peer was lost or absent, by its name, the most recent first.

    These are the rooms whose failure names the peer, whatever the code: other health codes leave them to KV_PEER_LOST.
    Where a failure with that code names none, as those of SGLang, the peer is the absent one at the other end of the
    room, or one that the reporting rank does not hear; "" if there is none either.
    """
    gone, silent = snapshot.once(absent), snapshot.once(silences)
    names = snapshot.once(all_names) | gone
    found: dict[str, dict[str, FailedRoom]] = {}
    for code, failures in snapshot.once(failed_rooms).items():
        if code not in _OF_PEERS and not code.startswith("KV_ROOM_STUCK_"):
            continue
        for failed in failures:
            named = [*_LOST_PEER.findall(failed.text), *named_in(failed.text, names)]
            named = [name for name in dict.fromkeys(named) if name != failed.rank]
            lost = [name for name in named if name in gone]
            if code == "KV_PEER_LOST" and not lost:
                unheard = [name for name, each in silent.items() if any(one.agent in failed.known_to for one in each)]
                lost = [*named, *(name for name in failed.peers if name in gone), *unheard, ""][:1]
            for name in lost:
                found.setdefault(name, {}).setdefault(failed.room, failed)
    return {name: sorted(each.values(), key=lambda failed: failed.ago_ns) for name, each in found.items()}


def every_room_fails(snapshot: Snapshot, failures: Sequence[FailedRoom]) -> bool:
    """Returns whether several rooms failed, and since the first of them no room of the ranks that know them succeeded.

    Only decode ranks count, if any know the rooms.
    """
    if len({failed.room for failed in failures}) < _SEVERAL:
        return False
    names = {name for failed in failures for name in (failed.rank, *failed.known_to)}
    agents = [snapshot.agents[name] for name in names if name in snapshot.agents]
    first_ns = max(failed.ago_ns for failed in failures)
    ranks = [agent.status for agent in agents if agent.role == "decode"] or [agent.status for agent in agents]
    if not ranks or not all("last_success_age_ns" in status for status in ranks):
        return False  # agents of older versions
    ages = [number(status, "last_success_age_ns") for status in ranks]
    return all(age is None or age > first_ns for age in ages)


def failure_finding(
    snapshot: Snapshot,
    code: Code,
    failures: Sequence[FailedRoom],
    cause: str,
    shows: str,
    *,
    subject: str = "",
    severity: Severity | None = None,
    agents: Iterable[str] = (),
    evidence: Mapping[str, object] | None = None,
) -> Finding:
    """Returns one finding about all given failed rooms, critical if all rooms fail.

    Args:
        failures: failed rooms, the most recent first; at least one.
        cause: number of failed rooms and the reason; the text of the most recent failure is appended.
        shows: rest of the remedy, after "`kvctl rooms show` shows": the relevant information, and further steps.
        subject: subject of the finding; by default the rank that detected the most recent failure.
        severity: severity of the finding if some rooms succeed; by default the severity of the code.
        agents: agents of the finding besides the ones that reported the most recent failure, which come after them.
        evidence: evidence besides the number of failures and the most recent one.
    """
    latest = failures[0]
    cause = f"{cause}, last {duration(latest.ago_ns)} ago: {latest.text}"
    if every_room_fails(snapshot, failures):
        cause, severity = f"{cause}; no room has succeeded since the first of them", Severity.CRITICAL
    return code.finding(
        subject or latest.rank,
        severity=severity,
        agents=(*agents, *dict.fromkeys(failed.rank for failed in failures), *latest.known_to),
        since_ns=failures[-1].ago_ns,
        weight=len(failures),
        evidence={
            "failed_rooms": len(failures),
            "latest_room": latest.room,
            "latest_ago_ns": latest.ago_ns,
            "latest": latest.text,
            **(evidence or {}),
        },
        cause=cause,
        remedy=f"`kvctl rooms show {latest.room}` shows {shows}",
    )


def failure_alert(code: str) -> str:
    """Returns the PromQL expression that is true if rooms failed with this code in the last 10 minutes."""
    return f'sum by (instance) (increase(kvctl_room_failures_total{{code="{code}"}}[10m])) > 0'


def all_names(snapshot: Snapshot) -> frozenset[str]:
    """Returns the names of all agents that answered and of all their peers."""
    peers = {text(row, "peer") for agent in snapshot.agents.values() for row in agent.peers}
    return frozenset(snapshot.agents) | peers


def common_agents(pairs: Sequence[tuple[str, str]]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Chooses few agents so that every pair (writer, reader) contains one of them; yields each with its pairs.

    Repeatedly chooses the agent in most of the remaining pairs. Among equals, an agent that occurs in more pairs in
    total is preferred, then a reader, then the last in the order of names.
    """
    remaining = sorted(pairs)
    in_all = Counter(name for each in pairs for name in each)
    while remaining:
        in_remaining = Counter(name for each in remaining for name in each)
        readers = {reader for _, reader in remaining}
        common = max(in_remaining, key=lambda name: (in_remaining[name], in_all[name], name in readers, name))
        yield common, [each for each in remaining if common in each]
        remaining = [each for each in remaining if common not in each]


# ---- silent agents ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Silence:
    """Report of one agent about a peer from which it receives no messages.

    Attributes:
        agent: reporting agent; `role` is its role.
        lost: whether the peer is lost; otherwise it is suspect.
        needed: whether rooms of the agent need the peer; otherwise it is only remembered, as memory depends on it.
        for_ns: time since the last message of the peer; None if there was none.
        error: the reporting agent's error message about the loss; "" if the peer is only suspect.
    """

    agent: str
    role: str
    peer: str
    lost: bool
    closed: bool
    needed: bool
    for_ns: int | None
    rooms: int
    error: str


def restarted(snapshot: Snapshot, row: Row) -> bool:
    """Returns whether a report about a needed peer is about an earlier incarnation of an agent that answers kvctl."""
    other, known = snapshot.agents.get(text(row, "peer")), text(row, "incarnation")
    return (
        other is not None
        and row.get("needed") is not False
        and "" != known != other.incarnation
        and other.incarnation != ""
    )


def silences(snapshot: Snapshot) -> Mapping[str, list[Silence]]:
    """Returns the reports about silent agents, by the name of the silent agent; none about those started again."""
    found: dict[str, list[Silence]] = {}
    gone = snapshot.once(ended)
    for agent in snapshot.agents.values():
        min_ns = max(agent.period_ns("suspect_s"), _MIN_SILENCE_NS)
        for row in agent.peers:
            state, heard, error = text(row, "state"), number(row, "last_heard_ns"), text(row, "last_error")
            # SGLang's managers notice only after some health requests that a server has ended.
            has_ended = agent.observes and text(row, "peer") in gone
            if has_ended:
                state, error = "lost", "its process has ended"
            lost = state == "lost"
            if restarted(snapshot, row):
                continue
            if lost or (state == "suspect" and heard is not None and heard >= min_ns):
                silence = Silence(
                    agent.name,
                    agent.role,
                    text(row, "peer"),
                    lost,
                    error.endswith("it was closed"),
                    row.get("needed") is not False,
                    None if heard is None else int(heard),
                    int(amount(row, "rooms")),
                    error if lost else "",
                )
                found.setdefault(silence.peer, []).append(silence)
    return found


def unresponsive(snapshot: Snapshot) -> Mapping[str, Fault]:
    """Returns the faults of agents that were found and do not answer kvctl, or do not work, by name."""
    found = {fault.agent: fault for fault in snapshot.faults if fault.code in SILENT}
    for name, agent in snapshot.halted.items():
        if (halt := agent.halt) is not None:
            found[name] = Fault(name, FaultCode.STOPPED, f"it {halt.text}; {halt.remedy}")
    return found


def ended(snapshot: Snapshot) -> frozenset[str]:
    """Returns the names of agents whose process has ended: those that left a socket, and those that left data."""
    stale = {endpoint.name for endpoint in snapshot.survey.discovery.stale}
    return frozenset(stale | {name for name, agent in snapshot.halted.items() if agent.answer.ended_ns is not None})


def how_to_resume(snapshot: Snapshot, name: str) -> str:
    """Returns the command for an agent that its peers do not hear: `kvctl stacks` only if it answers kvctl."""
    fault = snapshot.once(unresponsive).get(name)
    if fault is not None and fault.remedy:
        return fault.remedy
    if name in snapshot.agents:
        return f"`kvctl stacks -e {name}` shows what its threads do"
    return f"`kvctl agents` shows whether {name} runs"


def absent(snapshot: Snapshot) -> frozenset[str]:
    """Returns agents whose absence explains why others wait: silent to a peer, unresponsive to kvctl, or ended."""
    return frozenset(snapshot.once(silences)) | snapshot.once(unresponsive).keys() | snapshot.once(ended)


# ---- drains, and rooms that no decode rank opened --------------------------------------------------------------


def draining(snapshot: Snapshot) -> Mapping[str, Sequence[Agent]]:
    """Returns the draining agents by role, in the order of their names."""
    found: dict[str, list[Agent]] = {}
    for name in sorted(snapshot.agents):
        agent = snapshot.agents[name]
        if agent.status.get("draining") is True:
            found.setdefault(agent.role, []).append(agent)
    return found


def _drain_periods(snapshot: Snapshot) -> list[tuple[float, float]]:
    """Returns the periods in which decode ranks accepted no new rooms, as the ages of begin and end in nanoseconds.

    The ages are widened by the tolerance for clocks; a drain that still lasts has an end of age 0 or less.
    """
    found = []
    for agent in snapshot.of_role("decode"):
        began = number(agent.status, "draining_age_ns")
        ended = 0.0 if agent.status.get("draining") is True else number(agent.status, "resumed_age_ns")
        if began is not None and ended is not None:
            found.append((began + _CLOCK_SLACK_NS, ended - _CLOCK_SLACK_NS))
    return found


def _unopened_for_drain(snapshot: Snapshot, age_ns: float) -> bool:
    """Returns whether an unopened room of this age may be one that a draining decode rank refused."""
    return any(ended <= age_ns <= began for began, ended in snapshot.once(_drain_periods))


def expired_for_drain(snapshot: Snapshot, failed: FailedRoom) -> bool:
    """Returns whether a room that no decode rank opened in time may have been refused by a draining decode rank."""
    knew = [snapshot.agents[name] for name in (failed.rank, *failed.known_to) if name in snapshot.agents]
    if failed.code != BOOTSTRAP or {agent.role for agent in knew} != {"prefill"}:
        return False
    return _unopened_for_drain(snapshot, failed.ago_ns + knew[0].period_ns("bootstrap_timeout_s"))


def unopened_rooms(snapshot: Snapshot, *, refused: bool) -> Iterator[tuple[Agent, Row]]:
    """Yields rooms that prefill ranks began and that no decode rank has opened there, as (prefill rank, row).

    Args:
        refused: True for rooms that a draining decode rank may have refused, False for all other unopened rooms.
    """
    for agent in snapshot.of_role("prefill"):
        for row in agent.rooms:
            unopened = text(row, "state") == "Bootstrapping" and not texts(row, "peers")
            if unopened and _unopened_for_drain(snapshot, amount(row, "state_age_ns")) == refused:
                yield agent, row


def decode_rooms(snapshot: Snapshot) -> set[str]:
    """Returns the numbers of all active rooms of decode ranks."""
    return {text(row, "room") for agent in snapshot.of_role("decode") for row in agent.rooms}


# ---- time on the wire ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wire:
    """Mean time of a writer's parts between post and completion, per part and per byte, and the number of parts."""

    seconds_a_part: float
    ns_a_byte: float
    parts: int

    @property
    def gb_per_s(self) -> float:
        return 1 / self.ns_a_byte if self.ns_a_byte else 0.0


@dataclass(frozen=True, slots=True)
class SlowWriter:
    """Wire times of a slow writer, and the medians of the other writers with their names."""

    wire: Wire
    others: Wire
    other_names: tuple[str, ...]


def slow_writers(snapshot: Snapshot) -> Mapping[str, SlowWriter]:
    """Returns the slow writers by name.

    A writer is slow if its wire time is at least five times the median of the other writers, both per part and per
    byte, because pipeline stages have parts of different sizes.
    """
    wires = {agent.name: wire for agent in snapshot.of_role("prefill") if (wire := _wire(snapshot, agent.name))}
    found: dict[str, SlowWriter] = {}
    for name, wire in wires.items():
        if wire.seconds_a_part < _MIN_WIRE_S:
            continue  # before what takes the square of the number of writers
        rest = {other: other_wire for other, other_wire in wires.items() if other != name}
        if not rest:
            continue
        others = Wire(
            median(other.seconds_a_part for other in rest.values()),
            median(other.ns_a_byte for other in rest.values()),
            sum(other.parts for other in rest.values()),
        )
        by_part = wire.seconds_a_part >= _SLOW_FACTOR * others.seconds_a_part
        if by_part and wire.ns_a_byte >= _SLOW_FACTOR * others.ns_a_byte:
            found[name] = SlowWriter(wire, others, tuple(sorted(rest)))
    return found


def median(values: Iterable[float]) -> float:
    """Returns the median, without importing `statistics`, which takes 11 ms, 5 % of the start of `kvctl health`."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _wire(snapshot: Snapshot, name: str) -> Wire | None:
    """Returns a writer's wire time since the previous snapshot; since the agent's start if too few parts were sent.

    A few parts that were faster than those since the start count instead of these. None if too few parts were sent
    since the start.
    """
    wire = recent = snapshot.histogram_since_before(name, "kvctl_stage_seconds", stage="wire")
    nbytes = snapshot.since_before(name, "kvctl_part_bytes_total")
    if recent is None or nbytes is None or recent.observations < _MIN_PARTS:
        agent, recent_bytes = snapshot.agents[name], nbytes
        wire, nbytes = agent.histogram("kvctl_stage_seconds", stage="wire"), agent.total("kvctl_part_bytes_total")
        if wire.observations < _MIN_PARTS:
            return None
        if recent is not None and recent_bytes and recent.observations and recent.mean_s < wire.mean_s:
            wire, nbytes = recent, recent_bytes  # what it was stopped for once does not make it slow
    if wire is None or not nbytes:
        return None
    return Wire(wire.mean_s, wire.seconds * 1e9 / nbytes, int(wire.observations))
