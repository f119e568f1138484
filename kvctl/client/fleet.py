"""Queries the agents that the user selected: hello, protocol check, label filter and commands in one pass."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

from kvctl.client.calls import Call
from kvctl.client.clock import ClockOffset, estimate, shared
from kvctl.client.discovery.source import AgentSources, ago
from kvctl.client.endpoints import Discovery, Endpoint, discover, is_address, matches
from kvctl.client.fanout import LONGEST_PAUSE_NS, SHORTEST_PAUSE_NS, Fanout, Reply
from kvctl.client.faults import SILENT, Fault, FaultCode
from kvctl.client.health_reads import BRIEF, BRIEF_ABOVE, HEALTH_CALLS, expand, rows_of
from kvctl.client.keys import NO_KEYS, KeyNames
from kvctl.client.names import few_commas, matches_name, replaced_by, told_apart
from kvctl.client.observer import restart_observer
from kvctl.client.renaming import Identity, Renaming, mentioned, peer_names
from kvctl_agent.contract.addresses import host_of
from kvctl_agent.contract.admin import PROTOCOL_MAX, PROTOCOL_MIN, ErrorCode, socket_dir
from kvctl_agent.contract.values import near

if TYPE_CHECKING:
    from kvctl.client.metrics.reader import MetricsReader
    from kvctl_agent.contract.snapshots import Hello

_HELLO = Call("hello")
_STATUS = Call("status")
_PEERS = Call("peers")
_METRICS_COMMANDS = frozenset({"status", "metrics"})  # that an engine's metrics answer
_AT_ONCE = 16
FINISHED = ("history", "slow", "failed")
"""Commands that list finished rooms; their lists overlap."""


@dataclass(slots=True)
class AgentAnswer:
    """Answers of one agent with a compatible admin protocol.

    Attributes:
        rtt_ns: shortest round trip of a hello.
        data: answers by command name; commands that failed are in `Survey.faults` instead.
    """

    endpoint: Endpoint
    hello: Hello
    rtt_ns: int
    clock: ClockOffset
    data: dict[str, Any] = field(default_factory=dict)
    own_name: str = field(init=False)

    def __post_init__(self) -> None:
        self.own_name = self.hello["name"]

    def without_answers(self) -> AgentAnswer:
        """Returns the agent as its answer to `hello` describes it."""
        return AgentAnswer(self.endpoint, self.hello, self.rtt_ns, self.clock)

    @property
    def name(self) -> str:
        return self.hello["name"]

    @property
    def ended_ns(self) -> int | None:
        """Time since its process ended, for which an observer answers with what it left; None: it has not ended."""
        age_ns = self.hello.get("ended_age_ns")
        return age_ns if isinstance(age_ns, int) else None

    @property
    def process(self) -> tuple[str, str, int, str]:
        """What is the same at all addresses of this agent, and differs from any other."""
        return self.own_name, self.host, self.hello["pid"], self.hello["incarnation"]

    @property
    def life(self) -> tuple[str, str]:
        """Name and incarnation: the same when its process has ended and another agent has its name."""
        return replaced_by(self.name) or self.name, self.hello["incarnation"]

    @property
    def host(self) -> str:
        """Name of its host; of an older agent, which does not tell it, the host in its address, or ""."""
        return self.hello.get("host") or self.endpoint.host


@dataclass(slots=True)
class Survey:
    """Result of querying the fleet.

    Attributes:
        agents: agents that answered hello and match the labels, by name.
        faults: why agents did not answer, and why commands failed.
        filtered: number of agents that answered and do not match the labels.
        hosts: names of the hosts of agents, also of silent ones, by the name of the agent; see `_known_hosts`.
        unusable: faults of the endpoints that did not answer `hello` or have another protocol; also in `faults`.
        tick_ns: clock from which to compute the time between two surveys: monotonic, or the time of the recorded
            snapshot.
        remarks: sentences about the answers, for the user.
    """

    discovery: Discovery
    agents: list[AgentAnswer] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    filtered: int = 0
    hosts: dict[str, str] = field(default_factory=dict)
    unusable: dict[Endpoint, Fault] = field(default_factory=dict)
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


_ENDED_SHOWN = 4
_DISCOVERY_REST = 100
_CHEAP_DISCOVERY_NS = 10_000_000
_PROBE_NS = 300_000_000
_RESTART_PAUSE_NS = 10_000_000_000

Ask = Callable[[Sequence[tuple[Endpoint, Call]]], list[Reply]]


class _Silence(NamedTuple):
    """An agent that did not answer: its fault, and when and after which pause it is asked again."""

    fault: Fault
    due_ns: int
    pause_ns: int


class Fleet:
    """Queries the agents that match `endpoints` and `labels`; a context manager that owns the sockets.

    Args:
        endpoints: values of `-e`; empty means every agent of the socket directory.
        labels: role, instance coordinates (dp, pp, cp, tp, unique), name, host, version or device; all must match.
        timeout_ns: longest time to wait for the answers to one batch of requests; may be changed later.
        discovery_ns: time for which surveys reuse the discovered agents and their answers to `hello`, unless a survey
            has a fault or no agent; longer where discovery takes long. Discovery connects to each agent, so ten surveys
            a second cost a busy fleet twice as much with it. Silent agents are asked again after growing pauses.
        names: names or globs, of which an agent must match one; empty for all agents at `endpoints`.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        labels: Mapping[str, str],
        timeout_ns: int,
        keys: KeyNames = NO_KEYS,
        discovery_ns: int = 0,
        names: Sequence[str] = (),
    ) -> None:
        self._endpoints = endpoints
        self._labels = labels
        self._names = names
        self.timeout_ns = timeout_ns
        self._fanout = Fanout(keys)
        self._metrics: MetricsReader | None = None
        self._discovery_ns = discovery_ns
        self._discovery_due_ns = self._earliest_discovery_ns = 0
        self._silences: dict[Endpoint, _Silence] = {}
        self._restart_due_ns = 0  # of the observer of this host, if it was killed
        self._hellos: dict[Endpoint, AgentAnswer | Fault] = {}
        self._sources = AgentSources(keys, timeout_ns)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self._sources.close()
        self._fanout.__exit__()

    def survey(self, calls: Sequence[Call] = (), clock_rounds: int = 1) -> Survey:
        """Discovers the agents, sends `calls` to each of them and returns the answers.

        Args:
            calls: commands, each at most once. The answers to `HEALTH_CALLS` of a large fleet lack what is in order, as
                `health_reads` describes.
            clock_rounds: number of hellos per agent; the first includes the time to connect, so a precise clock offset
                needs several.
        """
        now = time.monotonic_ns()
        if now >= self._discovery_due_ns:
            self._discover(now)
        backed_off = self._backed_off(now) if self._discovery_ns else {}
        asked_at_all = len(self._found.live) - len(backed_off)
        large = tuple(calls[: len(HEALTH_CALLS)]) == HEALTH_CALLS and asked_at_all > BRIEF_ABOVE
        asked = (BRIEF, *calls[len(HEALTH_CALLS) :]) if large else calls
        survey = gather(self._found, asked, self._labels, self.ask, self._hellos, self._names, backed_off)
        if len(survey.faults) > len(backed_off.keys() & survey.unusable.keys()) or not survey.agents:
            self._discovery_due_ns = self._earliest_discovery_ns
        for _ in range(clock_rounds - 1):
            self._refine_clocks(survey.agents)
            share_clocks(survey.agents)
        survey.at_ns, survey.tick_ns = time.time_ns(), time.monotonic_ns()
        return survey

    def _discover(self, now: int) -> None:
        """Discovers the agents; where that takes long, as in large fleets, it takes at most a hundredth of a core."""
        began = time.thread_time_ns()
        local = not self._endpoints or not all(map(is_address, self._endpoints))
        if local and now >= self._restart_due_ns:
            self._restart_due_ns = now + _RESTART_PAUSE_NS
            restart_observer(socket_dir())
        use_observer = partial(self._fanout.use_observer, timeout_ns=self.timeout_ns)
        self._found, self._hellos = discover(self._endpoints, self._sources, use_observer), {}
        cost_ns = time.thread_time_ns() - began
        rest = cost_ns * _DISCOVERY_REST if self._discovery_ns and cost_ns > _CHEAP_DISCOVERY_NS else 0
        self._earliest_discovery_ns = now + rest
        self._discovery_due_ns = now + max(self._discovery_ns, rest)

    def _backed_off(self, now: int) -> dict[Endpoint, Fault]:
        """Returns the agents that are left out of a survey because they were silent, with their faults.

        Agents whose pause is over are asked for hello with a short time limit; if one answers, it takes part again.
        Otherwise its pause is doubled, so that a silent agent does not cost every survey a time limit.
        """
        live = set(self._found.live)
        self._silences = {endpoint: each for endpoint, each in self._silences.items() if endpoint in live}
        due = [endpoint for endpoint, each in self._silences.items() if now >= each.due_ns]
        for reply in self._ask([(endpoint, _HELLO) for endpoint in due], min(_PROBE_NS, self.timeout_ns)):
            if reply.fault is None or reply.fault.code not in SILENT:
                del self._silences[reply.endpoint]
                self._hellos.pop(reply.endpoint, None)
            else:
                pause_ns = min(2 * self._silences[reply.endpoint].pause_ns, LONGEST_PAUSE_NS)
                fault = self._silences[reply.endpoint].fault
                self._silences[reply.endpoint] = _Silence(fault, time.monotonic_ns() + pause_ns, pause_ns)
                self._fanout.forget(reply.endpoint)
        return {endpoint: each.fault for endpoint, each in self._silences.items()}

    def advance(self) -> bool:
        """Does nothing and returns True, because a live fleet advances by itself."""
        return True

    def ask(self, requests: Sequence[tuple[Endpoint, Call]]) -> list[Reply]:
        """Sends requests to discovered agents; returns one reply per request, in the order of the requests."""
        replies = self._ask(requests, self.timeout_ns)
        for reply in replies:
            if reply.fault is not None and reply.fault.code in SILENT:
                due_ns = time.monotonic_ns() + SHORTEST_PAUSE_NS
                self._silences[reply.endpoint] = _Silence(reply.fault, due_ns, SHORTEST_PAUSE_NS)
                if reply.call == _HELLO:
                    self._fanout.forget(reply.endpoint)
        return replies

    def _ask(self, requests: Sequence[tuple[Endpoint, Call]], timeout_ns: int) -> list[Reply]:
        """Sends requests to agents, and reads the metrics of engines without one; as for `ask`."""
        agents = [request for request in requests if not request[0].metrics]
        if len(agents) == len(requests):
            return self._fanout.ask(requests, timeout_ns)
        if self._metrics is None:
            from kvctl.client.metrics.reader import MetricsReader  # imports a parser, which agents do not need

            self._metrics = MetricsReader()
        with self._metrics.asking([request for request in requests if request[0].metrics], timeout_ns) as replies:
            answered = iter(self._fanout.ask(agents, timeout_ns))
            read = iter(replies())
        return [next(read) if endpoint.metrics else next(answered) for endpoint, _ in requests]

    def _refine_clocks(self, agents: Sequence[AgentAnswer]) -> None:
        """Measures the clocks again, of many agents one per host; few at a time, because answers delay each other."""
        chosen: dict[str, AgentAnswer] = {}
        for agent in agents:
            key = (len(agents) > _AT_ONCE and agent.host) or agent.endpoint.address
            if key not in chosen or agent.clock.error_ns < chosen[key].clock.error_ns:
                chosen[key] = agent
        measured = list(chosen.values())
        for first in range(0, len(measured), _AT_ONCE):
            by_endpoint = {agent.endpoint: agent for agent in measured[first : first + _AT_ONCE]}
            for reply in self.ask([(endpoint, _HELLO) for endpoint in by_endpoint]):
                agent = by_endpoint[reply.endpoint]
                if reply.fault is None and reply.rtt_ns < agent.rtt_ns:
                    agent.rtt_ns = reply.rtt_ns
                    agent.clock = estimate(reply.sent_at_ns, reply.received_at_ns, reply.data["now_ns"])


