"""Queries the agents that the user selected: hello, protocol check, label filter and commands in one pass."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, cast

from kvctl.client.calls import Call
from kvctl.client.clock import ClockOffset, estimate
from kvctl.client.discovery.source import AgentSources
from kvctl.client.endpoints import Discovery, Endpoint, address_host, discover, matches
from kvctl.client.fanout import Fanout, Reply
from kvctl.client.faults import SILENT, Fault, FaultCode
from kvctl.client.keys import NO_KEYS, KeyNames
from kvctl_agent.contract.admin import PROTOCOL_MAX, PROTOCOL_MIN, ErrorCode
from kvctl_agent.contract.snapshots import Hello

_HELLO = Call("hello")
_STATUS = Call("status")
FINISHED = ("history", "slow", "failed")
"""Commands that list finished rooms; their lists overlap."""


@dataclass(slots=True)
class AgentAnswer:
    """Answers of one agent with a compatible admin protocol.

    Attributes:
        hello: the answer to `hello`.
        rtt_ns: shortest round trip of a hello.
        clock: offset of the agent's wall clock.
        data: answers by command name; commands that failed are in `Survey.faults` instead.
    """

    endpoint: Endpoint
    hello: Hello
    rtt_ns: int
    clock: ClockOffset
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.hello["name"]

    @property
    def host(self) -> str:
        """Name of its host; of an older agent, which does not tell it, the host in its address, or ""."""
        return self.hello.get("host") or self.endpoint.host


@dataclass(slots=True)
class Survey:
    """Result of querying the fleet.

    Attributes:
        discovery: endpoints that were found.
        agents: agents that answered hello and match the labels, by name.
        faults: why agents did not answer, and why commands failed.
        filtered: number of agents that answered and do not match the labels.
        hosts: names of the hosts of agents, also of silent ones, by the name of the agent; see `known_hosts`.
        at_ns: local wall clock when the agents answered.
        tick_ns: clock from which to compute the time between two surveys: monotonic, or the time of the recorded
            snapshot.
        remarks: sentences about the answers, for the user.
    """

    discovery: Discovery
    agents: list[AgentAnswer] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    filtered: int = 0
    hosts: dict[str, str] = field(default_factory=dict)
    at_ns: int = field(default_factory=time.time_ns)
    tick_ns: int = field(default_factory=time.monotonic_ns)
    remarks: list[str] = field(default_factory=list)

    def answers(self, command: str) -> list[tuple[AgentAnswer, Any]]:
        """Returns every agent that answered `command`, paired with its answer."""
        return [(agent, agent.data[command]) for agent in self.agents if command in agent.data]

    def host_of(self, agent: str) -> str:
        """Returns the host of an agent that was found, by its name; "" if it is unknown."""
        return self.hosts.get(agent, "")

    def drop_unknown_room_faults(self) -> int:
        """Removes the faults of agents that do not know the requested room; returns how many were removed."""
        real = [fault for fault in self.faults if fault.code != ErrorCode.UNKNOWN_ROOM]
        removed = len(self.faults) - len(real)
        self.faults = real
        return removed


def room_rows(data: Mapping[str, Any], command: str) -> Sequence[Any]:
    """Returns the room rows of an agent's answer to `command`, a command that lists rooms; () without an answer.

    `data` has the agent's answers by command.
    """
    found = data.get(command, ())
    rows: Sequence[Any] = found["rooms"] if isinstance(found, Mapping) else found
    return rows


Ask = Callable[[Sequence[tuple[Endpoint, Call]]], list[Reply]]


class Fleet:
    """Queries the agents that match `endpoints` and `labels`; a context manager that owns the sockets.

    Args:
        endpoints: values of `-e`; empty means every agent of the socket directory.
        labels: role, instance coordinates (dp, pp, cp, tp, unique), name, host, version or device; all must match.
        timeout_ns: longest time to wait for the answers to one batch of requests; may be changed later.
        keys: keys for agents on TCP.
        discovery_ns: time for which surveys reuse the discovered agents and their answers to `hello`, unless a survey
            has a fault or no agent. Discovery connects to each agent, so ten surveys a second cost a busy fleet twice
            as much with it.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        labels: Mapping[str, str],
        timeout_ns: int,
        keys: KeyNames = NO_KEYS,
        discovery_ns: int = 0,
    ) -> None:
        self._endpoints = endpoints
        self._labels = labels
        self.timeout_ns = timeout_ns
        self._fanout = Fanout(keys)
        self._discovery_ns = discovery_ns
        self._discovery_due_ns = 0
        self._hellos: dict[Endpoint, Reply] = {}
        self._sources = AgentSources(keys, timeout_ns)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._sources.close()
        self._fanout.__exit__(kind, error, at)

    def survey(self, calls: Sequence[Call] = (), clock_rounds: int = 1) -> Survey:
        """Discovers the agents, sends `calls` to each of them and returns the answers.

        Args:
            calls: commands, each at most once.
            clock_rounds: number of hellos per agent; the first includes the time to connect, so a precise clock offset
                needs several.
        """
        now = time.monotonic_ns()
        if now >= self._discovery_due_ns:
            self._found, self._hellos = discover(self._endpoints, self._sources), {}
            self._discovery_due_ns = now + self._discovery_ns
        survey = gather(self._found, calls, self._labels, self.ask, self._hellos)
        if survey.faults or not survey.agents:
            self._discovery_due_ns = 0
        for _ in range(clock_rounds - 1):
            self._refine_clocks(survey.agents)
        survey.at_ns, survey.tick_ns = time.time_ns(), time.monotonic_ns()
        return survey

    def advance(self) -> bool:
        """Does nothing and returns True, because a live fleet advances by itself."""
        return True

    def ask(self, requests: Sequence[tuple[Endpoint, Call]]) -> list[Reply]:
        """Sends requests to discovered agents; returns one reply per request, in the order of the requests."""
        replies = self._fanout.ask(requests, self.timeout_ns)
        for reply in replies:
            if reply.call == _HELLO and reply.fault is not None and reply.fault.code in SILENT:
                self._fanout.forget(reply.endpoint)
        return replies

    def _refine_clocks(self, agents: Sequence[AgentAnswer]) -> None:
        by_endpoint = {agent.endpoint: agent for agent in agents}
        for reply in self.ask([(endpoint, _HELLO) for endpoint in by_endpoint]):
            agent = by_endpoint[reply.endpoint]
            if reply.fault is None and reply.rtt_ns < agent.rtt_ns:
                agent.rtt_ns = reply.rtt_ns
                agent.clock = estimate(reply.sent_at_ns, reply.received_at_ns, reply.data["now_ns"])


