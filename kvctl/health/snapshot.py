"""The answers of all agents to one survey, indexed for the health codes.

Live and recorded answers look the same. Data that an agent did not provide is empty, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

from kvctl.client.faults import Fault
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.client.instances import instances
from kvctl.health.answers import Row, amount, inner, is_agent_name, number, rows, text
from kvctl.health.halted_agents import Halt, halt
from kvctl_agent.contract.config import KEYS_BY_NAME
from kvctl_agent.contract.health import HEALTH_ROOMS

_SECOND_NS = 1_000_000_000
_AXES = ("dp", "pp", "cp", "tp")

T = TypeVar("T")


class HistogramSum(NamedTuple):
    """Sum (in seconds) and number of the observations of a histogram."""

    seconds: float
    observations: float

    @property
    def mean_s(self) -> float:
        return self.seconds / self.observations if self.observations else 0.0


@dataclass(frozen=True)
class Agent:
    """The answers of one agent, by command; `failed` has its failed rooms, `families` its metrics by name."""

    name: str
    role: str
    answer: AgentAnswer
    status: Row
    rooms: Sequence[Row]
    history: Sequence[Row]
    failed: Sequence[Row]
    staging: Row
    peers: Sequence[Row]
    families: Mapping[str, Row]
    config: Mapping[str, Row]

    @cached_property
    def incarnation(self) -> str:
        return text(self.status, "incarnation")

    @property
    def version(self) -> str:
        return text(self.status, "version")

    @cached_property
    def halt(self) -> Halt | None:
        """Why it does no work; None if it works."""
        return halt(self.status, self.name)

    @property
    def observes(self) -> bool:
        """Whether the agent only reports what its engine's own managers transfer."""
        return text(inner(self.status, "integration"), "mode") == "observe"

    @cached_property
    def known_rooms(self) -> Sequence[Row]:
        """Rows of active, recently finished and failed rooms, without duplicates."""
        found: dict[tuple[str, str], Row] = {}
        for row in (*self.rooms, *self.history, *self.failed):
            found.setdefault((text(row, "room"), text(row, "nonce")), row)
        return list(found.values())

    @property
    def now_ns(self) -> int:
        """Wall clock of the agent's host when it answered, comparable with the agent's `_at_ns` values."""
        return self.answer.hello["now_ns"]

    @cached_property
    def rooms_complete(self) -> bool:
        """Whether `rooms` contains all active rooms, so that a room not among them is not active."""
        return "rooms" in self.answer.data and len(self.rooms) < HEALTH_ROOMS and not self.omitted_rooms

    @property
    def omitted_rooms(self) -> int:
        """Number of young active rooms that the agent of a large fleet left out of `rooms`."""
        return int(amount(inner(self.answer.data, "omitted"), "rooms"))

    @property
    def leads(self) -> bool:
        """Whether it is the first rank of its dp group, so that counting only such ranks counts each room once."""
        rank = inner(self.status, "rank")
        return not any(amount(rank, axis) for axis in ("tp", "pp", "cp"))

    def setting(self, key: str) -> float:
        """Returns a numeric setting of the agent's configuration; the key's default if the agent does not report it."""
        value = number(self.config.get(key, {}), "value")
        if value is not None:
            return value
        default = KEYS_BY_NAME[key].default
        return default if isinstance(default, int | float) else 0.0

    def period_ns(self, key: str) -> int:
        """Returns a setting that is given in seconds, converted to nanoseconds."""
        return round(self.setting(key) * _SECOND_NS)

    @cached_property
    def _samples(self) -> Mapping[str, list[Row]]:
        return {name: rows(family.get("samples")) for name, family in self.families.items()}

    def samples(self, metric: str, **labels: str) -> list[Row] | None:
        """Returns the samples of a metric that have these labels; None if the agent has no such metric."""
        found = self._samples.get(metric)
        if found and labels:
            wanted = labels.items()
            found = [each for each in found if wanted <= inner(each, "labels").items()]
        return found

    def total(self, metric: str, **labels: str) -> float | None:
        """Returns the sum of a counter or gauge over the samples with these labels; None if the metric is missing."""
        samples = self.samples(metric, **labels)
        return None if samples is None else sum([amount(sample, "value") for sample in samples])

    def histogram(self, metric: str, **labels: str) -> HistogramSum:
        """Returns sum and number of a histogram's observations over the samples with these labels; 0 without any."""
        samples = self.samples(metric, **labels) or ()
        seconds = sum([amount(sample, "sum") for sample in samples])
        return HistogramSum(seconds, sum([amount(sample, "count") for sample in samples]))