def gather(
    found: Discovery,
    calls: Sequence[Call],
    labels: Mapping[str, str],
    ask: Ask,
    hellos: dict[Endpoint, AgentAnswer | Fault],
    names: Sequence[str] = (),
    silent: Mapping[Endpoint, Fault] | None = None,
) -> Survey:
    """Queries the live agents of `found`, and returns those with a compatible protocol that match labels and names.

    Args:
        calls: commands to send, each at most once.
        hellos: agents by their answer to `hello`, or the faults; those of other endpoints are requested and added.
        names: names or globs, of which an agent must match one; empty for all agents.
        silent: live agents that are not to be asked, with their faults.
    """
    survey = Survey(found, faults=list(found.faults), unusable=dict(silent or {}))
    live = [endpoint for endpoint in found.live if endpoint not in survey.unusable]
    asked = [*([_STATUS] if labels and _STATUS not in calls else []), *calls]
    if names:
        unknown = [(endpoint, _HELLO) for endpoint in live if endpoint not in hellos]
        hellos.update((reply.endpoint, _agent(reply)) for reply in ask(unknown))
        endpoints, unnamed = _named(live, hellos, names, survey)
        survey.unusable.clear()  # whose names are unknown
    else:
        endpoints, unnamed = live, []
    requests = [
        (endpoint, call) for endpoint in endpoints for call in (asked if endpoint in hellos else (_HELLO, *asked))
    ]
    by_endpoint: dict[Endpoint, list[Reply]] = {endpoint: [] for endpoint in endpoints}
    for reply in ask(requests):
        if reply.call == _HELLO:
            hellos[reply.endpoint] = _agent(reply)
        else:
            by_endpoint[reply.endpoint].append(reply)
    filtered, faults = unnamed, {}
    processes = set()
    for endpoint, replies in by_endpoint.items():
        known = hellos[endpoint]
        if isinstance(known, Fault):
            survey.unusable[endpoint] = known
            continue
        agent = known.without_answers()
        if agent.process in processes:
            continue  # one that sources name by several addresses
        processes.add(agent.process)
        agent.data.update((reply.call.command, reply.data) for reply in replies if reply.fault is None)
        faults[endpoint] = [reply.fault for reply in replies if reply.fault is not None and not _excused(reply, calls)]
        if not labels:
            survey.agents.append(agent)
        elif _STATUS.command not in agent.data:
            survey.faults.extend(reply.fault for reply in replies if reply.fault and reply.call == _STATUS)
        elif matches(labels, agent.data[_STATUS.command]):
            survey.agents.append(agent)
        else:
            filtered.append(agent)
            survey.filtered += 1
    if BRIEF in calls:
        for reply in expand(survey, ask):
            faults[reply.endpoint] += [] if reply.fault is None else [reply.fault]
    _name_ended([*survey.agents, *filtered])
    rename_duplicates(survey.agents, ask, filtered)
    _name_unusable(survey, filtered)
    for agent in survey.agents:
        survey.faults += [replace(fault, agent=agent.name) for fault in dict.fromkeys(faults[agent.endpoint])]
    survey.agents.sort(key=lambda agent: agent.name)
    survey.remarks += _ended_remark(survey.agents)
    survey.hosts = _known_hosts(survey)
    share_clocks(survey.agents)
    return survey