def gather(
    found: Discovery, calls: Sequence[Call], labels: Mapping[str, str], ask: Ask, hellos: dict[Endpoint, Reply]
) -> Survey:
    """Queries the live agents of `found`, and returns those with a compatible protocol that match the labels.

    Args:
        found: result of the discovery.
        calls: commands to send, each at most once.
        labels: labels that an agent must have.
        ask: sends requests and returns one reply per request, in their order.
        hellos: replies to `hello` to use; those of other agents are requested and added.
    """
    survey = Survey(found, faults=list(found.faults))
    asked = [*([_STATUS] if labels and _STATUS not in calls else []), *calls]
    requests = [
        (endpoint, call) for endpoint in found.live for call in (asked if endpoint in hellos else (_HELLO, *asked))
    ]
    by_endpoint: dict[Endpoint, list[Reply]] = {endpoint: [] for endpoint in found.live}
    for reply in ask(requests):
        if reply.call == _HELLO:
            hellos[reply.endpoint] = reply
        else:
            by_endpoint[reply.endpoint].append(reply)
    for endpoint, replies in by_endpoint.items():
        _add_agent(endpoint, hellos[endpoint], replies, labels, survey)
    rename_duplicates(survey.agents)
    survey.agents.sort(key=lambda agent: agent.name)
    survey.hosts = known_hosts(survey)
    return survey


def known_hosts(survey: Survey) -> dict[str, str]:
    """Returns the hosts of all agents that were found, by the agent's name.

    The host of an agent that does not answer is that of agents with the same address, else the one that its peers
    report for this address, else the address. On Unix sockets it is the host of the other agents there.
    """
    found = {agent.name: agent.host for agent in survey.agents}
    endpoints = {*survey.discovery.live, *survey.discovery.stale, *survey.discovery.stopped}
    silent = endpoints - {agent.endpoint for agent in survey.agents}
    if not silent:
        return found
    by_address: dict[str, str] = {}
    for row in _rows(agent.data.get("peers") for agent in survey.agents):
        if row.get("peer_host"):
            by_address.setdefault(address_host(str(row.get("endpoint"))), str(row["peer_host"]))
    by_address |= {agent.endpoint.host: agent.host for agent in survey.agents}
    for endpoint in silent:
        found.setdefault(endpoint.name, by_address.get(endpoint.host) or endpoint.host)
    return found


