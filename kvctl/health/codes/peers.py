"""Agents that believe what is no longer so, do not read what they are sent, or have another time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from kvctl.health.answers import NO_ROW, Row, amount, number, numbers, rows, text
from kvctl.health.codes.formatting import counted, listed, pair
from kvctl.health.codes.silence import absent
from kvctl.health.finding import Code, Finding, Severity
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration

# Greetings are repeated until they are answered: after this much a new life is known to all who hear it.
_SETTLED_NS = 10_000_000_000


def stale_pairs(snapshot: Snapshot) -> Iterator[tuple[str, Agent, Agent]]:
    """Pairs of which one knows a life of the other that is over, long after the new one began."""
    for agent in snapshot.agents.values():
        patience_ns = max(agent.period_ns("lost_s"), _SETTLED_NS)
        for row in agent.peers:
            other = snapshot.agents.get(text(row, "peer"))
            known = text(row, "incarnation")
            if other is None or not known or not other.incarnation or known == other.incarnation:
                continue
            if min(amount(other.status, "uptime_ns"), amount(agent.status, "uptime_ns")) >= patience_ns:
                yield pair(agent.name, other.name), agent, other


_BACKLOG = 100
# A control thread without a core sees everything late.
_UNSEEN_NS = 5_000_000_000
_HEARTBEATS = 5
_SKEW_NS = 5_000_000
_SKEW_BAD_NS = 1_000_000_000


# ---- stale ----------------------------------------------------------------------------------------------------


def _stale(snapshot: Snapshot) -> Iterator[Finding]:
    for subject, agent, other in stale_pairs(snapshot):
        row = next(row for row in agent.peers if text(row, "peer") == other.name)
        uptime = int(amount(other.status, "uptime_ns"))
        yield Finding(
            code="KV_PEER_STALE",
            severity=Severity.CRITICAL,
            subject=subject,
            agents=(agent.name, other.name),
            since_ns=uptime,
            evidence={
                "incarnation_known": text(row, "incarnation"),
                "incarnation_live": other.incarnation,
                "live_uptime_ns": uptime,
                "state": text(row, "state"),
                "last_heard_ns": number(row, "last_heard_ns"),
            },
            cause=f"{agent.name} still sends to an earlier incarnation of {other.name}, which was started again "
            f"{duration(uptime)} ago",
            remedy=f"`kvctl events -e {agent.name}` shows why it does not take up {other.name}; restart "
            f"{agent.name}, and report it: a restarted peer must be recognised without that",
        )


PEER_STALE = Code(
    name="KV_PEER_STALE",
    sees="every room of one pair of agents fails after one of them was restarted",
    means="One agent knows another by an incarnation, the random number of one life, that the other no longer has. "
    "Greetings are repeated until they are answered, so this should last for seconds after a restart; it is reported "
    "when it lasted longer than lost_s.",
    remedy="Restart the agent that knows the old incarnation, and report it with `kvctl debug bundle bundle.tar.zst`.",
    severity=Severity.CRITICAL,
    find=_stale,
    alert='sum by (instance) (rate(kvctl_control_dropped_total{reason="incarnation"}[5m])) > 1',
)


# ---- backlog ---------------------------------------------------------------------------------------------------


def _blocking(snapshot: Snapshot) -> Iterator[Finding]:
    for agent in snapshot.agents.values():
        then = snapshot.earlier(agent.name)
        if then is None:
            continue
        earlier = {text(row, "peer"): amount(row, "control_queue") for row in then.peers}
        for row in agent.peers:
            peer, queue = text(row, "peer"), amount(row, "control_queue")
            if min(queue, earlier.get(peer, 0)) < _BACKLOG or peer in snapshot.once(absent):
                continue
            yield Finding(
                code="KV_PEER_BLOCKING",
                severity=Severity.WARNING,
                subject=pair(agent.name, peer),
                agents=(agent.name, peer),
                since_ns=snapshot.since_ns,
                weight=queue,
                evidence={
                    "control_queue": int(queue),
                    "control_queue_before": int(earlier[peer]),
                    "rtt_ns": row.get("rtt_ns"),
                },
                cause=f"{counted(queue, 'control message')} of {agent.name} to {peer} cannot leave: {peer} takes them "
                "too slowly, and what does not leave is dropped and said again",
                remedy=f"`kvctl stacks -e {peer}` shows what its control thread does instead of reading",
            )


PEER_BLOCKING = Code(
    name="KV_PEER_BLOCKING",
    sees="rooms with one peer stutter, control messages are repeated",
    means="An agent never waits for a peer: a control message that its socket has no place for is dropped and said "
    "again. This many of them mean that the peer is heard and yet does not read what it is sent. Peers that are "
    "silent altogether are KV_PEER_LOST.",
    remedy="Look at the peer's stacks: its control thread is held up, or its process gets no core.",
    severity=Severity.WARNING,
    find=_blocking,
    alert='sum by (instance) (rate(kvctl_control_dropped_total{reason="unsent"}[5m])) > 1',
)


# ---- watermarks ------------------------------------------------------------------------------------------------


def _subscriber(snapshot: Snapshot) -> Iterator[Finding]:
    for writer in snapshot.of_role("prefill"):
        waits = Counter(
            text(part, "peer")
            for part in rows(writer.staging.get("gated"))
            if text(part, "waiting_for").startswith("watermark")
        )
        for name, waiting in waits.items():
            reader, then = snapshot.agents.get(name), snapshot.earlier(name)
            if reader is None or then is None or snapshot.earlier(writer.name) is None:
                continue
            if snapshot.since_ns < max(_UNSEEN_NS, _HEARTBEATS * reader.period_ns("heartbeat_s")):
                continue
            sent = numbers(_row_of(then, writer.name), "watermark_sent")
            theirs = _row_of(writer, name)
            seen = numbers(theirs, "watermark_seen")
            if text(theirs, "incarnation") != reader.incarnation or text(theirs, "state") != "ready":
                continue
            if len(sent) != 3 or (len(seen) == 3 and seen[2] >= sent[2]):
                continue
            yield Finding(
                code="KV_SUBSCRIBER_DEAD",
                severity=Severity.CRITICAL,
                subject=pair(writer.name, reader.name),
                agents=(writer.name, reader.name),
                since_ns=snapshot.since_ns,
                weight=waiting,
                evidence={
                    "watermark_sent": [int(one) for one in sent],
                    "watermark_seen": [int(one) for one in seen],
                    "gated_parts": waiting,
                },
                cause=f"{writer.name} has not seen a watermark of {reader.name} that was sent more than "
                f"{duration(snapshot.since_ns)} ago, and {counted(waiting, 'part')} of it wait for one",
                remedy=f"`kvctl peers -e {writer.name} -o wide` shows both sequence numbers; restart "
                f"{writer.name}, and report it: heartbeats carry the watermark too",
            )


def _row_of(agent: Agent, peer: str) -> Row:
    """What an agent says of a peer."""
    return next((row for row in agent.peers if text(row, "peer") == peer), NO_ROW)


SUBSCRIBER_DEAD = Code(
    name="KV_SUBSCRIBER_DEAD",
    sees="one prefill rank never sees the watermark of a decode rank, while others write",
    means="The watermark says which granted ring regions may be written. A lost message is repaired by the next "
    "heartbeat, so a writer that has not seen after several heartbeats what was sent before them does not read them "
    "at all.",
    remedy="Restart the prefill rank, and report it with `kvctl debug bundle bundle.tar.zst`.",
    severity=Severity.CRITICAL,
    find=_subscriber,
)


# ---- clocks ----------------------------------------------------------------------------------------------------


def _skew(snapshot: Snapshot) -> Iterator[Finding]:
    clocks = sorted((agent.answer.clock.correction_ns, agent.name) for agent in snapshot.agents.values())
    if len(clocks) < 2:
        return
    middle, _ = clocks[len(clocks) // 2]
    far = []
    for offset, name in clocks:
        bound = abs(offset - middle) - snapshot.agents[name].answer.clock.error_ns
        if bound > _SKEW_NS:
            far.append((offset, name, bound))
    for direction, group in groupby(far, key=lambda one: one[0] > middle):
        told = list(group)
        bound = max(one[2] for one in told)
        names = [name for _, name, _ in told]
        yield Finding(
            code="KV_CLOCK_SKEW",
            severity=Severity.WARNING if bound > _SKEW_BAD_NS else Severity.INFO,
            subject=names[0],
            agents=tuple(names),
            weight=len(names),
            evidence={"offset_ns": max((one[0] - middle for one in told), key=abs), "bound_ns": bound, "agents": names},
            cause=f"the clock of {listed(names)} is {duration(bound)} or more {'ahead of' if direction else 'behind'} "
            "the others'",
            remedy="`kvctl agents -o wide` shows every offset; `timedatectl` on those hosts shows whether NTP keeps "
            "the clock; kvctl corrects timelines for it, logs and traces are not corrected",
        )


CLOCK_SKEW = Code(
    name="KV_CLOCK_SKEW",
    sees="timelines of the two ends of a room disagree",
    means="The wall clock of an agent's host differs from the others' by more than 5 ms beyond what the round trip "
    "leaves open. The agents themselves use no wall clock to decide anything; logs, traces and room timelines do. "
    "kvctl brings the events of a room onto one clock.",
    remedy="Let chrony or NTP keep the clocks of all hosts.",
    severity=Severity.WARNING,
    find=_skew,
)