def _name_ended(agents: Sequence[AgentAnswer]) -> None:
    """Calls agents that have ended, and whose name another agent has now, as their sockets are called."""
    for agent in agents:
        if agent.ended_ns is not None and agent.endpoint.path is not None and agent.endpoint.name != agent.own_name:
            names = {agent.own_name: agent.endpoint.name}
            renaming = Renaming(names.keys(), names.__getitem__)
            agent.hello = {**agent.hello, "name": agent.endpoint.name}
            agent.own_name = agent.endpoint.name
            agent.data = {command: renaming.answer(command, data) for command, data in agent.data.items()}


def _ended_remark(agents: Sequence[AgentAnswer]) -> list[str]:
    """Returns a sentence about the agents that have ended, whose answers describe their end; [] without any."""
    ended = [f"{agent.name} ended {ago(agent.ended_ns)} ago" for agent in agents if agent.ended_ns is not None]
    them = "it" if len(ended) == 1 else "them"
    return [f"{few_commas(ended, _ENDED_SHOWN)}: what is shown of {them} is as of then"] if ended else []


def share_clocks(agents: Sequence[AgentAnswer]) -> None:
    """Gives agents of one host the most precise measurement of its clock."""
    for agent, clock in zip(agents, shared([(agent.host, agent.clock) for agent in agents]), strict=True):
        agent.clock = clock


