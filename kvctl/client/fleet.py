"""The agents that match what the user asked for, and what they answer: hello, protocol check and labels in one pass."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, cast

from kvctl.client.calls import Call
from kvctl.client.clock import ClockOffset, estimate
from kvctl.client.endpoints import Discovery, Endpoint, discover, matches
from kvctl.client.fanout import Fanout, Reply
from kvctl.client.faults import SILENT, Fault, FaultCode
from kvctl.client.keys import NO_KEYS, KeyNames
from kvctl_agent.contract.admin import PROTOCOL_MAX, PROTOCOL_MIN, ErrorCode
from kvctl_agent.contract.snapshots import Hello

_HELLO = Call("hello")
_STATUS = Call("status")
FINISHED = ("history", "slow", "failed")
"""Commands that tell of finished rooms, some of the same ones."""


@dataclass(slots=True)
class AgentAnswer:
    """One agent that greeted us in a protocol we speak.

    Attributes:
        rtt_ns: shortest round trip of a hello.
        data: answers by command name; a command that the agent refused is missing here and named in the faults.
    """

    endpoint: Endpoint
    hello: Hello
    rtt_ns: int
    clock: ClockOffset
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.hello["name"]


@dataclass(slots=True)
class Survey:
    """What a question to the fleet brought.

    Attributes:
        agents: those that answered hello and match the labels, by name.
        faults: everything that kept an agent from answering.
        filtered: agents that answered but do not match the labels.
        at_ns: our wall clock when they answered.
        tick_ns: a clock for the time between two surveys: monotonic, or that of the file which was asked.
        remarks: what is to be known of all the answers, in words.
    """

    discovery: Discovery
    agents: list[AgentAnswer] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    filtered: int = 0
    at_ns: int = field(default_factory=time.time_ns)
    tick_ns: int = field(default_factory=time.monotonic_ns)
    remarks: list[str] = field(default_factory=list)

    def answers(self, command: str) -> list[tuple[AgentAnswer, Any]]:
        """(agent, data) of every agent that answered `command`."""
        return [(agent, agent.data[command]) for agent in self.agents if command in agent.data]

    def set_unknown_rooms_aside(self) -> int:
        """Forgets faults that say only "that room is not mine", which is an answer; returns how many."""
        real = [fault for fault in self.faults if fault.code != ErrorCode.UNKNOWN_ROOM]
        aside = len(self.faults) - len(real)
        self.faults = real
        return aside


def room_rows(data: Mapping[str, Any], command: str) -> Sequence[Any]:
    """Rows of rooms in an agent's answer to `command`; none where it did not answer it."""
    found = data.get(command, ())
    rows: Sequence[Any] = found["rooms"] if isinstance(found, Mapping) else found
    return rows


Ask = Callable[[Sequence[tuple[Endpoint, Call]]], list[Reply]]


class Fleet:
    """Asks the agents that match `endpoints` and `labels`; a context manager that owns the sockets.

    Args:
        endpoints: what `-e` said; empty means every agent of this machine's socket directory.
        labels: role, instance coordinates (dp, pp, cp, tp, unique), name or version, all of which must match.
        timeout_ns: how long an agent may take to answer.
        keys: for agents on other machines.
    """

    def __init__(
        self, endpoints: Sequence[str], labels: Mapping[str, str], timeout_ns: int, keys: KeyNames = NO_KEYS
    ) -> None:
        self._endpoints = endpoints
        self._labels = labels
        self._timeout_ns = timeout_ns
        self._fanout = Fanout(keys)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._fanout.__exit__(kind, error, at)

    def survey(self, calls: Sequence[Call] = (), clock_rounds: int = 1) -> Survey:
        """Finds the agents and asks each of them `calls`.

        Args:
            calls: commands, each at most once.
            clock_rounds: hellos per agent; the first pays for the connection, so clocks want more than one.
        """
        survey = gather(discover(self._endpoints), calls, self._labels, self.ask)
        for _ in range(clock_rounds - 1):
            self._sharpen(survey.agents)
        survey.at_ns, survey.tick_ns = time.time_ns(), time.monotonic_ns()
        return survey

    def advance(self) -> bool:
        """True: a living fleet goes on by itself."""
        return True

    def ask(self, requests: Sequence[tuple[Endpoint, Call]]) -> list[Reply]:
        """Asks agents that were discovered, each what concerns it alone; a reply per request, in their order."""
        replies = self._fanout.ask(requests, self._timeout_ns)
        for reply in replies:
            if reply.call == _HELLO and reply.fault is not None and reply.fault.code in SILENT:
                self._fanout.forget(reply.endpoint)
        return replies

    def _sharpen(self, agents: Sequence[AgentAnswer]) -> None:
        by_endpoint = {agent.endpoint: agent for agent in agents}
        for reply in self.ask([(endpoint, _HELLO) for endpoint in by_endpoint]):
            agent = by_endpoint[reply.endpoint]
            if reply.fault is None and reply.rtt_ns < agent.rtt_ns:
                agent.rtt_ns = reply.rtt_ns
                agent.clock = estimate(reply.sent_at_ns, reply.received_at_ns, reply.data["now_ns"])


