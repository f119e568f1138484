"""Runs commands that change agents: selects the agents, asks for confirmation, sends the calls, reports each result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import click

from kvctl.client.calls import Call
from kvctl.client.endpoints import Endpoint
from kvctl.client.faults import Fault, FaultCode, metrics_only
from kvctl.client.fleet import AgentAnswer, Fleet, Survey
from kvctl.client.names import few_commas
from kvctl.commands.output import Output
from kvctl.commands.queries import conclude, live, live_only, no_agent
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import print_error, print_stderr
from kvctl.exit_codes import ExitCode
from kvctl.render.report import Block, Line, Report, Text
from kvctl.render.sanitize import printable
from kvctl.render.view import Column, Kind, Row, View
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.contract.commands import COMMANDS_BY_NAME, Level

_RESULTS = {"unchanged": "dim", "revoking": "yellow", "aside": "yellow", "draining": "yellow", "": "green"}

DONE = View(
    "done",
    (
        Column("agent"),
        Column("subject", help="Room, allocation, key or agent that the action changed."),
        Column("result", help="Result of the action.", styles=_RESULTS),
        Column("text", Kind.SENTENCE, help="Description of the change.", header="DETAIL"),
    ),
    sort=("agent", "subject"),
    empty="nothing was done",
)

Select = Callable[[Fleet, Survey], "Sequence[AgentAnswer] | str"]
"""Selects the agents to call; or returns an error text, or "" if there is nothing to do."""
Rounds = Iterable[Sequence[tuple[AgentAnswer, Call]]]
"""Calls to agents; a round begins when the previous one is answered."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


FORCE = "by force: writes that are still in flight may corrupt another room"


def yes_option(function: _Function) -> _Function:
    """Decorator that adds the option `--yes` to a command."""
    return click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation; needed in scripts.")(function)


def check_can_act(settings: Settings, *, yes: bool) -> None:
    """Checks that the command can run: once, on live agents, and with `--yes` or a terminal to ask on.

    Raises:
        click.UsageError: it cannot.
    """
    once_and_live(settings)
    if not yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(
            f"{click.get_current_context().command_path} asks for confirmation, which needs a terminal: add --yes"
        )


def act(
    settings: Settings,
    call: Call,
    question: Callable[[Sequence[AgentAnswer]], str],
    *,
    yes: bool,
    names: Sequence[str] = (),
    look: Sequence[Call] = (),
    select: Select = lambda fleet, survey: survey.agents,
    rounds: Callable[[Sequence[AgentAnswer]], Rounds] | None = None,
    listing: Callable[[], Sequence[str]] = tuple,
) -> NoReturn:
    """Sends `call` to the selected agents and prints each agent's result.

    Args:
        call: the command; its level determines whether the user may run it.
        question: builds the question for the user, without a question mark.
        names: further agents, in the form that `-e` accepts.
        look: queries sent first; `question` and `select` use the answers.
        rounds: builds the calls if they differ by agent; an agent that times out gets no further calls.
        listing: builds the lines above the question.

    Raises:
        click.UsageError: there is no terminal to ask on and no `--yes`, or `--from` or `--watch` is set.
        click.exceptions.Exit: always otherwise, with the exit code.
    """
    check_can_act(settings, yes=yes)
    output = Output(settings)
    output.selection(DONE)
    with live(settings.naming(names)) as fleet:
        survey = fleet.survey(look)
        survey.drop_unknown_room_faults()
        selected = select(fleet, survey) if survey.agents else []
        report = Report(DONE, [], 0, survey.faults, blocks=lambda kept, width: _result_lines(kept))
        if isinstance(selected, str):
            report.failure, report.answered = selected or None, 0 if selected else len(survey.agents)
            raise click.exceptions.Exit(_finish(output, settings, survey, report))
        running = [agent for agent in selected if agent.ended_ns is None]
        if not running:
            survey.faults += [Fault(agent.name, ErrorCode.REFUSED, "it has ended") for agent in selected]
        agents = permitted(running, call, survey.faults)
        if not agents:
            code = _finish(output, settings, survey, report)
            if code is ExitCode.OK:  # agents answered, but none was selected
                print_error(no_agent(settings, survey).message)
                code = ExitCode.NO_AGENT
            raise click.exceptions.Exit(code)
        for line in () if yes else listing():
            print_stderr(printable(line))
        if not yes and not click.confirm(f"{printable(question(agents))}?", default=False, err=True):
            print_error("nothing was done")
            raise click.exceptions.Exit(ExitCode.FAILED)
        interrupted = _send(fleet, rounds(agents) if rounds else [[(agent, call) for agent in agents]], report)
    code = _finish(output, settings, survey, report)
    raise click.exceptions.Exit(ExitCode.INTERRUPTED if interrupted else code)


