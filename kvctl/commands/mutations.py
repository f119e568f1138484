"""How every command that acts runs: see whom it concerns, ask the person, tell the agents, report what each did."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import click

from kvctl.client.calls import Call
from kvctl.client.faults import Fault, FaultCode
from kvctl.client.fleet import AgentAnswer, Fleet, Survey
from kvctl.commands.output import Output
from kvctl.commands.queries import conclude, live_only, nobody
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import complain, tell
from kvctl.exit_codes import ExitCode
from kvctl.render.report import Block, Line, Report, Text
from kvctl.render.sanitize import printable
from kvctl.render.view import Column, Row, View
from kvctl_agent.contract.commands import COMMANDS_BY_NAME, Level

_RESULTS = {"unchanged": "dim", "revoking": "yellow", "aside": "yellow", "draining": "yellow", "": "green"}

DONE = View(
    "done",
    (
        Column("agent"),
        Column("subject", help="Room, allocation, key or agent that the action changed."),
        Column("result", styles=_RESULTS, help="Result of the action."),
        Column("text", header="WHAT", help="Description of what the agent did."),
    ),
    sort=("agent", "subject"),
    empty="nothing was done",
)

Concerned = Callable[[Fleet, Survey], "Sequence[AgentAnswer] | str"]
"""From the answers to the agents that are to be told; or why that is impossible; or "" where there is nothing to do."""
Rounds = Iterable[Sequence[tuple[AgentAnswer, Call]]]
"""Calls to agents; the next round begins when the one before is answered."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def yes_option(function: _Function) -> _Function:
    """`--yes`, which a command that acts needs where nobody can be asked."""
    return click.option("-y", "--yes", is_flag=True, help="Do not ask first; needed in scripts.")(function)


def act(
    settings: Settings,
    call: Call,
    question: Callable[[Sequence[AgentAnswer]], str],
    *,
    yes: bool,
    names: Sequence[str] = (),
    look: Sequence[Call] = (),
    concerned: Concerned = lambda fleet, survey: survey.agents,
    rounds: Callable[[Sequence[AgentAnswer]], Rounds] | None = None,
    listing: Callable[[], Sequence[str]] = tuple,
) -> NoReturn:
    """Tells agents `call` and prints what each has done.

    Args:
        question: what the person is asked, ending without a question mark.
        names: agents as `-e` takes them, beside those of `-e`.
        look: what is read first, for `question` and `concerned`.
        rounds: other calls of the same command; an agent that has not answered one is asked no more.
        listing: lines above the question.

    Raises:
        click.UsageError: it cannot be asked and was not told --yes, or it should act on a file or again and again.
        click.exceptions.Exit: always otherwise, with the exit code.
    """
    once_and_live(settings)
    if not yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise click.UsageError(
            f"{click.get_current_context().command_path} asks for confirmation, which needs a terminal: add --yes"
        )
    output = Output(settings)
    output.selection(DONE)
    with Fleet((*settings.endpoints, *names), settings.labels, settings.timeout_ns, settings.keys) as fleet:
        survey = fleet.survey(look)
        survey.set_unknown_rooms_aside()
        chosen = concerned(fleet, survey) if survey.agents else []
        report = Report(DONE, [], 0, survey.faults, blocks=lambda kept, width: done_lines(kept))
        if isinstance(chosen, str):
            report.failure, report.answered = chosen or None, 0 if chosen else len(survey.agents)
            if output.document:
                output.emit(report)
            raise click.exceptions.Exit(conclude(output, settings, survey, report))
        agents = permitted(chosen, call, survey.faults)
        if not agents:
            raise click.exceptions.Exit(_none_to_tell(output, settings, survey, report))
        for line in () if yes else listing():
            tell(printable(line))
        if not yes and not click.confirm(f"{printable(question(agents))}?", default=False, err=True):
            complain("nothing was done")
            raise click.exceptions.Exit(ExitCode.FAILED)
        interrupted = _ask(fleet, rounds(agents) if rounds else [[(agent, call) for agent in agents]], report)
    if report.rows or output.document:
        output.emit(report)
    code = conclude(output, settings, survey, report)
    raise click.exceptions.Exit(ExitCode.INTERRUPTED if interrupted else code)


def _ask(fleet: Fleet, rounds: Rounds, report: Report) -> bool:
    """Asks round by round and puts what came of it into the report; whether Ctrl-C ended it early."""
    faults = list(report.faults)
    rows: list[dict[str, Any]] = []
    silent: set[str] = set()
    try:
        for requests in rounds:
            for reply in fleet.ask([(agent.endpoint, call) for agent, call in requests if agent.name not in silent]):
                if reply.fault is None:
                    rows += reply.data
                    report.answered += 1
                    continue
                faults.append(reply.fault)
                if reply.fault.code == FaultCode.TIMEOUT:
                    silent.add(reply.endpoint.name)
    except KeyboardInterrupt:
        return True
    finally:
        report.rows, report.faults = rows, faults
    return False


def once_and_live(settings: Settings) -> None:
    """Raises click.UsageError where a command that acts should do so on a file, or again and again."""
    live_only(settings)
    if settings.watch_ns is not None:
        raise click.UsageError(f"--watch: {click.get_current_context().command_path} acts once")


def permitted(agents: Sequence[AgentAnswer], call: Call, faults: list[Fault]) -> list[AgentAnswer]:
    """Those that let us do this; the others go to the faults, before anything is done anywhere."""
    needs = COMMANDS_BY_NAME[call.command].level
    able: list[AgentAnswer] = []
    for agent in agents:
        level = agent.hello["level"]
        if Level[level.upper()] >= needs:
            able.append(agent)
        else:
            text = f"{call.command} needs level {needs.label}, and you have {level} there"
            faults.append(Fault(agent.name, FaultCode.NOT_PERMITTED, text))
    return able


def named(agents: Sequence[AgentAnswer]) -> str:
    """Agents in a question, not too many of them."""
    names = [agent.name for agent in agents]
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:7])} and {len(names) - 7} more"


def _none_to_tell(output: Output, settings: Settings, survey: Survey, report: Report) -> ExitCode:
    if output.document:
        output.emit(report)
    code = conclude(output, settings, survey, report)
    if code is ExitCode.OK:  # agents answered, and none of them is concerned
        complain(nobody(settings, survey).message)
        return ExitCode.NO_AGENT
    return code


def done_lines(rows: Sequence[Row]) -> list[Block]:
    """Formats the results of actions, one per line and never truncated."""
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
