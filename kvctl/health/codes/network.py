"""Health code about bytes that do not get from one host to another, and facts about the network between two hosts.

What agents report about each other is joined by pairs of hosts: a link that is interrupted is one problem, however many
ranks the two hosts have.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvctl.health.answers import NO_ROW, Row, amount, inner, number, rows, text
from kvctl.health.codes.facts import Silence, median, silences
from kvctl.health.finding import Finding, Severity, counted, health_code, pair
from kvctl.health.snapshot import Agent, Snapshot
from kvctl.render.units import duration, size

# A connection that sends the same bytes for the third time has had no acknowledgement for more than a second.
_MIN_RETRANSMITS = 3
_MIN_WRITE_NS = 2_000_000_000
# A pair of hosts is slow if its parts take five times as long as those of pairs with which it shares one end.
_SLOW_FACTOR = 5
_MIN_WIRE_NS = 20_000_000
_MTU = 1500
_HEADERS = {4: 28, 6: 48}  # of IP and ICMP


@dataclass(frozen=True, slots=True)
class Interruption:
    """Two hosts of which one does not hear the other, although both answer kvctl.

    Attributes:
        source, target: what `source` sends does not arrive at `target`, as far as is known.
        one_way: whether packets in the other direction arrive; otherwise it is unknown.
        large_only: whether only large packets get lost.
        address: address of `target`, as `source` knows it; "" if unknown.
        reports: who hears whom no more.
    """

    source: str
    target: str
    one_way: bool
    large_only: bool
    address: str
    reports: tuple[Silence, ...]

    @property
    def subject(self) -> str:
        return pair(self.source, self.target)

    @property
    def cause(self) -> str:
        """What is lost on which way, and how that is known."""
        if self.large_only:
            return (
                f"{self.subject}: connections are opened, and what {self.source} then sends is not acknowledged: large "
                "packets are lost on the way, as where an MTU is too small"
            )
        if self.one_way:
            return (
                f"{self.subject}: packets of {self.source} do not arrive at {self.target}, and those of {self.target} "
                f"arrive at {self.source}, whose answers get lost"
            )
        return (
            f"{self.subject}: connections from {self.source} to {self.target} are not answered: its packets do not "
            "arrive, or a firewall drops those for the agents' ports"
        )

    @property
    def remedy(self) -> str:
        """The command that shows it, to be run on `source`."""
        if self.large_only:
            return too_large(self.source, self.address)
        return (
            f"`ping -c 3 {shlex.quote(self.address or self.target)}` on {self.source} shows whether the other host "
            "answers at all: if it does, "
            f"check the firewalls on the way from {self.source} to {self.target}, or else routes and cables"
        )


def too_large(host: str, address: str, mtu: int = _MTU, login: Sequence[str] = ()) -> str:
    """Returns the remedy for packets that are lost because of their size.

    Args:
        login: command line that runs a command on the sending host; without it the remedy names the host.
    """
    payload = mtu - _HEADERS[6 if ":" in address else 4]
    command = shlex.join([*login, "ping", "-c", "3", "-M", "do", "-s", str(payload), address])
    return (
        f"`{command}`{'' if login else f' on {host}'}: if it gets no answer while -s 500 "
        "does, the MTU on the way is smaller than that of the interface; "
        "set the interfaces to the smaller one, or let routers answer with "
        "ICMP (fragmentation needed)"
    )


def row_about(agent: Agent | None, peer: str) -> Row:
    """Returns what an agent reports about a peer."""
    return next((row for row in agent.peers if text(row, "peer") == peer), NO_ROW) if agent is not None else NO_ROW


def interruptions(snapshot: Snapshot) -> Sequence[Interruption]:
    """Returns the pairs of hosts between which agents have lost each other, though both ends answer kvctl."""
    found: dict[tuple[str, str], list[Silence]] = {}
    for name, reports in snapshot.once(silences).items():
        silent = snapshot.agents.get(name)
        if silent is None or silent.observes:
            continue
        for report in reports:
            hosts = text(snapshot.agents[report.agent].status, "host"), text(silent.status, "host")
            if all(hosts) and hosts[0] != hosts[1] and not report.closed and not report.error.endswith("has ended"):
                found.setdefault((min(hosts), max(hosts)), []).append(report)
    return [_interruption(snapshot, hosts, tuple(reports)) for hosts, reports in found.items()]


def _interruption(snapshot: Snapshot, hosts: tuple[str, str], reports: tuple[Silence, ...]) -> Interruption:
    """Decides from the kernels' connections which way packets get lost.

    A host with a half-open connection has got the first packet of the other, which has not got its answer. One whose
    connections are not answered may have lost either; half-open ones at the other end would show that they arrived.
    """
    half_open: set[str] = set()
    opening: set[str] = set()
    stalled: set[str] = set()
    address: dict[str, str] = {}
    views = {(report.agent, report.peer) for report in reports}
    for name, other in views | {(other, name) for name, other in views}:
        agent = snapshot.agents[name]
        row, host = row_about(agent, other), text(agent.status, "host")
        tcp = inner(row, "tcp")
        address.setdefault(host, text(row, "address"))
        half_open |= {host} if amount(tcp, "half_open") else set()
        opening |= {host} if amount(tcp, "opening") else set()
        stalled |= {host} if amount(tcp, "retransmits") >= 2 and amount(tcp, "unacknowledged_bytes") else set()
    first, second = hosts
    one_way = bool(half_open)
    large_only = not half_open and not opening and bool(stalled)
    for senders in (half_open, stalled if large_only else opening, opening, stalled):
        if senders:
            # Both ends, if connections are opened from both: no direction is known to work.
            first, second = (first, second) if first in senders else (second, first)
            break
    return Interruption(first, second, one_way, large_only, address.get(first, ""), reports)


def interrupted(snapshot: Snapshot) -> frozenset[tuple[str, str]]:
    """Returns the reports that `interruptions` explains, as (reporting agent, silent agent)."""
    found = snapshot.once(interruptions)
    return frozenset((report.agent, report.peer) for each in found for report in each.reports)


# ---- bytes that do not pass, while messages do ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stuck:
    """A writer whose writes to a peer do not end, with its row about the peer."""

    agent: Agent
    row: Row

    @property
    def tcp(self) -> Row:
        return inner(self.row, "tcp")


@health_code(
    "KV_DATA_BLOCKED",
    Severity.CRITICAL,
    "transport",
    sees="rooms between two hosts reach their deadlines, and all agents hear each other",
    means="Heartbeats and messages about rooms pass between two hosts, and the bytes of the rooms do not. The transfer "
    "engine has connections of its own: either they are not answered, because a firewall permits the control port "
    "only, or they are open and the same bytes are sent again and again, because packets of full size get lost. That "
    "happens where an MTU on the way is too small and the ICMP message about it is dropped: small packets pass. Rooms "
    "fail at their deadline, and their memory is kept until the writes have ended.",
    remedy="Permit the engine's ports between the hosts (UCX takes any free port), or correct the MTU.",
)
def data_blocked(snapshot: Snapshot) -> Iterator[Finding]:
    stuck: dict[tuple[str, str], list[_Stuck]] = {}
    for agent in snapshot.of_role("prefill"):
        source = text(agent.status, "host")
        for row in agent.peers:
            tcp, target = inner(row, "tcp"), text(row, "peer_host")
            blocked = amount(tcp, "opening") or amount(tcp, "retransmits") >= _MIN_RETRANSMITS
            lasts = text(row, "state") == "ready" and amount(row, "oldest_write_ns") >= _MIN_WRITE_NS
            if blocked and lasts and source and target and source != target:
                stuck.setdefault((source, target), []).append(_Stuck(agent, row))
    for (source, target), each in stuck.items():
        yield _blocked(source, target, each)


def _blocked(source: str, target: str, stuck: Sequence[_Stuck]) -> Finding:
    oldest = max(stuck, key=lambda each: amount(each.row, "oldest_write_ns"))
    tcp, address = oldest.tcp, text(oldest.row, "address")
    waits_ns = int(amount(oldest.row, "oldest_write_ns"))
    opening = max(amount(each.tcp, "opening") for each in stuck)
    unanswered = amount(tcp, "opening") > 0
    if unanswered:
        why = f"{counted(opening, 'connection')} to {target} got no answer: the port is filtered"
        remedy = (
            f"`ss -tn state syn-sent` on {source} shows the ports; permit TCP between the two hosts on all ports, or "
            "on those that the engine is configured to use"
        )
    else:
        why = (
            f"{size(amount(tcp, 'unacknowledged_bytes'))} were sent {amount(tcp, 'retransmits'):.0f} times again "
            "without an acknowledgement: large packets are lost, as where an MTU is too small, or the port is filtered"
        )
        remedy = too_large(source, address, _mtu(oldest.agent))
    names = [name for each in stuck for name in (each.agent.name, text(each.row, "peer"))]
    return data_blocked.finding(
        pair(source, target),
        agents=names,
        since_ns=waits_ns,
        weight=len(stuck),
        evidence={
            "address": address,
            "oldest_write_ns": waits_ns,
            "last_heard_ns": number(oldest.row, "last_heard_ns"),
            "rtt_ns": number(oldest.row, "rtt_ns"),
            "opening": int(opening),
            "retransmits": int(amount(tcp, "retransmits")),
            "unacknowledged_bytes": int(amount(tcp, "unacknowledged_bytes")),
        },
        cause=f"{pair(source, target)}: a write of {oldest.agent.name} to {text(oldest.row, 'peer')} has not ended for "
        f"{duration(waits_ns)}, while they hear each other; {why}",
        remedy=remedy,
    )


def _mtu(agent: Agent) -> int:
    """Returns the largest MTU of the interfaces of an agent's host that lead to other hosts."""
    found = [
        amount(row, "mtu")
        for row in rows(inner(agent.answer.data, "nics").get("nics"))
        if text(row, "kind") == "interface" and text(row, "link") != "loopback" and text(row, "state") != "down"
    ]
    return int(max(found, default=0)) or _MTU