class Snapshot:
    """The state of a fleet according to one survey.

    Args:
        taken_ns: time of the survey, on the same clock (monotonic or wall clock) as that of `before`.
        before: the previous snapshot of the same fleet, to compare counters with; None if there is none.
    """

    def __init__(self, survey: Survey, taken_ns: int, before: Snapshot | None = None) -> None:
        self.survey = survey
        self.taken_ns = taken_ns
        self.before = before
        self._derived: dict[Callable[[Any], Any], Any] = {}

    def alone(self) -> Snapshot:
        """Returns a copy without `before`, so that the earlier snapshot can be freed."""
        found = Snapshot(self.survey, self.taken_ns)
        found.answered, found.agents = self.answered, self.agents
        return found

    def once(self, derive: Callable[[Snapshot], T]) -> T:
        """Returns `derive(self)`; the result is cached and shared by all health codes."""
        if derive not in self._derived:
            self._derived[derive] = derive(self)
        return cast(T, self._derived[derive])

    @property
    def faults(self) -> Sequence[Fault]:
        """Faults of agents that did not answer, or did not answer all calls."""
        return self.survey.faults

    @cached_property
    def answered(self) -> Mapping[str, Agent]:
        """Agents of which there is an answer to `status`, their own or their observer's; as for `agents`."""
        answers = sorted(self.survey.agents, key=lambda answer: answer.name)
        return {answer.name: _agent(answer) for answer in answers if "status" in answer.data}

    @cached_property
    def agents(self) -> Mapping[str, Agent]:
        """Agents that work and answered `status`, by name, in the order of the names."""
        return {name: agent for name, agent in self.answered.items() if agent.halt is None}

    @cached_property
    def halted(self) -> Mapping[str, Agent]:
        """Agents for which an observer answered, as they are stopped, stand still or have ended; as for `agents`.

        What they say is old, so only the codes about such agents read it; to the others they are silent.
        """
        return {name: agent for name, agent in self.answered.items() if agent.halt is not None}

    @cached_property
    def instances(self) -> Mapping[str, str]:
        """Names of the agents' instances, by the name of the agent."""
        statuses = [
            {
                "name": agent.name,
                "role": agent.role,
                **{key: text(agent.status, key) for key in ("host", "registry")},
                "sizes": {axis: int(amount(inner(agent.status, "sizes"), axis)) or 1 for axis in _AXES},
                "rank": {axis: int(amount(inner(agent.status, "rank"), axis)) for axis in (*_AXES, "unique")},
            }
            for agent in self.agents.values()
        ]
        return dict(zip(self.agents, instances(statuses), strict=True))

    def of_role(self, role: str) -> Iterator[Agent]:
        return (agent for agent in self.agents.values() if agent.role == role)

    @cached_property
    def by_room(self) -> Mapping[str, Sequence[tuple[Agent, Row]]]:
        """Rows of active, recently finished and failed rooms on all ranks, by room number."""
        found: dict[str, list[tuple[Agent, Row]]] = {}
        for agent in self.agents.values():
            for row in agent.known_rooms:
                found.setdefault(text(row, "room"), []).append((agent, row))
        return found

    @property
    def since_ns(self) -> int:
        """Nanoseconds since the previous snapshot; 0 if there is none."""
        return 0 if self.before is None else self.taken_ns - self.before.taken_ns

    def earlier(self, agent: str) -> Agent | None:
        """Returns the agent's answers in the previous snapshot; None if missing or from another incarnation."""
        now, then = self.agents.get(agent), self.before.agents.get(agent) if self.before is not None else None
        return then if now is not None and then is not None and now.incarnation == then.incarnation else None

    def since_before(self, agent: str, metric: str, **labels: str) -> float | None:
        """Returns the growth of a counter since the previous snapshot; None if unknown, such as after a restart."""
        then = self.earlier(agent)
        if then is None:
            return None
        after, earlier = self.agents[agent].total(metric, **labels), then.total(metric, **labels)
        return None if after is None or earlier is None or after < earlier else after - earlier

    def histogram_since_before(self, agent: str, metric: str, **labels: str) -> HistogramSum | None:
        """Returns the growth of a histogram since the previous snapshot; None if unknown, such as after a restart."""
        then = self.earlier(agent)
        if then is None:
            return None
        now, earlier = self.agents[agent].histogram(metric, **labels), then.histogram(metric, **labels)
        if now.observations < earlier.observations:
            return None
        return HistogramSum(max(0.0, now.seconds - earlier.seconds), now.observations - earlier.observations)


def _agent(answer: AgentAnswer) -> Agent:
    data = answer.data
    return Agent(
        name=answer.name,
        role=text(answer.hello, "role"),
        answer=answer,
        status=inner(data, "status"),
        rooms=rows(data.get("rooms")),
        history=rows(data.get("history")),
        failed=rows(inner(data, "failed").get("rooms")),
        staging=inner(data, "staging"),
        peers=[row for row in rows(data.get("peers")) if is_agent_name(text(row, "peer"))],
        families={text(family, "name"): family for family in rows(data.get("metrics"))},
        config={text(row, "key"): row for row in rows(data.get("config"))},
    )
