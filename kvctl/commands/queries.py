"""How every reading command runs: ask the fleet, print, name what went wrong, and end with the right exit code."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import click

from kvctl.client.calls import Call
from kvctl.client.endpoints import missing
from kvctl.client.faults import Fault, FaultCode, exit_code, lines
from kvctl.client.fleet import Fleet, Source, Survey
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.exit_codes import ExitCode
from kvctl.render.report import Report
from kvctl.render.view import View
from kvctl_agent.contract.admin import socket_dir

Read = Callable[[Survey], Report]
_START = "kvctl demo"


def source(settings: Settings) -> Source:
    """Whom the user wants to ask: living agents, or the file of `--from`.

    Raises:
        CliError: the file cannot be read.
    """
    if settings.from_file is None:
        return Fleet(settings.endpoints, settings.labels, settings.timeout_ns, settings.keys)
    from kvctl.client.recordings import RecordingSource

    first = 0 if settings.watch_ns is not None else -1
    return RecordingSource(settings.from_file, settings.endpoints, settings.labels, at=first)


def live_only(settings: Settings) -> None:
    """Where a command acts: raises click.UsageError if it should act on a file."""
    if settings.from_file is not None:
        name = click.get_current_context().command_path
        raise click.UsageError(f"--from {settings.from_file}: {name} acts on living agents, and a file only remembers")


def run(settings: Settings, view: View, calls: Sequence[Call], read: Read, clock_rounds: int = 1) -> NoReturn:
    """Asks `calls` of every agent and prints what `read` makes of the answers, once or with `-w` again and again.

    Raises:
        click.exceptions.Exit: always, with the exit code.
    """
    output = Output(settings)
    output.selection(view)  # a wrong column is an error before anybody is asked
    with source(settings) as fleet, output.watching() if settings.watch_ns is not None else nullcontext():
        while True:
            survey = fleet.survey(calls, clock_rounds)
            with _understood(settings):
                report = read(survey)
                report.at_ns = survey.at_ns
                if settings.watch_ns is None and (report.answered or report.rows or output.document):
                    output.emit(report)
            code = conclude(output, settings, survey, report)
            if settings.watch_ns is not None:
                with _understood(settings):
                    output.redraw(report, _title(settings, survey))
            if settings.watch_ns is None or not fleet.advance():
                raise click.exceptions.Exit(code)
            time.sleep(settings.watch_ns / 1e9)


def follow(settings: Settings, calls: Callable[[], Sequence[Call]], step: Callable[[Output, Survey], None]) -> NoReturn:
    """Asks again and again, and leaves the printing of what is new to `step`; ends with Ctrl-C, or with the file.

    Raises:
        click.exceptions.Exit: the file has no more moments.
    """
    output = Output(settings)
    pause_ns = settings.watch_ns or 0
    complained: tuple[Fault, ...] | None = None
    with source(settings) as fleet:
        while True:
            started = time.monotonic_ns()
            survey = fleet.survey(calls())
            faults = tuple(survey.faults) or ((nobody(settings, survey),) if not survey.agents else ())
            if faults != complained:
                for line in lines(faults):
                    output.note(line)
                complained = faults
            with _understood(settings):
                step(output, survey)
            if not fleet.advance():
                raise click.exceptions.Exit(exit_code(len(survey.agents), faults))
            time.sleep(max(0, pause_ns - (time.monotonic_ns() - started)) / 1e9)


def conclude(output: Output, settings: Settings, survey: Survey, report: Report) -> ExitCode:
    """Says on stderr what went wrong and what was remarkable; returns the exit code."""
    for agent in survey.agents:
        output.detail(f"{agent.name}: answered in {agent.rtt_ns / 1e6:.2f} ms ({agent.endpoint.address})")
    for endpoint in survey.discovery.stale:
        output.detail(f"{endpoint.name}: stale socket {endpoint.path}")
    for line in lines(report.faults):
        output.complain(line)
    for note in (*survey.remarks, *report.notes):
        output.note(note)
    if report.failure is not None:
        output.complain(report.failure)
        return ExitCode.FAILED
    code = exit_code(report.answered, report.faults)
    if code is ExitCode.NO_AGENT and not report.faults:
        output.complain(nobody(settings, survey).message)
    if report.wrong and code in {ExitCode.OK, ExitCode.PARTIAL}:
        return ExitCode.FAILED
    return code


def nobody(settings: Settings, survey: Survey) -> Fault:
    """Why there is nobody to ask, and what to do about it."""
    if survey.filtered:
        wanted = ",".join(f"{key}={value}" for key, value in settings.labels.items())
        text = f"no agent is {wanted}; {survey.filtered} answered: kvctl agents"
    elif settings.from_file is not None:
        text = f"no agent was there when {settings.from_file} was made"
    else:
        stale = len(survey.discovery.stale)
        gone = f" ({stale} stale socket{'s' * (stale != 1)}: kvctl agents)" if stale else ""
        start = f"Start some here: {_START}"
        wrong = missing(socket_dir())
        text = f"no agent found. {start} ({wrong})" if wrong else f"no agent found in {socket_dir()}{gone}. {start}"
    return Fault("", FaultCode.UNREACHABLE, text)


def _understood(settings: Settings) -> AbstractContextManager[None]:
    """A file's answers may lack what this kvctl reads; a living agent's do so for a reason that we want to see."""
    if settings.from_file is None:
        return nullcontext()
    from kvctl.client.recordings import understood

    return understood(settings.from_file)


def _title(settings: Settings, survey: Survey) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(survey.at_ns / 1e9))
    name = click.get_current_context().command_path
    assert settings.watch_ns is not None
    every = f"every {settings.watch_ns / 1e9:g} s"
    return f"{name} · {every if settings.from_file is None else settings.from_file.name} · {at}"