# ---- slow pairs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlowPair:
    """Two hosts between which parts take long, compared with pairs that share the source or the target.

    Attributes:
        wire_ns: usual time of a part on the wire.
        others_ns: that of the pairs compared with.
    """

    source: str
    target: str
    wire_ns: float
    others_ns: float
    agents: tuple[str, ...]


def slow_pairs(snapshot: Snapshot) -> Sequence[SlowPair]:
    """Returns the pairs of hosts whose parts take five times as long as those of the pairs next to them."""
    times: dict[tuple[str, str], list[float]] = {}
    names: dict[tuple[str, str], list[str]] = {}
    for agent in snapshot.of_role("prefill"):
        for row in agent.peers:
            source, target, wire_ns = text(agent.status, "host"), text(row, "peer_host"), number(row, "wire_ns")
            if wire_ns is not None and source and target and source != target:
                times.setdefault((source, target), []).append(wire_ns)
                names.setdefault((source, target), []).extend((agent.name, text(row, "peer")))
    usual = {hosts: median(each) for hosts, each in times.items()}
    found = []
    for (source, target), wire_ns in usual.items():
        siblings = (
            [each for hosts, each in usual.items() if hosts[0] == source and hosts[1] != target],
            [each for hosts, each in usual.items() if hosts[1] == target and hosts[0] != source],
        )
        others_ns = min((median(each) for each in siblings if each), default=wire_ns)
        if wire_ns >= max(_MIN_WIRE_NS, _SLOW_FACTOR * others_ns):
            agents = tuple(dict.fromkeys(names[source, target]))
            found.append(SlowPair(source, target, wire_ns, others_ns, agents))
    return found


def host_of(snapshot: Snapshot, name: str) -> str:
    """Returns the host of an agent, which its peers know if it does not answer; "" if it is unknown."""
    if name in snapshot.agents:
        return text(snapshot.agents[name].status, "host")
    peers = (row_about(agent, name) for agent in snapshot.agents.values())
    return next((host for row in peers if (host := text(row, "peer_host"))), "")
