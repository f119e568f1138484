"""`kvctl wait`: for scripts that go on when a fleet is ready, drained, or done with a room."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence

import click

from kvctl.client.wait_conditions import Progress, WaitConditionError, parse
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.queries import live_only, source
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import progress
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.render import units

_PAUSE_S = 0.25
_MOST_NAMED = 5
_GOALS = ("ready", "drained", "room=")


@click.command(
    cls=KvctlCommand,
    examples=[
        ("Start a load once eight agents are there and connected", "kvctl wait --for ready --agents 8 && run-load"),
        ("Stop a worker once its rooms are done", "kvctl wait --for drained -e decode-0 --timeout 5m"),
        ("Wait for one room", "kvctl wait --for room=7:Success"),
    ],
)
@click.option(
    "--for",
    "goal",
    required=True,
    metavar="ready|drained|room=R:STATE",
    shell_complete=lambda ctx, param, text: [each for each in _GOALS if each.startswith(text)],
    help="What to wait for.",
)
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
    help="Agents that must answer to be ready: one that has not started is not missed otherwise.",
)
@pass_settings
def wait(settings: Settings, goal: str, patience: str, agents: int) -> None:
    """Wait until the fleet is ready or drained, or a room is in a state; reads the fleet four times a second.

    \b
    ready            every agent is connected to all the ranks that it needs
    drained          every agent is draining and has no active room (with -e, -l: these agents)
    room=7:Success   room 7 is in that state, or past it, on every rank that knows it

    Exit code 0 when the condition holds, 4 when the time is up (stderr names what is missing), 1 when it can no longer
    be reached, for example because the room has failed.
    """
    live_only(settings)
    try:
        wanted = parse(goal, agents)
    except WaitConditionError as error:
        raise click.UsageError(f"--for {error}") from error
    deadline = time.monotonic() + _seconds(patience)
    output = Output(settings)
    with source(settings) as fleet, _Line(settings.quiet) as line:
        while True:
            progress = wanted.look(fleet.survey(wanted.calls))
            left = deadline - time.monotonic()
            if progress.reached or progress.impossible or left <= 0:
                break
            line.show(f"{_few(progress.missing)} ({left:.0f} s left)")
            time.sleep(min(_PAUSE_S, left))
    _conclude(output, progress, goal, patience)


def _conclude(output: Output, progress: Progress, goal: str, patience: str) -> None:
    if progress.impossible:
        raise CliError(progress.impossible, ExitCode.FAILED)
    if not progress.reached:
        raise CliError(f"not {goal} within {patience}; missing: {_few(progress.missing)}", ExitCode.TIMEOUT)
    output.note(progress.reached)


def _seconds(text: str) -> float:
    try:
        return units.parse_seconds(text) / 1e9
    except ValueError as error:
        raise click.UsageError(f"--timeout: {error}") from error


def _few(missing: Sequence[str]) -> str:
    more = len(missing) - _MOST_NAMED
    return "; ".join(missing[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


class _Line:
    """One line of progress on stderr that is written over, and gone in the end; nothing where that is no terminal."""

    def __init__(self, quiet: bool) -> None:
        self._shown = not quiet and sys.stderr.isatty()
        self._dirty = False

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self._dirty:
            progress("")

    def show(self, text: str) -> None:
        if self._shown:
            progress(text[: shutil.get_terminal_size().columns - 1])
            self._dirty = True
