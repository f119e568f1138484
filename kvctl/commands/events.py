"""`kvctl events`: prints the flight-recorder events of all agents, merged by time; with `-w` also new events."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import click

from kvctl.client.calls import Call
from kvctl.client.clock import ClockOffset, more_precise
from kvctl.client.fleet import Survey
from kvctl.commands.options import ROW_LIMIT, Parsed, command
from kvctl.commands.output import Output
from kvctl.commands.queries import follow, run
from kvctl.commands.settings import Settings
from kvctl.render.clocks import corrections
from kvctl.render.events import EVENTS
from kvctl.render.report import Report
from kvctl.render.units import parse_seconds

_CLOCK_ROUNDS = 3
_DEFAULT_LIMIT = 1000
_MAX_EVENTS = 65_536  # more than recorders keep by default, and few enough for one answer
SEVERITIES = ("debug", "info", "warning", "error")


@command(
    view=EVENTS,
    examples=[
        ("Warnings and errors of the last five minutes", "kvctl events --since 5m --severity warning"),
        ("New events as they happen", "kvctl events -w"),
        ("Events of one room", "kvctl events --filter 'room=7'"),
    ],
)
@click.option("--since", "back_ns", type=Parsed("time", parse_seconds), metavar="TIME", help="Only the last 5m, 30s, …")
@click.option(
    "-n",
    "--limit",
    type=ROW_LIMIT,
    default=_DEFAULT_LIMIT,
    show_default=True,
    help="Show at most this many events per agent, the latest.",
)
@click.option("--severity", type=click.Choice(SEVERITIES), default="debug", help="Only events this severe or worse.")
def events(settings: Settings, back_ns: int | None, limit: int, severity: str) -> None:
    """Events of all agents, merged by time; with -w also new events as they happen.

    Agents are followed across restarts. Events that a recorder dropped before they were read are counted on stderr.
    """
    wanted = SEVERITIES[SEVERITIES.index(severity) :]

    def keep(row: dict[str, Any]) -> bool:
        # A newer agent may have severities that are unknown here.
        return row["severity"] in wanted or row["severity"] not in SEVERITIES

    if settings.watch_ns is not None:
        Output(settings).selection(EVENTS)
        follower = Follower(keep, back_ns, limit)
        follow(settings, follower.calls, follower)

    selection = Output(settings).selection(EVENTS)
    chosen = severity != SEVERITIES[0] or back_ns is not None or bool(settings.filters)

    def read(survey: Survey) -> Report:
        everything, notes = _events(survey, back_ns)
        clocks = corrections({agent.name: agent.clock for agent in survey.agents}, survey.hosts)
        notes += [f"clocks: {clocks}, corrected"] if clocks else []
        wanted = [[row for row in events if keep(row)] for events in everything]
        passing = [[row for row in events if selection.passes(row)] for events in wanted]
        rows = [row for events in passing for row in events[-limit:]]
        # If no row passes, the output reports the filter.
        rows = rows or [row for events in wanted for row in events]
        return Report(EVENTS, rows, len(everything), survey.faults, notes=notes)

    calls = (Call("events", {"limit": max(limit, _MAX_EVENTS) if chosen else limit}),)
    run(settings, EVENTS, calls, read, clock_rounds=_CLOCK_ROUNDS)


def _events(survey: Survey, back_ns: int | None) -> tuple[list[list[dict[str, Any]]], list[str]]:
    """Returns the events of each agent that answered, oldest first, and remarks about events no longer recorded.

    Times are converted to the clock of this machine.

    Args:
        back_ns: largest age of an event; None for all events.
    """
    earliest = 0 if back_ns is None else survey.at_ns - back_ns
    found, notes = [], []
    for agent, data in survey.answers("events"):
        found.append([event for event in agent.clock.corrected(data["events"]) if event["at_ns"] >= earliest])
        if data["dropped"]:
            notes.append(f"{agent.name}: {data['dropped']} older events are no longer in its recorder")
    return found, notes


Keep = Callable[[dict[str, Any]], bool]
_Process = tuple[str, str]  # name and incarnation of an agent


class Follower:
    """Prints new events, and remembers how far each agent's flight recorder was read.

    All agents get the same request, from the lowest position of all, and events that were printed already are omitted.
    If an agent's position is below the requested one, because it restarted or did not answer, its answer is skipped and
    the next request starts at its position. If positions are so far apart that an answer from the lowest one would not
    reach the highest, as after a restart beside agents that run for long, each agent is asked for its latest events.

    Args:
        keep: whether to print an event.
        back_ns: largest age of the events in the first reading; None: all that the recorders have.
        limit: maximum number of events per agent and reading.
    """

    def __init__(self, keep: Keep, back_ns: int | None, limit: int) -> None:
        self._keep = keep
        self._back_ns = back_ns
        self._limit = limit
        self._next: dict[_Process, int] = {}
        self._answered: set[_Process] = set()
        self._clocks: dict[_Process, tuple[ClockOffset, int]] = {}  # the most precise one, and the time of its reading
        self._corrected: set[str] = set()

    def calls(self) -> list[Call]:
        """Returns the next request, which is the same for all agents."""
        positions = [self._next[process] for process in self._answered]
        together = positions and max(positions) - min(positions) < self._limit
        return [Call("events", {"limit": self._limit, "since": min(positions) if together else None})]

    def __call__(self, output: Output, survey: Survey) -> None:
        """Prints the new events in a survey that was made with `calls`."""
        (call,) = self.calls()
        since: int | None = call.args.get("since")
        first = not self._next
        earliest = survey.at_ns - self._back_ns if first and self._back_ns is not None else 0
        fresh: list[dict[str, Any]] = []
        answers = [(agent.life, agent, data) for agent, data in survey.answers("events")]
        answered = {process for process, _, _ in answers}
        for process, agent, data in answers:
            if process not in self._next:
                self._add_process(output, process, answered)
            position = self._next[process]
            if since is not None and since > position:
                continue
            lost = 0 if first or not data["events"] else data["events"][0]["sequence"] - position
            if lost > 0 and position:
                output.note(f"{agent.name}: {lost} events were lost between two readings: read more often, -w 0.5")
            events = self._clock(process, agent.clock, survey.tick_ns).corrected(data["events"])
            fresh += [row for row in events if row["sequence"] >= position and row["at_ns"] >= earliest]
            self._next[process] = max(position, data["next"])
        self._answered = answered or self._answered
        self._report_clocks(output, survey)
        output.stream(EVENTS, [row for row in fresh if self._keep(row)])

    def _clock(self, process: _Process, clock: ClockOffset, tick_ns: int) -> ClockOffset:
        """Returns the most precise measurement of an agent's clock so far."""
        if process in self._clocks:
            earlier, at_ns = self._clocks[process]
            clock = more_precise(clock, earlier, tick_ns - at_ns)
        self._clocks[process] = clock, tick_ns
        return clock

    def _report_clocks(self, output: Output, survey: Survey) -> None:
        """Prints which hosts' times are corrected, when these hosts change."""
        clocks = {name: clock for (name, _), (clock, _) in self._clocks.items()}
        hosts = {survey.hosts.get(name, name) for name, clock in clocks.items() if clock.correction_ns}
        if hosts and hosts != self._corrected:
            output.note(f"clocks: {corrections(clocks, survey.hosts)}, corrected")
        self._corrected = hosts

    def _add_process(self, output: Output, process: _Process, answered: Collection[_Process]) -> None:
        name, _ = process
        before = [other for other in self._next if other[0] == name]
        for other in before:
            if other not in answered:  # an observer answers for one that has ended
                del self._next[other]
                self._answered.discard(other)
        if before:
            output.note(f"{name}: restarted")
        self._next[process] = 0