def _named(
    live: Sequence[Endpoint], hellos: Mapping[Endpoint, AgentAnswer | Fault], names: Sequence[str], survey: Survey
) -> tuple[list[Endpoint], list[AgentAnswer]]:
    """Divides agents into the endpoints of those that match one of `names`, and the others.

    Adds a fault for each name that no agent matches.
    """
    answered = [known.without_answers() for endpoint in live if isinstance(known := hellos[endpoint], AgentAnswer)]
    agents = list({agent.process: agent for agent in reversed(answered)}.values())[::-1]
    _name_ended(agents)
    rename_duplicates(agents)
    chosen = [agent for agent in agents if any(matches_name(each, agent.name, agent.own_name) for each in names)]
    silent = len(live) + len(survey.unusable) - len(answered)
    for each in names:
        if not any(matches_name(each, agent.name, agent.own_name) for agent in chosen):
            hint = near(each, [agent.name for agent in agents])
            others = f", and {silent} did not" if silent else ""
            text = f"no agent of this name among the {len(agents)} that answered{others}{hint}"
            survey.faults.append(Fault(each, FaultCode.UNREACHABLE, text))
    endpoints = {agent.endpoint for agent in chosen}
    return [each for each in live if each in endpoints], [agent for agent in agents if agent.endpoint not in endpoints]