def _add_agent(
    endpoint: Endpoint, hello: Reply, others: Sequence[Reply], labels: Mapping[str, str], survey: Survey
) -> None:
    fault = hello.fault or _protocol_fault(endpoint, hello.data)
    if fault is not None:
        survey.faults.append(fault)
        return
    answer = cast(Hello, hello.data)
    clock = estimate(hello.sent_at_ns, hello.received_at_ns, answer["now_ns"])
    agent = AgentAnswer(endpoint, answer, hello.rtt_ns, clock)
    agent.data.update((reply.call.command, reply.data) for reply in others if reply.fault is None)
    if labels:
        status = agent.data.get(_STATUS.command)
        if status is None:
            survey.faults.extend(reply.fault for reply in others if reply.fault and reply.call == _STATUS)
            return
        if not matches(labels, status):
            survey.filtered += 1
            return
    survey.faults.extend(reply.fault for reply in others if reply.fault is not None and not _excused(reply))
    survey.agents.append(agent)


def _excused(reply: Reply) -> bool:
    lacking = {ErrorCode.UNKNOWN_COMMAND, FaultCode.NOT_CAPTURED}
    return reply.call.optional and reply.fault is not None and reply.fault.code in lacking


def _protocol_fault(endpoint: Endpoint, hello: Any) -> Fault | None:
    match hello:
        case {"protocol": [int(lowest), int(highest)], "name": str(), "now_ns": int()}:
            if lowest <= PROTOCOL_MAX and highest >= PROTOCOL_MIN:
                return None
            older = "kvctl" if lowest > PROTOCOL_MAX else "the agent"
            text = (
                f"serves admin protocol {lowest} to {highest}, this kvctl speaks {PROTOCOL_MIN} to {PROTOCOL_MAX}: "
                f"update {older}"
            )
            return Fault(endpoint.name, FaultCode.PROTOCOL, text)
    return Fault(endpoint.name, FaultCode.PROTOCOL, "its answer to hello is not valid")


_DIGITS = 6
"""Number of last digits of the incarnation that distinguish agents; its first digits are the start time."""


def rename_duplicates(agents: Sequence[AgentAnswer]) -> None:
    """Appends the last digits of the incarnation to the names of agents with equal names: `decode-0#487f51`.

    The new name is also used in the rows of the agent's own answers, and in rows of other agents that name it as a peer
    with a matching incarnation.
    """
    names = Counter(agent.name for agent in agents)
    renamed: dict[tuple[str, str], str] = {}
    for agent in agents:
        name, incarnation = agent.name, agent.hello["incarnation"]
        if names[name] > 1:
            new = renamed[name, incarnation] = f"{name}#{incarnation[-_DIGITS:]}"
            agent.hello = {**agent.hello, "name": new}
            for row in _rows(agent.data.values()):
                for key in ("agent", "name"):
                    if row.get(key) == name:
                        row[key] = new
    for agent in agents if renamed else ():
        for row in _rows([agent.data.get("peers")]):
            if renaming := renamed.get((str(row.get("peer")), str(row.get("incarnation")))):
                row["peer"] = renaming


def _rows(answers: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows in answers: an answer that is an object itself, and the objects in its lists."""
    for answer in answers:
        if isinstance(answer, dict):
            yield answer
        for value in answer.values() if isinstance(answer, dict) else [answer]:
            if isinstance(value, list):
                yield from (row for row in value if isinstance(row, dict))


class Source(Protocol):
    """Interface of what can be queried: a live `Fleet` or a `RecordingSource`; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def survey(self, calls: Sequence[Call] = (), clock_rounds: int = 1) -> Survey:
        """Returns the answers of the agents to `calls`, which has each command at most once."""
        ...

    def advance(self) -> bool:
        """Goes to the next snapshot; returns False if there is none. A live fleet advances by itself."""
        ...