def gather(found: Discovery, calls: Sequence[Call], labels: Mapping[str, str], ask: Ask) -> Survey:
    """Asks the live agents of `found`; keeps those that answer hello in a protocol we speak and match the labels."""
    survey = Survey(found, faults=list(found.faults))
    asked = [_HELLO, *([_STATUS] if labels and _STATUS not in calls else []), *calls]
    by_endpoint: dict[Endpoint, list[Reply]] = {}
    for reply in ask([(endpoint, call) for endpoint in found.live for call in asked]):
        by_endpoint.setdefault(reply.endpoint, []).append(reply)
    for endpoint, replies in by_endpoint.items():
        _admit(endpoint, replies, labels, survey)
    tell_apart(survey.agents)
    survey.agents.sort(key=lambda agent: agent.name)
    return survey


def _admit(endpoint: Endpoint, replies: Sequence[Reply], labels: Mapping[str, str], survey: Survey) -> None:
    hello, *others = replies
    fault = hello.fault or _protocol_fault(endpoint, hello.data)
    if fault is not None:
        survey.faults.append(fault)
        return
    greeting = cast(Hello, hello.data)
    clock = estimate(hello.sent_at_ns, hello.received_at_ns, greeting["now_ns"])
    agent = AgentAnswer(endpoint, greeting, hello.rtt_ns, clock)
    agent.data.update((reply.call.command, reply.data) for reply in others if reply.fault is None)
    if labels:
        status = agent.data.get(_STATUS.command)
        if status is None:
            survey.faults.extend(reply.fault for reply in others if reply.fault and reply.call == _STATUS)
            return
        if not matches(labels, status):
            survey.filtered += 1
            return
    survey.faults.extend(reply.fault for reply in others if reply.fault is not None)
    survey.agents.append(agent)


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
    return Fault(endpoint.name, FaultCode.PROTOCOL, "its hello is not one that this kvctl understands")


_DIGITS = 6
"""Of the incarnation, the last ones: the first are the time of the start, which twins nearly share."""


def tell_apart(agents: Sequence[AgentAnswer]) -> None:
    """Renames agents whose name another one has, too, to `decode-0#487f51`, by the end of the incarnation.

    Rows of their own answers follow, and what the peers of all agents are called where the incarnation says which.
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
    """The answers that are objects, and the objects in their lists."""
    for answer in answers:
        if isinstance(answer, dict):
            yield answer
        for value in answer.values() if isinstance(answer, dict) else [answer]:
            if isinstance(value, list):
                yield from (row for row in value if isinstance(row, dict))


class Source(Protocol):
    """Answers surveys: a live `Fleet`, or a recording; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def survey(self, calls: Sequence[Call] = (), clock_rounds: int = 1) -> Survey:
        """What its agents answer to `calls`, each at most once."""
        ...

    def advance(self) -> bool:
        """Goes on to the next moment; False where there is none. A live fleet goes on by itself."""
        ...
