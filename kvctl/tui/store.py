"""What is known of the fleet: each agent's last good answers with their age, and what derives from them.

Plain data, no textual: a reading goes in, rows come out. An agent that stops answering keeps its last answers, which
grow stale; one that is not even there any more is forgotten after a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kvctl.client.clock import ClockOffset, sharper
from kvctl.client.endpoints import Endpoint
from kvctl.client.faults import Fault
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.client.room_timeline import RoomTimeline, join, most_informative_first
from kvctl.health.finding import Severity
from kvctl.health.mutes import Judged
from kvctl.render.rooms import failed_rows
from kvctl.render.view import Row
from kvctl.tui.readings import Place, Reading
from kvctl.tui.trends import Trends
from kvctl_agent.contract.commands import Level
from kvctl_agent.contract.snapshots import RoomDetail

_FORGOTTEN_NS = 600_000_000_000
_EVENTS = 2_000  # as many rows as rooms: all are sorted at every reading


@dataclass(slots=True)
class AgentState:
    """One agent as it was last heard.

    Attributes:
        answers: its last answer to each command, with the moment it was given.
        seen_ns: when it answered last.
        clock: its clock against ours, as exactly as any reading has told.
        trouble: why it did not answer the last reading; "" where it did.
    """

    name: str
    role: str
    level: str
    incarnation: str
    endpoint: Endpoint
    seen_ns: int
    clock: ClockOffset
    answers: dict[str, tuple[Any, int]] = field(default_factory=dict)
    trouble: str = ""


class Store:
    """Takes readings in order, and answers what panels ask.

    Attributes:
        now_ns: our wall clock at the last reading; of a recording, its moment.
        problem: why nobody could be asked at all; "" where somebody could.
        survey: the last one; None before the first.
        unheard: faults of the last survey of agents that have never answered us.
        place: where in a recording we are.
        judged: what the health codes found, and what of it is muted; None before they were run.
        asked: subject of the last question that had one.
        events_missed: events between two readings that were more than an agent tells at once.
    """

    def __init__(self) -> None:
        self.agents: dict[str, AgentState] = {}
        self.trends = Trends()
        self.now_ns = 0
        self.problem = ""
        self.place: Place | None = None
        self.survey: Survey | None = None
        self.unheard: Sequence[Fault] = ()
        self.judged: Judged | None = None
        self.judged_at_ns = 0
        self.events_missed = 0
        self.asked = ""
        self._events: deque[Row] = deque(maxlen=_EVENTS)
        self._places: dict[tuple[str, str], int] = {}

    def take(self, reading: Reading) -> None:
        """Adds one reading; one that is older than the last starts history anew."""
        if reading.at_ns < self.now_ns:
            self._turn_back()
        self.now_ns = reading.at_ns
        self.problem = reading.problem
        if reading.place is not None:
            self.place = reading.place
        if reading.survey is None:
            for agent in self.agents.values():
                agent.trouble = reading.problem
            return
        self.asked = reading.question.subject or self.asked
        self._hear(reading.survey)
        if reading.judged is not None:
            self.judged, self.judged_at_ns = reading.judged, self.now_ns
        else:
            self.trends.add([data for _, data in reading.survey.answers("status")], reading.survey.tick_ns)
        for answer, data in reading.survey.answers("events"):
            self._remember(answer, data)

    def rows(self, command: str) -> list[Row]:
        """Answers to `command` of all agents, stale ones included: rows of those that answer with several."""
        rows: list[Row] = []
        for name in sorted(self.agents):
            data = self.answer(name, command)
            rows += data if isinstance(data, list) else [] if data is None else [data]
        return rows

    def statuses(self) -> list[Row]:
        """Answers to `status` with the codes of what was found about each agent, the worst first."""
        raised = [each for each in self.judged.raised if each.severity > Severity.INFO] if self.judged else []
        return [
            {**row, "health": list(dict.fromkeys(each.code for each in raised if row["name"] in each.agents))}
            for row in self.rows("status")
        ]

    def answer(self, agent: str, command: str) -> Any:
        """The last good answer of one agent, None where there is none."""
        state = self.agents.get(agent)
        found = state.answers.get(command) if state else None
        return found[0] if found else None

    def stale_ns(self, agent: str) -> int | None:
        """How long an agent has been silent; None while it answers."""
        state = self.agents.get(agent)
        return None if state is None or not state.trouble else max(0, self.now_ns - state.seen_ns)

    def heard(self, command: str) -> bool:
        """Whether anybody has answered `command` yet."""
        return any(command in agent.answers for agent in self.agents.values())

    @property
    def answering(self) -> int:
        return sum(not agent.trouble for agent in self.agents.values())

    @property
    def silent(self) -> list[AgentState]:
        return [agent for _, agent in sorted(self.agents.items()) if agent.trouble]

    @property
    def events(self) -> Sequence[Row]:
        """What the flight recorders told since the view was first open, oldest first."""
        return self._events

    def room(self, number: str) -> RoomTimeline | None:
        """A room, joined over the ranks that know it; of a number used again, the use that most is known of."""
        details = [cast(RoomDetail, row) for row in self.rows("room") if row["room"] == number]
        clocks = {name: state.clock for name, state in self.agents.items()}
        return next(iter(most_informative_first(join(details, clocks))), None)

    def failed_rooms(self) -> list[Row]:
        """Rooms that failed, joined over the ranks that tell of them."""
        answers = [row for answer in self.rows("failed") for row in answer["rooms"]]
        return failed_rows(answers, {name: state.clock for name, state in self.agents.items()}, self.now_ns)

    def may(self, agent: str, level: Level) -> bool:
        """Whether an agent lets us do what takes that level."""
        state = self.agents.get(agent)
        return state is not None and state.level in {each.label for each in Level if each >= level}

    def _hear(self, survey: Survey) -> None:
        self.survey = survey
        heard = set()
        for answer in survey.agents:
            heard.add(answer.name)
            state = self.agents.get(answer.name)
            if state is None or state.incarnation != answer.hello["incarnation"]:
                state = self.agents[answer.name] = _state(answer, self.now_ns)
            state.clock = sharper(answer.clock, state.clock, self.now_ns - state.seen_ns)
            state.seen_ns, state.trouble, state.level = self.now_ns, "", answer.hello["level"]
            state.answers |= {command: (data, self.now_ns) for command, data in answer.data.items()}
        why = {fault.agent: fault.message for fault in survey.faults}
        known = {name for state in self.agents.values() for name in (state.name, state.endpoint.name)}
        self.unheard = [fault for fault in survey.faults if fault.agent not in known]
        for name, state in list(self.agents.items()):
            if name in heard:
                continue
            state.trouble = why.get(name) or why.get(state.endpoint.name) or "it is gone"
            if self.now_ns - state.seen_ns > _FORGOTTEN_NS:
                del self.agents[name]

    def _remember(self, agent: AgentAnswer, data: Mapping[str, Any]) -> None:
        key = (agent.name, agent.hello["incarnation"])
        place = self._places.get(key)
        rows = [row for row in data["events"] if place is None or row["sequence"] >= place]
        if rows and place is not None:
            self.events_missed += rows[0]["sequence"] - place
        self._events.extend(rows)
        self._places[key] = data["next"]

    def _turn_back(self) -> None:
        self.trends.clear()
        self._events.clear()
        self._places.clear()
        self.events_missed = 0
        self.judged = None
        self.agents.clear()


def _state(answer: AgentAnswer, now_ns: int) -> AgentState:
    return AgentState(
        name=answer.name,
        role=answer.hello["role"],
        level=answer.hello["level"],
        incarnation=answer.hello["incarnation"],
        endpoint=answer.endpoint,
        seen_ns=now_ns,
        clock=answer.clock,
    )
