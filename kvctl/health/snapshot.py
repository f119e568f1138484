"""A fleet at one moment, as the health codes read it: what each agent answered, indexed.

Live, recorded and bundled data look the same here. What an agent did not answer is empty, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

from kvctl.client.calls import Call
from kvctl.client.faults import Fault
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.health.answers import Row, amount, inner, is_agent_name, number, rows, text
from kvctl_agent.contract.config import KEYS_BY_NAME

_ROOMS = 200
_HISTORY = 50
_FAILED = 200
_SECOND_NS = 1_000_000_000

T = TypeVar("T")

HEALTH_CALLS: tuple[Call, ...] = (
    Call("status"),
    Call("rooms", {"limit": _ROOMS}),
    Call("history", {"limit": _HISTORY}),
    Call("failed", {"limit": _FAILED}),
    Call("staging"),
    Call("peers"),
    Call("metrics"),
    Call("config"),
)
"""What a snapshot is made of; a survey of these calls makes one. The oldest rooms come first, so a limit keeps them."""


class Spent(NamedTuple):
    """What a histogram of seconds has added up."""

    seconds: float
    times: float


@dataclass(frozen=True)
class Agent:
    """What one agent answered."""

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

    @property
    def incarnation(self) -> str:
        return text(self.status, "incarnation")

    @cached_property
    def known_rooms(self) -> Sequence[Row]:
        """Rooms that are active, have finished lately or have failed, each once."""
        found: dict[tuple[str, str], Row] = {}
        for row in (*self.rooms, *self.history, *self.failed):
            found.setdefault((text(row, "room"), text(row, "nonce")), row)
        return list(found.values())

    @property
    def now_ns(self) -> int:
        """Its own wall clock when it answered: what its `_at_ns` are to be compared with."""
        return self.answer.hello["now_ns"]

    @cached_property
    def rooms_complete(self) -> bool:
        """Whether `rooms` are all of its active rooms: one that is not among them is not active."""
        return "rooms" in self.answer.data and len(self.rooms) < _ROOMS

    def setting(self, key: str) -> float:
        """A number of its configuration; the key's default where it did not say."""
        value = number(self.config.get(key, {}), "value")
        if value is not None:
            return value
        default = KEYS_BY_NAME[key].default
        return default if isinstance(default, int | float) else 0.0

    def period_ns(self, key: str) -> int:
        """A setting in seconds, in nanoseconds."""
        return round(self.setting(key) * _SECOND_NS)

    def samples(self, metric: str, **labels: str) -> list[Row] | None:
        """Samples that have these labels; None where there is no such metric."""
        family = self.families.get(metric)
        if family is None:
            return None
        return [
            sample
            for sample in rows(family.get("samples"))
            if all(inner(sample, "labels").get(name) == value for name, value in labels.items())
        ]

    def total(self, metric: str, **labels: str) -> float | None:
        """Sum of a counter or gauge over the samples that have these labels; None where there is no such metric."""
        samples = self.samples(metric, **labels)
        return None if samples is None else sum(amount(sample, "value") for sample in samples)

    def spent(self, metric: str, **labels: str) -> Spent:
        """What a histogram of seconds has added up over these samples."""
        samples = self.samples(metric, **labels) or ()
        seconds = sum(amount(sample, "sum") for sample in samples)
        return Spent(seconds, sum(amount(sample, "count") for sample in samples))


class Snapshot:
    """A fleet at one moment.

    Args:
        before: the same fleet a moment ago, for what only differences show; None where there is no such thing.
        taken_ns: a monotonic or wall clock, the same for both.
    """

    def __init__(self, survey: Survey, taken_ns: int, before: Snapshot | None = None) -> None:
        self.survey = survey
        self.taken_ns = taken_ns
        self.before = before
        self._derived: dict[Callable[[Any], Any], Any] = {}

    def once(self, derive: Callable[[Snapshot], T]) -> T:
        """What several codes make of this snapshot, made by the first that asks."""
        if derive not in self._derived:
            self._derived[derive] = derive(self)
        return cast(T, self._derived[derive])

    @property
    def faults(self) -> Sequence[Fault]:
        """Agents that did not answer, or not all."""
        return self.survey.faults

    @cached_property
    def agents(self) -> Mapping[str, Agent]:
        """By name, in the order of the names; those that answered `status`."""
        answers = sorted(self.survey.agents, key=lambda answer: answer.name)
        return {answer.name: _agent(answer) for answer in answers if "status" in answer.data}

    def of_role(self, role: str) -> Iterator[Agent]:
        return (agent for agent in self.agents.values() if agent.role == role)

    @cached_property
    def by_room(self) -> Mapping[str, Sequence[tuple[Agent, Row]]]:
        """Active, lately finished and failed rooms, by number: the rows of all ranks that know it."""
        found: dict[str, list[tuple[Agent, Row]]] = {}
        for agent in self.agents.values():
            for row in agent.known_rooms:
                found.setdefault(text(row, "room"), []).append((agent, row))
        return found

    @property
    def since_ns(self) -> int:
        """Time since the snapshot before; 0 where there is none."""
        return 0 if self.before is None else self.taken_ns - self.before.taken_ns

    def earlier(self, agent: str) -> Agent | None:
        """The same life of an agent in the snapshot before."""
        now, then = self.agents.get(agent), self.before.agents.get(agent) if self.before is not None else None
        return then if now is not None and then is not None and now.incarnation == then.incarnation else None

    def since_before(self, agent: str, metric: str, **labels: str) -> float | None:
        """Growth of a counter since the snapshot before; None where that cannot be told, as after a restart."""
        then = self.earlier(agent)
        if then is None:
            return None
        after, earlier = self.agents[agent].total(metric, **labels), then.total(metric, **labels)
        return None if after is None or earlier is None or after < earlier else after - earlier

    def spent_since_before(self, agent: str, metric: str, **labels: str) -> Spent | None:
        """What a histogram has added up since the snapshot before; None as for `since_before`."""
        then = self.earlier(agent)
        if then is None:
            return None
        now, earlier = self.agents[agent].spent(metric, **labels), then.spent(metric, **labels)
        if now.times < earlier.times:
            return None
        return Spent(max(0.0, now.seconds - earlier.seconds), now.times - earlier.times)


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
