"""Runs reading commands: queries the agents, prints the report and the errors, and ends with the exit code."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import NoReturn

import click

from kvctl.client.calls import Call
from kvctl.client.endpoints import missing, public
from kvctl.client.faults import Fault, FaultCode, exit_code, lines
from kvctl.client.fleet import Fleet, Source, Survey
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.exit_codes import ExitCode
from kvctl.render.report import Report
from kvctl.render.view import View
from kvctl_agent.contract.admin import socket_dir
from kvctl_agent.contract.extras import install

Read = Callable[[Survey], Report]

_DISCOVERY_NS = 1_000_000_000
"""With `-w`, the longest time until a new agent is shown."""


def source(settings: Settings, at: int | None = None) -> Source:
    """Returns the source of the answers: the live agents, or the file of `--from`.

    Args:
        at: index of the snapshot of the file to begin with; by default the first with `-w`, otherwise the last.

    Raises:
        CliError: the file cannot be read.
    """
    if settings.from_file is None:
        discovery_ns = 0 if settings.watch_ns is None else _DISCOVERY_NS
        return live(settings, discovery_ns)
    from kvctl.client.recordings import RecordingSource

    if at is None:
        at = 0 if settings.watch_ns is not None else -1
    return RecordingSource(settings.from_file, settings.endpoints, settings.labels, at=at)


def live(settings: Settings, discovery_ns: int = 0) -> Fleet:
    """Returns the live agents that the user selected; `discovery_ns` as for `Fleet`."""
    return Fleet(
        settings.endpoints, settings.labels, settings.timeout_ns, settings.keys, discovery_ns, names=settings.names
    )


def live_only(settings: Settings) -> None:
    """Raises click.UsageError if `--from` is set; called by commands that need live agents."""
    if settings.from_file is not None:
        name = click.get_current_context().command_path
        raise click.UsageError(f"--from {settings.from_file}: {name} needs live agents; omit --from")


def run(settings: Settings, view: View, calls: Sequence[Call], read: Read, clock_rounds: int = 1) -> NoReturn:
    """Sends `calls` to every agent and prints the report that `read` builds, once or, with `-w`, repeatedly.

    Raises:
        click.exceptions.Exit: always, with the exit code.
    """
    output = Output(settings)
    output.selection(view)  # reports a wrong column before the agents are queried
    with source(settings) as fleet:
        while True:
            survey = fleet.survey(calls, clock_rounds)
            with _missing_data_explained(settings):
                report = read(survey)
                report.at_ns = survey.at_ns
                failed = report.failure and not report.rows and output.human
                if settings.watch_ns is None and not failed and (report.answered or report.rows or output.document):
                    output.emit(report)
                elif settings.watch_ns is not None:
                    output.redraw(report, _title(settings, survey))
            code = conclude(output, settings, survey, report)
            if settings.watch_ns is None or not fleet.advance():
                raise click.exceptions.Exit(code)
            time.sleep(settings.watch_ns / 1e9)


def follow(settings: Settings, calls: Callable[[], Sequence[Call]], step: Callable[[Output, Survey], None]) -> NoReturn:
    """Queries the agents repeatedly and passes each survey to `step`, until Ctrl-C or the end of the file.

    Args:
        calls: returns the queries of the next survey.
        step: prints the survey.

    Raises:
        click.exceptions.Exit: the file has no more snapshots.
    """
    output = Output(settings)
    pause_ns = settings.watch_ns or 0
    reported: tuple[Fault, ...] | None = None
    with source(settings) as fleet:
        while True:
            started = time.monotonic_ns()
            survey = fleet.survey(calls())
            faults = tuple(survey.faults) or ((no_agent(settings, survey),) if not survey.agents else ())
            if faults != reported:
                for line in lines(faults, survey.hosts):
                    output.note(line)
                reported = faults
            with _missing_data_explained(settings):
                step(output, survey)
            if not fleet.advance():
                raise click.exceptions.Exit(exit_code(len(survey.agents), faults))
            time.sleep(max(0, pause_ns - (time.monotonic_ns() - started)) / 1e9)


def conclude(output: Output, settings: Settings, survey: Survey, report: Report) -> ExitCode:
    """Prints the errors and notes of a report on stderr, and returns the exit code."""
    for agent in survey.agents:
        output.detail(f"{agent.name}: answered in {agent.rtt_ns / 1e6:.2f} ms ({agent.endpoint.shown_address})")
    for endpoint in survey.discovery.stale:
        output.detail(f"{endpoint.name}: stale socket {endpoint.path}")
    for line in lines(report.faults, survey.hosts):
        output.error(line)
    for note in (*survey.remarks, *report.notes):
        output.note(note)
    if report.failure is not None:
        output.error(report.failure)
        return ExitCode.FAILED
    code = exit_code(report.answered, report.faults)
    if code is ExitCode.NO_AGENT and not report.faults:
        output.error(no_agent(settings, survey).message)
    if report.wrong and code in {ExitCode.OK, ExitCode.PARTIAL}:
        return ExitCode.FAILED
    return code


def no_agent(settings: Settings, survey: Survey) -> Fault:
    """Returns the error for a survey without an answer, with the reason and the next step."""
    if survey.faults:
        text = "; ".join(lines(survey.faults, survey.hosts))
    elif survey.filtered:
        labels = ",".join(f"{key}={value}" for key, value in settings.labels.items())
        text = f"no agent has the labels {labels}; {survey.filtered} others answered: kvctl agents lists them"
    elif settings.from_file is not None:
        text = f"{settings.from_file} contains no agent: no agent was running when it was recorded"
    elif settings.endpoints:
        text = f"{', '.join(map(public, settings.endpoints))}: no agent is named there"
    else:
        stale = len(survey.discovery.stale)
        note = f" ({stale} stale socket{'s' * (stale != 1)}: kvctl agents)" if stale else ""
        start = "Start some here: kvctl demo"
        if find_spec("msgspec") is None:  # a requirement of the agent, but not of the command line
            start += f", which needs the agent: {install('nixl')}"
        problem = missing(socket_dir())
        text = f"no agent found. {start} ({problem})" if problem else f"no agent found in {socket_dir()}{note}. {start}"
    return Fault("", FaultCode.UNREACHABLE, text)


def _missing_data_explained(settings: Settings) -> AbstractContextManager[None]:
    """Returns a context in which a value that is missing in the file of `--from` is reported as an error of the file.

    With live agents a missing value is a bug, and the exception propagates.
    """
    if settings.from_file is None:
        return nullcontext()
    from kvctl.client.recordings import content_errors

    return content_errors(settings.from_file)


def _title(settings: Settings, survey: Survey) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(survey.at_ns / 1e9))
    name = click.get_current_context().command_path
    assert settings.watch_ns is not None
    every = f"every {settings.watch_ns / 1e9:g} s"
    return f"{name} · {every if settings.from_file is None else settings.from_file.name} · {at}"