def _finish(output: Output, settings: Settings, survey: Survey, report: Report) -> ExitCode:
    if report.rows or output.document:
        output.emit(report)
    return conclude(output, settings, survey, report)


def _send(fleet: Fleet, rounds: Rounds, report: Report) -> bool:
    """Sends the calls round by round and stores rows and faults in the report; returns whether Ctrl-C ended this."""
    faults = list(report.faults)
    rows: list[dict[str, Any]] = []
    silent: set[Endpoint] = set()
    try:
        for requests in rounds:
            names = {agent.endpoint: agent.name for agent, _ in requests}
            for reply in fleet.ask(
                [(agent.endpoint, call) for agent, call in requests if agent.endpoint not in silent]
            ):
                name = names[reply.endpoint]
                if reply.fault is None:
                    rows += [{**row, "agent": name} for row in reply.data]
                    report.answered += 1
                    continue
                faults.append(replace(reply.fault, agent=name))
                if reply.fault.code == FaultCode.TIMEOUT:
                    silent.add(reply.endpoint)
    except KeyboardInterrupt:
        return True
    finally:
        report.rows, report.faults = rows, faults
    return False


def once_and_live(settings: Settings) -> None:
    """Raises click.UsageError if `--from` or `--watch` is set; called by commands that change agents."""
    live_only(settings)
    if settings.watch_ns is not None:
        raise click.UsageError(f"--watch: {click.get_current_context().command_path} acts once; omit --watch")


def permitted(agents: Sequence[AgentAnswer], call: Call, faults: list[Fault]) -> list[AgentAnswer]:
    """Returns the agents that permit the call, and adds a fault for every other agent to `faults`."""
    needed = COMMANDS_BY_NAME[call.command].level
    able: list[AgentAnswer] = []
    for agent in agents:
        level = agent.hello["level"]
        if agent.endpoint.metrics:
            faults.append(metrics_only(agent.name, call.command))
        elif Level[level.upper()] >= needed:
            able.append(agent)
        else:
            text = f"{call.command} needs level {needed.label}, but your level is {level}"
            faults.append(Fault(agent.name, FaultCode.NOT_PERMITTED, text))
    return able


def named(agents: Sequence[AgentAnswer]) -> str:
    """Formats agent names for a question; of more than eight agents, names seven and counts the others."""
    return few_commas([agent.name for agent in agents], 8)


def _result_lines(rows: Sequence[Row]) -> list[Block]:
    """Formats the results of an action without truncating them, one line per result."""
    widths = {name: max((len(row[name]) for row in rows), default=0) for name in ("agent", "subject", "result")}
    lines: list[Line] = [
        [
            (f"{row['agent']:<{widths['agent']}}  ", ""),
            (f"{row['subject']:<{widths['subject']}}  ", ""),
            (f"{row['result']:<{widths['result']}}  ", _RESULTS.get(row["result"], _RESULTS[""])),
            (row["text"], ""),
        ]
        for row in rows
    ]
    return [Text(lines)]