def _name_unusable(survey: Survey, others: Sequence[AgentAnswer]) -> None:
    """Adds the faults of unusable endpoints; those with names that others have are called `name@host`."""
    names = Counter(endpoint.name for endpoint in survey.unusable)
    names.update({agent.own_name for agent in (*survey.agents, *others)})
    for endpoint, fault in survey.unusable.items():
        place = endpoint.host or endpoint.address
        name = endpoint.name if names[endpoint.name] == 1 else f"{endpoint.name}@{place}"
        survey.unusable[endpoint] = replace(fault, agent=name)
    survey.faults += survey.unusable.values()


def _known_hosts(survey: Survey) -> dict[str, str]:
    """Returns the hosts of all agents that were found, by the agent's name.

    The host of an agent that does not answer is the one that its source tells; else that of agents with the same
    address, or the one that its peers report for this address, unless several hosts share it; else the address.
    """
    found = {agent.name: agent.host for agent in survey.agents}
    endpoints = [*survey.discovery.live, *survey.discovery.stale]
    answered = {agent.endpoint for agent in survey.agents}
    silent = [endpoint for endpoint in endpoints if endpoint not in answered]
    if not silent:
        return found
    by_address: dict[str, set[str]] = {}
    for agent in survey.agents:
        by_address.setdefault(host_of(agent.endpoint.remote), set()).add(agent.host)
        for row in agent.data.get("peers") or ():
            if row.get("peer_host"):
                by_address.setdefault(host_of(row.get("endpoint")), set()).add(str(row["peer_host"]))
    for endpoint in silent:
        hosts = by_address.get(host_of(endpoint.remote), set())
        known = endpoint.host_name or (next(iter(hosts)) if len(hosts) == 1 else endpoint.host)
        fault = survey.unusable.get(endpoint)
        found.setdefault(endpoint.name if fault is None else fault.agent, known)
    return found


