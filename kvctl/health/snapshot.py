"""A fleet at one moment, as the health codes read it: what each agent answered, indexed.

Live, recorded and bundled data look the same here. What an agent did not answer is empty, never an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvctl.client.calls import Call
from kvctl.client.faults import Fault
from kvctl.client.fleet import AgentAnswer, Survey

Row = Mapping[str, Any]

_ROOMS = 200
_HISTORY = 50

HEALTH_CALLS: tuple[Call, ...] = (
    Call("status"),
    Call("rooms", {"limit": _ROOMS}),
    Call("history", {"limit": _HISTORY}),
    Call("staging"),
    Call("peers"),
    Call("metrics"),
)
"""What a snapshot is made of; a survey of these calls makes one. The oldest rooms come first, so a limit keeps them."""


@dataclass(frozen=True, slots=True)
class Agent:
    """What one agent answered."""

    name: str
    role: str
    answer: AgentAnswer
    status: Row
    rooms: Sequence[Row]
    history: Sequence[Row]
    staging: Row
    peers: Sequence[Row]
    families: Mapping[str, Row]

    def total(self, metric: str, **labels: str) -> float | None:
        """Sum of a counter or gauge over the samples that have these labels; None where there is no such metric."""
        family = self.families.get(metric)
        if family is None:
            return None
        return sum(
            sample["value"] or 0
            for sample in family["samples"]
            if all(sample["labels"].get(name) == value for name, value in labels.items())
        )


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

    @property
    def faults(self) -> Sequence[Fault]:
        """Agents that did not answer, or not all."""
        return self.survey.faults

    @cached_property
    def agents(self) -> Mapping[str, Agent]:
        """By name; those that answered `status`."""
        return {answer.name: _agent(answer) for answer in self.survey.agents if "status" in answer.data}

    def of_role(self, role: str) -> Iterator[Agent]:
        return (agent for agent in self.agents.values() if agent.role == role)

    @cached_property
    def by_room(self) -> Mapping[str, Sequence[tuple[Agent, Row]]]:
        """Active and lately finished rooms, by number: the rows of all ranks that know it."""
        found: dict[str, list[tuple[Agent, Row]]] = {}
        for agent in self.agents.values():
            for row in (*agent.rooms, *agent.history):
                found.setdefault(row["room"], []).append((agent, row))
        return found

    def since_before(self, agent: str, metric: str, **labels: str) -> float | None:
        """Growth of a counter since the snapshot before; None where that cannot be told, as after a restart."""
        if self.before is None or agent not in self.agents or agent not in self.before.agents:
            return None
        now, then = self.agents[agent], self.before.agents[agent]
        if now.status["incarnation"] != then.status["incarnation"]:
            return None
        after, earlier = now.total(metric, **labels), then.total(metric, **labels)
        return None if after is None or earlier is None or after < earlier else after - earlier


def _agent(answer: AgentAnswer) -> Agent:
    data = answer.data
    return Agent(
        name=answer.name,
        role=answer.hello["role"],
        answer=answer,
        status=data["status"],
        rooms=data.get("rooms") or (),
        history=data.get("history") or (),
        staging=data.get("staging") or {},
        peers=data.get("peers") or (),
        families={family["name"]: family for family in data.get("metrics") or ()},
    )
