"""Keeps the latest answers of each agent and the trends derived from them; independent of textual.

If an agent stops answering, its last answers are kept and marked as stale; after ten minutes the agent is removed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from kvctl.client.clock import ClockOffset, more_precise
from kvctl.client.endpoints import Endpoint
from kvctl.client.faults import Fault
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.client.room_timeline import RoomTimeline, join, most_informative_first
from kvctl.health.engine import codes_of_agents
from kvctl.health.finding import Finding
from kvctl.render.rooms import failed_rows, finished_rows
from kvctl.render.status import FleetSummary, rates, summarise
from kvctl.render.view import Row
from kvctl.tui.feed import Reading, RecordingPosition

if TYPE_CHECKING:
    from kvctl_agent.contract.snapshots import RoomDetail

_STATUS = "status"
_FORGET_NS = 600_000_000_000
_MAX_EVENTS = 2_000  # like the limit of rooms, because all events are sorted at every reading
# Number of values in a series, one per reading: enough for a curve as wide as the widest screen.
_MAX_VALUES = 240
_LEAST_NS = 500_000_000  # between two values: over less, one room more or less would be a rate of many

Series = deque[float | None]
"""Recent values of one number, the oldest first; None where it was unknown."""


def _series() -> Series:
    return deque(maxlen=_MAX_VALUES)


@dataclass(slots=True)
class Trends:
    """Recent values of the fleet's figures, one per reading, but none sooner than half a second after another.

    Attributes:
        throughput: GB/s since the previous value.
        finished: succeeded rooms per second since the previous value.
        p50, p99: latencies as reported by the agents, in nanoseconds.
    """

    throughput: Series = field(default_factory=_series)
    finished: Series = field(default_factory=_series)
    p50: Series = field(default_factory=_series)
    p99: Series = field(default_factory=_series)
    _before: tuple[FleetSummary, int] | None = None

    def add(self, summary: FleetSummary, tick_ns: int) -> None:
        """Adds the totals of one reading, taken at `tick_ns` on a monotonic clock."""
        if self._before is not None:
            before, before_ns = self._before
            if tick_ns - before_ns < _LEAST_NS:
                return
            now = rates(before, summary, tick_ns - before_ns)
            self.throughput.append(now.gb_per_s)
            self.finished.append(now.succeeded_per_s)
        self._before = (summary, tick_ns)
        self.p50.append(summary.p50_ns)
        self.p99.append(summary.p99_ns)


@dataclass(slots=True)
class AgentState:
    """State of one agent according to its last answers.

    Attributes:
        seen_ns: wall-clock time of the agent's last answer.
        clock: offset of the agent's clock from this host's clock, from the most accurate reading.
        trouble: reason why the agent did not answer the last reading; "" if it answered.
        ended_ns: time since its process ended, if its observer answers with what it left; otherwise None.
    """

    name: str
    role: str
    incarnation: str
    endpoint: Endpoint
    seen_ns: int
    clock: ClockOffset
    answers: dict[str, Any] = field(default_factory=dict)
    trouble: str = ""
    ended_ns: int | None = None


class Store:
    """Collects readings and provides their data as rows for panels.

    Attributes:
        now_ns: wall-clock time of the last reading; for a recording, the recorded time.
        problem: reason why the last reading failed; "" if it succeeded.
        summary: totals of the agents that answered the last survey.
        never_heard: faults in the last survey of agents that have never answered.
        position: position in the recording; None for a live fleet.
        examined_at_ns: wall-clock time of those findings.
        subject: subject of the last question with a subject, such as a room number.
        events_missed: number of events that are not shown, because more occurred between two readings than one answer
            can contain.
    """

    def __init__(self) -> None:
        self.agents: dict[str, AgentState] = {}
        self.trends = Trends()
        self.now_ns = 0
        self.problem = ""
        self.position: RecordingPosition | None = None
        self.survey: Survey | None = None
        self.summary = summarise(())
        self.never_heard: Sequence[Fault] = ()
        self.findings: Sequence[Finding] | None = None
        self.examined_at_ns = 0
        self.events_missed = 0
        self.subject = ""
        self._events: deque[Row] = deque(maxlen=_MAX_EVENTS)
        self._next_event: dict[tuple[str, str], int] = {}

    def take(self, reading: Reading) -> None:
        """Adds a reading; if it is older than the previous one, all earlier data is discarded first."""
        if reading.at_ns < self.now_ns:
            self._clear()
        self.now_ns = reading.at_ns
        self.problem = reading.problem
        if reading.position is not None:
            self.position = reading.position
        if reading.survey is None:
            for agent in self.agents.values():
                agent.trouble = reading.problem
            return
        self.subject = reading.question.subject or self.subject
        self._update_agents(reading.survey, for_health=reading.findings is not None)
        self.summary = summarise(data for _, data in reading.survey.answers(_STATUS))
        if reading.findings is not None:
            self.findings, self.examined_at_ns = reading.findings, self.now_ns
        else:
            self.trends.add(self.summary, reading.survey.tick_ns)
        for answer, data in reading.survey.answers("events"):
            self._add_events(answer, data)

    def rows(self, command: str) -> list[Row]:
        """Returns the rows of all agents' last answers to `command`, including stale answers."""
        rows: list[Row] = []
        for name in sorted(self.agents):
            data = self.agents[name].answers.get(command)
            rows += data if isinstance(data, list) else [] if data is None else [data]
        return rows

    def statuses(self) -> list[dict[str, Any]]:
        """Returns all answers to `status` with a field `health` added: health codes about the agent, worst first."""
        codes = codes_of_agents(self.findings or ())
        return [{**row, "health": codes.get(row["name"], [])} for row in self.rows("status")]

    def stale_ns(self, agent: str) -> int | None:
        """Returns the nanoseconds since an agent's last answer, or since its end; None if it answers or is unknown."""
        state = self.agents.get(agent)
        if state is not None and state.ended_ns is not None:
            return state.ended_ns
        return None if state is None or not state.trouble else max(0, self.now_ns - state.seen_ns)

    @property
    def answering(self) -> int:
        """Number of agents that answered the last reading."""
        return sum(not agent.trouble for agent in self.agents.values())

    @property
    def silent(self) -> list[AgentState]:
        """Agents that have stopped answering."""
        return [agent for _, agent in sorted(self.agents.items()) if agent.trouble]

    @property
    def complete(self) -> bool:
        """Whether every agent answered all questions of the last reading."""
        return not self.silent and self.survey is not None and not self.survey.faults

    @property
    def events(self) -> Sequence[Row]:
        """Events of the agents' flight recorders since the events view was first opened, the oldest first."""
        return self._events

    def room(self, number: str) -> RoomTimeline | None:
        """Returns the timeline of a room from all its ranks; if the number was reused, of the use with the most data.

        None if no agent reports the room.
        """
        details = [cast("RoomDetail", row) for row in self.rows("room") if row["room"] == number]
        clocks = {name: state.clock for name, state in self.agents.items()}
        hosts = self.survey.hosts if self.survey is not None else {}
        silent = {name: state.trouble.partition("; ")[0] for name, state in self.agents.items() if state.trouble}
        return next(iter(most_informative_first(join(details, clocks, hosts, silent))), None)

    def finished_rooms(self) -> list[Row]:
        """Returns the rows of the agents' last answers to `history`, with the time since each room ended."""
        rows = ((row, agent.clock) for agent in self.agents.values() for row in agent.answers.get("history", ()))
        return finished_rows(rows, self.now_ns)

    def failed_rooms(self) -> list[Row]:
        """Returns a row for each failed room, combined from the reports of all its ranks."""
        answers = [row for answer in self.rows("failed") for row in answer["rooms"]]
        return failed_rows(answers, {name: state.clock for name, state in self.agents.items()}, self.now_ns)

    def _update_agents(self, survey: Survey, for_health: bool) -> None:
        self.survey = survey
        answered = set()
        for answer in survey.agents:
            answered.add(answer.name)
            state = self.agents.get(answer.name)
            if state is None or state.incarnation != answer.hello["incarnation"]:
                state = self.agents[answer.name] = AgentState(
                    name=answer.name,
                    role=answer.hello["role"],
                    incarnation=answer.hello["incarnation"],
                    endpoint=answer.endpoint,
                    seen_ns=self.now_ns,
                    clock=answer.clock,
                )
            state.clock = more_precise(answer.clock, state.clock, self.now_ns - state.seen_ns)
            state.seen_ns, state.trouble = self.now_ns, ""
            state.ended_ns = answer.ended_ns
            # The health codes read fewer rows than a panel, which still shows those that it has read.
            shown = set(state.answers) - {_STATUS} if for_health else set()
            brief = "omitted" in answer.data and _STATUS in answer.data
            state.answers |= {
                command: data
                for command, data in answer.data.items()
                if command == _STATUS or not (brief or command in shown)
            }
        reasons = {fault.agent: fault.message for fault in survey.faults}
        known = {name for state in self.agents.values() for name in (state.name, state.endpoint.name)}
        self.never_heard = [fault for fault in survey.faults if fault.agent not in known]
        for name, state in list(self.agents.items()):
            if name in answered:
                continue
            state.trouble = reasons.get(name) or reasons.get(state.endpoint.name) or "it is gone"
            if self.now_ns - state.seen_ns > _FORGET_NS:
                del self.agents[name]

    def _add_events(self, agent: AgentAnswer, data: Mapping[str, Any]) -> None:
        expected = self._next_event.get(agent.life)
        rows = [row for row in data["events"] if expected is None or row["sequence"] >= expected]
        if rows and expected is not None:
            self.events_missed += rows[0]["sequence"] - expected
        self._events.extend(self.agents[agent.name].clock.corrected(rows))
        self._next_event[agent.life] = data["next"]

    def _clear(self) -> None:
        self.trends = Trends()
        self._events.clear()
        self._next_event.clear()
        self.events_missed = 0
        self.findings = None
        self.agents.clear()