def _agent(hello: Reply) -> AgentAnswer | Fault:
    """Returns the agent that answered hello, without further answers; or the fault if it is not usable."""
    fault = hello.fault or _protocol_fault(hello.endpoint, hello.data)
    if fault is not None:
        return fault
    answer = cast("Hello", hello.data)
    clock = estimate(hello.sent_at_ns, hello.received_at_ns, answer["now_ns"])
    return AgentAnswer(hello.endpoint, answer, hello.rtt_ns, clock)


def _excused(reply: Reply, calls: Sequence[Call]) -> bool:
    """Returns whether a fault is none: an older agent lacks an optional command, an engine has only metrics."""
    lacking = {ErrorCode.UNKNOWN_COMMAND, FaultCode.NOT_CAPTURED}
    if reply.fault is not None and reply.fault.code == FaultCode.METRICS_ONLY:
        return any(call.command in _METRICS_COMMANDS and not call.optional for call in calls)
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


def rename_duplicates(
    agents: Sequence[AgentAnswer], ask: Ask | None = None, others: Sequence[AgentAnswer] = ()
) -> None:
    """Gives agents with equal names new ones, as `names.told_apart` does, in all their answers.

    That includes what agents say about their peers. An agent that mentions a peer whose name several agents have is
    asked for `peers`, unless it was, to find out which of them it means.

    Args:
        ask: sends requests; None to rename only what is known from the answers.
    """
    known = [*agents, *others]
    new = told_apart([(agent.own_name, agent.host, agent.hello["incarnation"]) for agent in known])
    renamed = {agent.own_name for agent, name in zip(known, new, strict=True) if name != agent.own_name}
    if not renamed:
        return
    identities: dict[Identity, str] = {}
    for agent, name in zip(known, new, strict=True):
        agent.hello = {**agent.hello, "name": name}
        if agent.own_name in renamed:
            identities[agent.own_name, agent.hello["incarnation"]] = name
            if name.endswith(f"@{agent.host}"):
                identities[agent.own_name, agent.host] = name
    peers = {agent.endpoint: agent.data["peers"] for agent in agents if "peers" in agent.data}
    for agent in agents:
        if isinstance(complete := peers.get(agent.endpoint), list) and "mentioned" in agent.data:
            peers[agent.endpoint] = [*complete, *rows_of(agent.data, "mentioned")]
    unknown = [agent.endpoint for agent in agents if agent.endpoint not in peers and _mentions(agent, renamed)]
    for reply in ask([(endpoint, _PEERS) for endpoint in unknown]) if ask and unknown else ():
        peers[reply.endpoint] = reply.data
    for agent in agents:
        names = {**peer_names(peers.get(agent.endpoint), identities), agent.own_name: agent.name}
        renaming = Renaming(names.keys(), names.__getitem__)
        agent.data = {command: renaming.answer(command, data) for command, data in agent.data.items()}


def _mentions(agent: AgentAnswer, names: Collection[str]) -> bool:
    """Returns whether an agent's answers mention another agent with one of these names."""
    return any(mentioned(command, data, names) - {agent.own_name} for command, data in agent.data.items())


class Source(Protocol):
    """Interface of what can be queried: a live `Fleet` or a `RecordingSource`; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def survey(self, calls: Sequence[Call] = (), clock_rounds: int = 1) -> Survey:
        """Returns the answers of the agents to `calls`, which has each command at most once."""
        ...

    def advance(self) -> bool:
        """Goes to the next snapshot; returns False if there is none. A live fleet advances by itself."""
        ...
