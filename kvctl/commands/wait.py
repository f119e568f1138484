"""`kvctl wait`: waits until a fleet is ready or drained."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import click

from kvctl.client.calls import Call
from kvctl.client.faults import FaultCode
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.commands.options import command
from kvctl.commands.output import Output
from kvctl.commands.queries import live, live_only
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import ProgressLine
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.health.answers import not_ready
from kvctl.health.finding import counted
from kvctl.health.halted_agents import halt
from kvctl.render import units

_PAUSE_S = 0.25
_LAST_SURVEY_NS = 200_000_000
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress towards a condition.

    Attributes:
        reached: describes the condition that holds; "" while it does not.
        missing: descriptions of what is missing, the most important first.
        impossible: why the condition can no longer be reached; "" while it can.
    """

    reached: str = ""
    missing: Sequence[str] = ()
    impossible: str = ""


class WaitCondition(Protocol):
    """Condition that `kvctl wait` waits for. `calls`: queries whose answers `progress` needs."""

    calls: tuple[Call, ...]

    def progress(self, survey: Survey) -> Progress:
        """Evaluates the condition on the latest survey."""
        ...


class Ready:
    """Condition that enough agents answer, each of which can take a new room: its page /readyz answers 200."""

    calls: tuple[Call, ...] = (Call("status"),)

    def __init__(self, agents: int) -> None:
        self._agents = agents

    def progress(self, survey: Survey) -> Progress:
        answers = _running(survey)
        missing = [fault.text for fault in survey.faults]
        halts = [(agent.name, found) for agent, data in answers if (found := halt(data, agent.name)) is not None]
        missing += [f"{name} {found.text}" for name, found in halts]
        waiting = [(agent.name, data["waiting_for"], not_ready(data)) for agent, data in answers]
        missing += [f"{name}: {reason}" for name, _, reason in waiting if reason]
        if len(answers) < self._agents:
            there = f"{len(answers)} of {counted(self._agents, 'agent')} there"
            missing.insert(0, there if answers else "no agent is there yet")
        if missing:
            return Progress(missing=missing)
        # A decode rank is ready with one of its prefill instances.
        others = [f"{name} waits: {reason}" for name, reason, _ in waiting if reason]
        return Progress(_few([f"{counted(len(answers), 'agent')} ready", *others]))


class Drained:
    """Condition that every agent is draining and has no active room; agents that ended meanwhile count as drained."""

    calls: tuple[Call, ...] = (Call("status"),)

    def __init__(self) -> None:
        self._known: set[str] = set()  # addresses
        self._names: set[str] = set()  # of these agents, and of their endpoints if they do not answer

    def progress(self, survey: Survey) -> Progress:
        answers = _running(survey)
        answered = {agent.endpoint.address for agent, _ in answers}
        silent = [
            fault.text
            for fault in survey.faults
            # One that hangs, or that the network hides, may still have rooms.
            if fault.agent not in self._names or fault.code != FaultCode.UNREACHABLE
        ]
        ended = self._known - answered
        self._known |= answered
        self._names.update(name for agent, _ in answers for name in (agent.name, agent.own_name, agent.endpoint.name))
        if not self._known:
            return Progress(missing=silent or ["no agent is there"])
        accepting = [agent.name for agent, data in answers if not data.get("draining")]
        if accepting:
            verb = "take" if len(accepting) > 1 else "takes"
            text = f"{', '.join(accepting)} {verb} new rooms: kvctl drain {' '.join(accepting)}"
            return Progress(impossible=text)
        missing: list[str] = []
        for agent, data in answers:
            # Finished rooms are listed until their engine has polled them for the last time.
            active = sum(count for state, count in data["rooms"].items() if state not in {"Success", "Failed"})
            if active:
                missing.append(f"{agent.name}: {counted(active, 'room')} active")
        if missing or silent:
            return Progress(missing=[*missing, *silent])
        also = f", {counted(len(ended), 'agent')} ended" if ended else ""
        return Progress(f"{counted(len(answered), 'agent')} drained{also}")


def _running(survey: Survey) -> list[tuple[AgentAnswer, Any]]:
    """Returns the agents that answered `status` and whose process has not ended, each with its answer."""
    return [(agent, data) for agent, data in survey.answers("status") if agent.ended_ns is None]


@command(
    examples=[
        ("Start a load once eight agents are there and ready", "kvctl wait --for ready --agents 8 && run-load"),
        ("Stop a worker once its rooms are done", "kvctl wait --for drained -e decode-0 --timeout 5m"),
    ]
)
@click.option("--for", "goal", required=True, type=click.Choice(("ready", "drained")), help="What to wait for.")
@click.option(
    "--timeout",
    "patience",
    default="60s",
    show_default=True,
    metavar="TIME",
    help="Time to wait in all. The time for one answer of an agent: kvctl --timeout TIME wait …",
)
@click.option(
    "--agents",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of agents that must answer to be ready; without it one that has not started, or has ended, "
    "is not missed.",
)
def wait(settings: Settings, goal: str, patience: str, agents: int) -> None:
    """Wait until the fleet is ready or drained; reads the fleet four times a second.

    \b
    ready     every agent can take a new room, as its page /readyz says: a prefill rank is registered, a decode rank
              connected to a prefill instance, or its requests name them; and none is draining
    drained   every agent is draining and has no active room (with -e, -l: these agents)

    Exit code 0 when the condition holds, 4 when the time is up (stderr names what is missing), 1 when it can no longer
    be reached, because an agent takes new rooms.
    """
    live_only(settings)
    condition = Ready(agents) if goal == "ready" else Drained()
    wait_for(settings, condition, goal, Patience("--timeout", patience))


class Patience:
    """Longest time to wait, from the construction.

    Args:
        option: option of the command that has the time, for error texts.

    Raises:
        click.UsageError: the text is not a time.
    """

    def __init__(self, option: str, text: str) -> None:
        try:
            seconds = units.parse_seconds(text) / 1e9
        except ValueError as error:
            raise click.UsageError(f"{option}: {error}") from error
        self.text = text
        self._deadline_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left; at least 0."""
        return max(0.0, self._deadline_s - time.monotonic())


def wait_for(settings: Settings, condition: WaitCondition, goal: str, patience: Patience) -> None:
    """Surveys the selected agents four times a second until the condition holds; prints the result on stderr.

    Raises:
        CliError: the time is up, or the condition can no longer be reached.
    """
    output = Output(settings)
    with live(settings) as fleet, ProgressLine(settings.quiet) as line:
        while True:
            # An agent that does not answer must not keep the command beyond its time.
            fleet.timeout_ns = min(settings.timeout_ns, max(_LAST_SURVEY_NS, int(patience.left_s * 1e9)))
            state = condition.progress(fleet.survey(condition.calls))
            if state.reached or state.impossible or not patience.left_s:
                break
            line.show(f"{_few(state.missing)} ({patience.left_s:.0f} s left)")
            time.sleep(min(_PAUSE_S, patience.left_s))
    if state.impossible:
        raise CliError(state.impossible, ExitCode.FAILED)
    if not state.reached:
        raise CliError(f"not {goal} within {patience.text}; missing: {_few(state.missing)}", ExitCode.TIMEOUT)
    output.note(state.reached)


def _few(missing: Sequence[str]) -> str:
    more = len(missing) - _MAX_NAMED
    return "; ".join(missing[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
