"""Health codes about pairs of agents: lost, stale, slow and incompatible peers, and clock skew."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvctl.client.clock import ClockOffset
from kvctl.client.faults import FaultCode
from kvctl.client.names import natural_key
from kvctl.health.answers import amount, inner, number, numbers, rows, text, texts
from kvctl.health.codes.facts import (
    FailedRoom,
    Silence,
    absent,
    all_names,
    common_agents,
    every_room_fails,
    failed_by_instance,
    failed_by_peer,
    failure_alert,
    failure_finding,
    restarted,
    silences,
    unresponsive,
)
from kvctl.health.codes.network import Interruption, host_of, interrupted, interruptions, row_about
from kvctl.health.finding import Code, Finding, Severity, agree, counted, health_code, listed, named_in, pair
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration

# Hellos are repeated until they are answered, so after this time every reachable peer knows an agent's incarnation.
_HELLO_NS = 10_000_000_000
_MIN_BACKLOG = 100
# A control thread that gets no core processes every watermark late.
_MIN_UNSEEN_NS = 5_000_000_000
_HEARTBEATS = 5
_SKEW_NS = 5_000_000
_LARGE_SKEW_NS = 1_000_000_000
_RECENTLY_LOST_NS = 600_000_000_000
_FACTOR = re.compile(r"(?P<name>.*\S) (?P<first>\S+) ≠ (?P<second>\S+)")


# ---- stale -----------------------------------------------------------------------------------------------------


def _stale_pairs(snapshot: Snapshot) -> Iterator[tuple[Agent, Agent]]:
    """Yields pairs whose first agent knows only an earlier incarnation of the second, long after its restart.

    A decode rank says hello only to the prefill ranks that it knows: to those of an instance that its engine names with
    its requests, not before the first one.
    """
    for agent in snapshot.agents.values():
        patience_ns = max(agent.period_ns("lost_s"), _HELLO_NS)
        for row in agent.peers:
            other = snapshot.agents.get(text(row, "peer"))
            if other is None or not restarted(snapshot, row):
                continue
            if other.role == "decode" and not row_about(other, agent.name):
                continue
            if min(amount(other.status, "uptime_ns"), amount(agent.status, "uptime_ns")) >= patience_ns:
                yield agent, other


@health_code(
    "KV_PEER_STALE",
    Severity.CRITICAL,
    "peers",
    sees="every room of one pair of agents fails after one of them was restarted",
    means="One agent knows an earlier incarnation of another, which has a new one since its restart. Hellos are "
    "repeated until they are answered, so this should last for seconds after a restart; it is reported when it lasts "
    "longer than lost_s.",
    remedy="Restart the agent that knows the old incarnation, and report it with "
    "`kvctl record incident.kvrec --for 2s`.",
    alert='sum by (instance) (rate(kvctl_control_dropped_total{reason="incarnation"}[5m])) > 1',
)
def peer_stale(snapshot: Snapshot) -> Iterator[Finding]:
    for agent, other in _stale_pairs(snapshot):
        row = row_about(agent, other.name)
        uptime = int(amount(other.status, "uptime_ns"))
        yield peer_stale.finding(
            pair(agent.name, other.name),
            agents=(agent.name, other.name),
            since_ns=uptime,
            evidence={
                "incarnation_known": text(row, "incarnation"),
                "incarnation_live": other.incarnation,
                "live_uptime_ns": uptime,
                "state": text(row, "state"),
                "last_heard_ns": number(row, "last_heard_ns"),
            },
            cause=f"{agent.name} still sends to an earlier incarnation of {other.name}, which was restarted "
            f"{duration(uptime)} ago",
            remedy=f"`kvctl events -e {agent.name}` shows why it does not recognise {other.name}; restart "
            f"{agent.name}, and report it: a restarted peer must be recognised without that",
        )


# ---- lost ------------------------------------------------------------------------------------------------------


@health_code(
    "KV_PEER_LOST",
    Severity.CRITICAL,
    "peers",
    sees="every room of one pair of agents fails, or none of an instance's dp group can be opened",
    means="An agent does not hear another one. After suspect_s of silence it gives it no new grants, which is a "
    "warning; after lost_s, or as soon as its process is known to have ended, all rooms between the two fail. A room "
    "needs every rank of the dp group that computes it, so one lost prefill rank stops its whole dp group. Ring "
    "regions and pages that a lost rank might still write are kept until it is proven dead (KV_QUARANTINE). Rooms that "
    "wait for a silent agent are not reported individually: this finding explains them.",
    remedy="Start the agent again; the others reconnect by themselves. If it comes back under another name, they "
    "forget the old one: on the same host when the new one connects (a decode server of vLLM with its first request), "
    "otherwise after bootstrap_timeout_s or with `kvctl peers forget PEER`. If it still runs, check whether its "
    "process is stopped or the network between the hosts is interrupted.",
    alert='sum by (instance) (kvctl_peers{state="lost"}) > 0',
)
def peer_lost(snapshot: Snapshot) -> Iterator[Finding]:
    failed = snapshot.once(failed_by_peer)
    for interruption in snapshot.once(interruptions):
        yield _interrupted(interruption, failed)
    explained = snapshot.once(interrupted)
    by_host: dict[str, dict[str, list[Silence]]] = {}
    for name, all_reports in snapshot.once(silences).items():
        reports = [silence for silence in all_reports if (silence.agent, name) not in explained]
        if host := _gone_host(snapshot, name, reports):
            by_host.setdefault(host, {})[name] = reports
        elif reports:
            yield from _silent_agent(snapshot, name, reports, failed.get(name, ()))
    for host, silent in by_host.items():
        yield _silent_host(snapshot, host, silent, _rooms(failed, silent))
    for name, failures in failed.items():
        if not name:
            yield _unknown_peer(snapshot, failures)
        elif name not in snapshot.once(silences) and any(each.code == peer_lost.name for each in failures):
            yield _reconnected(snapshot, name, failures)


def _rooms(failed: Mapping[str, Sequence[FailedRoom]], peers: Iterable[str]) -> int:
    """Returns the number of rooms that failed because of any of these peers."""
    return len({failure.room for name in peers for failure in failed.get(name, ())})


def _last_heard(reports: Iterable[Silence]) -> tuple[int | None, str]:
    """Returns the time since the last message of a silent peer, None if it is unknown, and ` for 9 s` or ""."""
    for_ns = min((report.for_ns for report in reports if report.for_ns is not None), default=None)
    return for_ns, "" if for_ns is None else f" for {duration(for_ns)}"


def _evidence(reports: Sequence[Silence], failed: int, **more: object) -> dict[str, object]:
    return {
        "state": "lost" if any(report.lost for report in reports) else "suspect",
        "last_heard_ns": _last_heard(reports)[0],
        "rooms": sum(report.rooms for report in reports),
        "failed_rooms": failed,
        **more,
    }


def _interrupted(found: Interruption, failed: Mapping[str, Sequence[FailedRoom]]) -> Finding:
    """Returns the finding about two hosts whose agents answer kvctl and have lost each other."""
    for_ns, since = _last_heard(found.reports)
    agents = list(dict.fromkeys(name for report in found.reports for name in (report.agent, report.peer)))
    more = {"one_way": found.one_way, "large_only": found.large_only, "address": found.address}
    return peer_lost.finding(
        found.subject,
        severity=Severity.CRITICAL if any(report.lost for report in found.reports) else Severity.WARNING,
        agents=agents,
        since_ns=for_ns,
        weight=len(found.reports),
        evidence=_evidence(found.reports, _rooms(failed, agents), agents=agents, **more),
        cause=f"{found.cause}; {listed(agents)} have not heard each other{since}, and all of them answer kvctl",
        remedy=found.remedy,
    )


def _gone_host(snapshot: Snapshot, name: str, reports: list[Silence]) -> str:
    """Returns the host of a silent agent if no agent of that host answers anybody; else ""."""
    host = host_of(snapshot, name)
    answering = {text(agent.status, "host") for agent in snapshot.agents.values()}
    ended = any(report.closed or report.error.endswith("has ended") for report in reports)
    return host if reports and host and host not in answering and not ended else ""


def _silent_host(snapshot: Snapshot, host: str, silent: Mapping[str, list[Silence]], failed: int) -> Finding:
    """Returns the finding about a host that nobody hears, neither its peers nor kvctl."""
    reports = [report for each in silent.values() for report in each]
    for_ns, since = _last_heard(reports)
    lost = any(report.lost for report in reports)
    others = sorted({host_of(snapshot, report.agent) for report in reports})
    address = next((text(row_about(snapshot.agents[each.agent], each.peer), "address") for each in reports), "")
    recent = for_ns is None or for_ns < _RECENTLY_LOST_NS
    needed = any(report.role == "decode" and report.needed for report in reports)
    recent = recent and any(report.needed for report in reports)
    return peer_lost.finding(
        pair(host, listed(others)),
        severity=Severity.CRITICAL if lost and (needed or recent) else Severity.WARNING,
        agents=(*silent, *dict.fromkeys(report.agent for report in reports)),
        since_ns=for_ns,
        weight=len(reports) + failed,
        evidence=_evidence(reports, failed, agents=list(silent), missed_by=others, address=address),
        cause=f"{listed(others)} heard nothing from {host} ({listed(silent)}){since}, nor does it answer kvctl: the "
        "host is down or cut off, or its processes are",
        remedy=f"`ping -c 3 {shlex.quote(address or host)}` on {others[0]} shows whether the host answers; "
        "start its agents again, and the others reconnect by themselves. Memory that it might still write is kept "
        "until it is proven dead (KV_QUARANTINE)",
    )


def _silent_agent(
    snapshot: Snapshot, name: str, reports: list[Silence], failures: Sequence[FailedRoom]
) -> Iterator[Finding]:
    lost = [silence for silence in reports if silence.lost]
    closed = bool(lost) and all(silence.closed for silence in lost)
    # No room of its dp group can be opened without it.
    needed_by = sorted({silence.agent for silence in lost if silence.role == "decode" and silence.needed})
    remembered = bool(lost) and not any(silence.needed for silence in lost)
    if closed and not needed_by:
        return  # a decode rank that closed in order: no other agent needs it
    if remembered and all(silence.role == "prefill" for silence in lost):
        return  # a decode rank whose place another one has taken; it is forgotten when writes to it have ended
    silent_ns, since = _last_heard(reports)
    recent = silent_ns is None or silent_ns < _RECENTLY_LOST_NS
    observed = snapshot.agents.get(name)
    given_up = observed is not None and observed.observes  # by SGLang's backend; it runs
    missed_by = sorted({silence.agent for silence in reports})
    error = next((silence.error for silence in lost if silence.error), "")
    cause, remedy = _explanation(snapshot, name, listed(missed_by), closed, error, since)
    if remembered:
        cause += (
            f"; no room needs it, but {listed(missed_by)} may keep memory that it could still write (KV_QUARANTINE)"
        )
        remedy = (
            f"`kvctl peers forget {shlex.quote(name)} --force` frees it: first make sure that its process has ended, "
            "since its writes would corrupt other rooms"
        )
    if needed_by:
        cause += f"; {listed(needed_by)} cannot open a room of its instance"
    failed, severity = _rooms({name: failures}, (name,)), Severity.WARNING
    if lost and not closed and not given_up and not remembered and (needed_by or recent):
        severity = Severity.CRITICAL
    elif every_room_fails(snapshot, failures):
        cause, severity = f"{cause}; {counted(failed, 'room')} failed, and none has succeeded since", Severity.CRITICAL
    yield peer_lost.finding(
        name,
        severity=severity,
        agents=(name, *missed_by),
        since_ns=silent_ns,
        weight=len(reports) + failed,
        evidence=_evidence(
            reports,
            failed,
            **({"state": "closed"} if closed else {}),
            role="prefill" if reports[0].role == "decode" else "decode",
            missed_by=missed_by,
            answers_kvctl=name in snapshot.agents,
            last_error=error,
        ),
        cause=cause,
        remedy=remedy,
    )


def _explanation(snapshot: Snapshot, name: str, peers: str, closed: bool, error: str, since: str) -> tuple[str, str]:
    """Returns cause and remedy of the finding about a silent agent.

    Args:
        peers: names of the agents that report its silence.
        error: error message of an agent that lost it; "" if there is none.
        since: ` for 9 s`, the time since its last message; "" if unknown.
    """
    if closed:
        return f"{name} was closed and has not come back; {peers} waited for it", (
            f"`kvctl peers` shows which agents wait for it; start {name} again, or remove it from its instance"
        )
    if error.endswith("has ended"):
        heard = f", last heard {since.removeprefix(' for ')} ago" if since else ""
        return f"{name} died: {error.rpartition(': ')[2]}{heard}; {peers} lost it", (
            f"`kvctl peers` shows which agents lost it; start {name} again, and the others reconnect by themselves, or "
            f"`kvctl peers forget {shlex.quote(name)}` if it has another name now; its own log shows why it died"
        )
    if error and name in snapshot.agents and snapshot.agents[name].observes:
        return f"{peers} gave {name} up: {error}", f"`kvctl peers -e {name}` shows which ranks it hears"
    silent = f"{peers} heard nothing from {name}{since}"
    if name in snapshot.agents:
        return f"{silent}, but it answers kvctl: the network between them is interrupted", (
            f"`kvctl peers -e {name}` shows which agents it hears; then check the network between their hosts"
        )
    fault = snapshot.once(unresponsive).get(name)
    if fault is not None:
        silent += ": " if fault.code == FaultCode.STOPPED else ", and kvctl cannot ask it: "
        asks = f"`kvctl agents -e {shlex.quote(name)}` shows whether it answers again"
        return silent + fault.problem, fault.remedy or asks
    return f"{silent}, and no agent of that name answers kvctl here", (
        f"`kvctl agents` shows whether {name} runs; start it again, and the others reconnect by themselves, or "
        f"`kvctl peers forget {shlex.quote(name)}` if it has another name now"
    )


def _unknown_peer(snapshot: Snapshot, failures: Sequence[FailedRoom]) -> Finding:
    ranks = sorted({failed.rank for failed in failures}, key=natural_key)
    cause = f"{counted(len(failures), 'room')} of {listed(ranks)} failed because a peer was lost"
    shows = "their ranks; `kvctl bootstrap` which registries answer"
    return failure_finding(snapshot, peer_lost, failures, cause, shows, subject=ranks[0], severity=Severity.WARNING)


def _reconnected(snapshot: Snapshot, name: str, failures: Sequence[FailedRoom]) -> Finding:
    states = {
        text(row, "state") for agent in snapshot.agents.values() for row in agent.peers if text(row, "peer") == name
    }
    state, now = "forgotten", "not needed any more, and forgotten"
    if states & {"ready", "suspect"}:
        state, now = "back", "connected again"
    elif states:
        state, now = "started", "started again, and not connected yet"
    return failure_finding(
        snapshot,
        peer_lost,
        failures,
        f"{counted(len(failures), 'room')} failed when {name} was lost; it is {now}",
        f"what became of it; `kvctl events -e {failures[0].known_to[0]}` when {name} was lost and what followed",
        subject=name,
        severity=Severity.WARNING,
        agents=(name,),
        evidence={"state": state},
    )


# ---- slow to read ----------------------------------------------------------------------------------------------


@health_code(
    "KV_PEER_BLOCKING",
    Severity.WARNING,
    "peers",
    sees="rooms with one peer stutter, control messages are repeated",
    means="An agent never waits for a peer: a control message that does not fit its socket's queue is dropped and sent "
    "again later. A queue this long means that the peer is heard but does not read what it is sent. Peers that are "
    "completely silent are KV_PEER_LOST.",
    remedy="Look at the peer's stacks: its control thread is blocked, or its process gets no core.",
    alert='sum by (instance) (rate(kvctl_control_dropped_total{reason="unsent"}[5m])) > 1',
)
def peer_blocking(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.agents.values():
        before = snapshot.earlier(agent.name)
        if before is None:
            continue
        earlier = {text(row, "peer"): amount(row, "control_queue") for row in before.peers}
        for row in agent.peers:
            peer, queue = text(row, "peer"), amount(row, "control_queue")
            if min(queue, earlier.get(peer, 0)) < _MIN_BACKLOG or peer in snapshot.once(absent):
                continue
            yield peer_blocking.finding(
                pair(agent.name, peer),
                agents=(agent.name, peer),
                since_ns=snapshot.since_ns,
                weight=queue,
                evidence={
                    "control_queue": int(queue),
                    "control_queue_before": int(earlier[peer]),
                    "rtt_ns": row.get("rtt_ns"),
                },
                cause=f"{counted(queue, 'control message')} from {agent.name} to {peer} cannot be sent: {peer} reads "
                "too slowly, so further messages are dropped and repeated",
                remedy=f"`kvctl stacks -e {peer}` shows what its control thread does instead of reading",
            )


@health_code(
    "KV_SUBSCRIBER_DEAD",
    Severity.CRITICAL,
    "peers",
    sees="one prefill rank never sees the watermark of a decode rank, while others write",
    means="The watermark tells writers which granted ring regions may be written. The next heartbeat repeats a lost "
    "message, so a writer that has not seen a watermark after several heartbeats does not read the messages at all.",
    remedy="Restart the prefill rank, and report it with `kvctl record incident.kvrec --for 2s`.",
)
def subscriber_dead(snapshot: Snapshot) -> Iterator[Finding]:
    for writer in snapshot.of_role("prefill"):
        gated = [
            part for part in rows(writer.staging.get("gated")) if text(part, "waiting_for").startswith("watermark")
        ]
        waiting_parts = Counter(text(part, "peer") for part in gated)
        oldest_ns = {
            name: max(amount(part, "age_ns") for part in gated if text(part, "peer") == name) for name in waiting_parts
        }
        for name, waiting in waiting_parts.items():
            reader, before = snapshot.agents.get(name), snapshot.earlier(name)
            if reader is None or before is None or snapshot.earlier(writer.name) is None:
                continue
            row = row_about(writer, name)
            seen = numbers(row, "watermark_seen")
            if reader.observes:
                watermark = inner(inner(before.staging, "ring"), "watermark")
                sent = [amount(watermark, "round"), amount(watermark, "tail")]
                if oldest_ns[name] < _MIN_UNSEEN_NS or not any(sent) or seen >= sent:
                    continue
            else:
                if snapshot.since_ns < max(_MIN_UNSEEN_NS, _HEARTBEATS * reader.period_ns("heartbeat_s")):
                    continue
                sent = numbers(row_about(before, writer.name), "watermark_sent")
                if text(row, "incarnation") != reader.incarnation or text(row, "state") != "ready":
                    continue
                if len(sent) != 3 or (len(seen) == 3 and seen[2] >= sent[2]):
                    continue
            yield subscriber_dead.finding(
                pair(writer.name, reader.name),
                agents=(writer.name, reader.name),
                since_ns=snapshot.since_ns,
                weight=waiting,
                evidence={
                    "watermark_sent": [int(value) for value in sent],
                    "watermark_seen": [int(value) for value in seen],
                    "gated_parts": waiting,
                },
                cause=f"{writer.name} has not seen a watermark that {reader.name} sent more than "
                f"{duration(snapshot.since_ns)} ago; "
                f"{counted(waiting, 'part')} of it {agree(waiting, 'waits', 'wait')} for one",
                remedy=f"`kvctl peers -e {writer.name} -o wide` shows both sequence numbers; restart {writer.name}, "
                "and report it: heartbeats contain the watermark too",
            )


# ---- incompatible ----------------------------------------------------------------------------------------------


def refused_pairs(snapshot: Snapshot) -> dict[tuple[str, str], dict[str, str]]:
    """Returns the pairs (prefill, decode) that refuse each other, with the differences of their configurations.

    A difference such as `page_size 64 ≠ 32` is mapped to the same with names, `page_size 64 (first) ≠ 32 (second)`.
    """
    pairs: dict[tuple[str, str], dict[str, str]] = {}
    # Prefill ranks first: a decode rank repeats what the prefill rank sent, and compares only protocol versions itself.
    for agent in sorted(snapshot.agents.values(), key=lambda agent: agent.role, reverse=True):
        for row in agent.peers:
            factors = texts(row, "differences")
            if text(row, "state") != "refused" or not factors:
                continue
            ends = agent.name, text(row, "peer")
            prefill, decode = ends if agent.role == "prefill" else ends[::-1]
            compared_here = agent.role == "decode" and all(each.startswith("protocol version") for each in factors)
            first, second = (decode, prefill) if compared_here else (prefill, decode)
            pairs.setdefault((prefill, decode), {each: _with_names(each, first, second) for each in factors})
    return pairs


def _with_names(factor: str, first: str, second: str) -> str:
    match = _FACTOR.fullmatch(factor)
    return factor if match is None else f"{match['name']} {match['first']} ({first}) ≠ {match['second']} ({second})"


@health_code(
    "KV_COMPAT_MISMATCH",
    Severity.CRITICAL,
    "peers",
    sees="no room can be opened between two agents; elsewhere: garbage, or NOT_FOUND under load",
    means="When two agents connect, they compare everything that the layout of KV depends on: page size, dtype, heads, "
    "layers, the chunk grid, the version. Here they differ, so they refuse each other and every room between them "
    "fails at once. The finding names the factor and both values.",
    remedy="Start the deviating agent with the configuration of the others; kvctl peers diff lists all factors.",
    alert='sum by (instance) (kvctl_peers{state="refused"}) > 0',
)
def compat_mismatch(snapshot: Snapshot) -> Iterator[Finding]:
    pairs = snapshot.once(refused_pairs)
    for deviating, refusals in common_agents(list(pairs)):
        factors: dict[str, str] = {}  # what differs from several agents in the same way is one difference
        for each in refusals:
            factors |= {factor: named for factor, named in pairs[each].items() if factor not in factors}
        others = [next(name for name in each if name != deviating) for each in refusals]
        known = deviating in snapshot.agents and any(other in snapshot.agents for other in others)
        yield compat_mismatch.finding(
            deviating,
            severity=Severity.CRITICAL if known else Severity.WARNING,
            agents=(deviating, *others),
            weight=len(refusals),
            evidence={
                "differences": [*factors.values()][:8],
                "differing_factors": len(factors),
                "refused_with": others,
            },
            cause=f"{deviating} is incompatible with {listed(others)}: {'; '.join([*pairs[refusals[0]].values()][:2])}",
            remedy=f"`kvctl peers diff {' '.join(refusals[0])}` lists every factor; start {deviating} with the "
            "configuration of the others",
        )
    if not pairs:
        reason = "because two agents are incompatible"
        yield from _mismatched_rooms(snapshot, compat_mismatch, reason, Severity.WARNING)


@health_code(
    "KV_PLAN_MISMATCH",
    Severity.CRITICAL,
    "rooms",
    sees="requests with a cached prefix fail; elsewhere they hang or their text is corrupt",
    means="Both ends of a room derive the transfer plan from the same inputs. For this room the inputs differ: the "
    "prompt or its length, the number of pages, the cached prefix, the aux row or the state items that one engine "
    "passed are not those that the other expects. The first cause names the factor and both values.",
    remedy="Compare how the two engines see this prompt: tokens, LoRA adapter, cache salt, prefix length, page "
    "size, aux row.",
    alert=failure_alert("KV_PLAN_MISMATCH"),
)
def plan_mismatch(snapshot: Snapshot) -> Iterator[Finding]:
    return _mismatched_rooms(snapshot, plan_mismatch, "because prefill and decode disagree on the transfer plan")


def _mismatched_rooms(
    snapshot: Snapshot, code: Code, reason: str, severity: Severity | None = None
) -> Iterator[Finding]:
    for instance, failures in failed_by_instance(snapshot, code.name).items():
        latest = failures[0]
        rank, named = latest.rank, named_in(latest.text, snapshot.once(all_names))
        agents = (rank, *latest.known_to, *named)
        roles = {name: snapshot.agents[name].role for name in agents if name in snapshot.agents}
        other = next((name for name, role in roles.items() if role != roles.get(rank)), "")
        layouts = (
            f"`kvctl peers diff {rank} {other}` shows whether their layouts differ" if other else "compare layouts"
        )
        yield failure_finding(
            snapshot,
            code,
            failures,
            f"{counted(len(failures), 'room')} failed {reason}",
            f"both ends; {layouts}; if they do not, the engines disagree on the prompt or its cached prefix",
            subject=instance,
            severity=severity,
            agents=(rank, *named),
        )


# ---- clocks ----------------------------------------------------------------------------------------------------


@health_code(
    "KV_CLOCK_SKEW",
    Severity.WARNING,
    "peers",
    sees="timelines of the two ends of a room disagree",
    means="The wall clock of a host differs from that of another host by more than 5 ms beyond the uncertainty of the "
    "round trips. Agents use no wall clock for decisions; logs, traces and room timelines use it. kvctl shows events "
    "and rooms on one clock, that of the machine it runs on.",
    remedy="Let chrony or NTP synchronise the clocks of all hosts.",
)
def clock_skew(snapshot: Snapshot) -> Iterator[Finding]:
    """Yields a finding for each host whose clock differs from that of the host in the middle.

    Agents of one host whose clocks differ, and agents of a single host, stand for themselves.
    """
    clocks = _clocks(snapshot)
    if len(clocks) < 2:
        return
    ranks = sorted((clock.correction_ns, name) for name, (clock, agents) in clocks.items() for _ in agents)
    _, reference = ranks[len(ranks) // 2]
    middle, _ = clocks[reference]
    for name in sorted(clocks, key=natural_key):
        clock, agents = clocks[name]
        offset, error = clock.correction_ns - middle.correction_ns, clock.error_ns + middle.error_ns
        bound = abs(offset) - error
        if name == reference or bound <= _SKEW_NS:
            continue
        yield clock_skew.finding(
            f"{name} ↔ {reference}",
            severity=Severity.WARNING if bound > _LARGE_SKEW_NS else Severity.INFO,
            agents=agents,
            weight=len(agents),
            evidence={"offset_ns": offset, "error_ns": error, "bound_ns": bound},
            cause=f"the clock of {name} is {duration(bound)} or more {'ahead of' if offset > 0 else 'behind'} that of "
            f"{reference}: {duration(abs(offset))} ± {duration(error)}",
            remedy="`kvctl hosts` shows every offset; `timedatectl` on those hosts shows whether NTP keeps the clock; "
            "kvctl corrects timelines for it, logs and traces are not corrected",
        )


def _clocks(snapshot: Snapshot) -> dict[str, tuple[ClockOffset, list[str]]]:
    """Returns the clocks with the agents that read them, by host; by agent if the agents of its host differ."""
    hosts: dict[str, list[Agent]] = {}
    for agent in snapshot.agents.values():
        hosts.setdefault(agent.answer.host, []).append(agent)
    found: dict[str, tuple[ClockOffset, list[str]]] = {}
    for host, agents in hosts.items():
        if host and len(hosts) > 1 and len({agent.answer.clock for agent in agents}) == 1:
            found[host] = agents[0].answer.clock, [agent.name for agent in agents]
        else:
            found |= {agent.name: (agent.answer.clock, [agent.name]) for agent in agents}
    return found
