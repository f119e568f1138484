"""How every reading command runs: ask the fleet, print, name what went wrong, and end with the right exit code."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import click

from kvctl.client.calls import Call
from kvctl.client.faults import Fault, FaultCode, exit_code
from kvctl.client.fleet import Fleet, Survey
from kvctl.client.source import Source
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import complain
from kvctl.exit_codes import ExitCode
from kvctl.views.report import Report
from kvctl.views.view import View
from kvctl_agent.contract.admin import socket_dir

Read = Callable[[Survey], Report]
_START = "kvctl demo"


def source(settings: Settings) -> Source:
    """Whom the user wants to ask."""
    return Fleet(settings.endpoints, settings.labels, settings.timeout_ns, settings.keys)


def run(settings: Settings, view: View, calls: Sequence[Call], read: Read, clock_rounds: int = 1) -> NoReturn:
    """Asks `calls` of every agent and prints what `read` makes of the answers, once or with `-w` again and again.

    Raises:
        click.exceptions.Exit: always, with the exit code.
    """
    output = Output(settings)
    output.selection(view)  # a wrong column is an error before anybody is asked
    with source(settings) as fleet:
        if settings.watch_ns is None:
            survey = fleet.survey(calls, clock_rounds)
            report = read(survey)
            if report.answered or report.rows or output.format == "json":
                output.emit(report)
            raise click.exceptions.Exit(conclude(output, settings, survey, report))
        while True:
            survey = fleet.survey(calls, clock_rounds)
            report = read(survey)
            title = f"{click.get_current_context().command_path} · every {settings.watch_ns / 1e9:g} s · {_now()}"
            output.redraw(report, title)
            conclude(output, settings, survey, report)
            time.sleep(settings.watch_ns / 1e9)


def follow(settings: Settings, calls: Callable[[], Sequence[Call]], step: Callable[[Output, Survey], None]) -> NoReturn:
    """Asks again and again, and leaves the printing of what is new to `step`; ends with Ctrl-C."""
    output = Output(settings)
    pause_ns = settings.watch_ns or 0
    complained: tuple[Fault, ...] | None = None
    with source(settings) as fleet:
        while True:
            started = time.monotonic_ns()
            survey = fleet.survey(calls())
            faults = tuple(survey.faults) or ((nobody(settings, survey),) if not survey.agents else ())
            if faults != complained:
                for fault in faults:
                    output.note(f"{fault.agent}: {fault.message}" if fault.agent else fault.message)
                complained = faults
            step(output, survey)
            time.sleep(max(0, pause_ns - (time.monotonic_ns() - started)) / 1e9)


def conclude(output: Output, settings: Settings, survey: Survey, report: Report) -> ExitCode:
    """Says on stderr what went wrong and what was remarkable; returns the exit code."""
    for agent in survey.agents:
        output.detail(f"{agent.name}: answered in {agent.rtt_ns / 1e6:.2f} ms ({agent.endpoint.address})")
    for endpoint in survey.discovery.stale:
        output.detail(f"{endpoint.name}: stale socket {endpoint.path}")
    for fault in report.faults:
        complain(f"{fault.agent}: {fault.message}")
    for note in report.notes:
        output.note(note)
    if report.failure is not None:
        complain(report.failure)
        return ExitCode.FAILED
    code = exit_code(report.answered, report.faults)
    if code is ExitCode.NO_AGENT and not report.faults:
        complain(nobody(settings, survey).message)
    return code


def nobody(settings: Settings, survey: Survey) -> Fault:
    """Why there is nobody to ask, and what to do about it."""
    if survey.filtered:
        wanted = ",".join(f"{key}={value}" for key, value in settings.labels.items())
        text = f"no agent is {wanted}; {survey.filtered} answered: kvctl agents"
    else:
        stale = len(survey.discovery.stale)
        gone = f" ({stale} stale socket{'s' * (stale != 1)}: kvctl agents)" if stale else ""
        text = f"no agent found in {socket_dir()}{gone}. Start some here: {_START}"
    return Fault("", FaultCode.UNREACHABLE, text)


def _now() -> str:
    return time.strftime("%H:%M:%S")
