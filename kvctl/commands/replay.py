"""`kvctl replay`: runs recorded inputs through the state machines again and reports the first violated invariant."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl.render import units
from kvctl.render.report import Block, Grid, Line, Report, Text
from kvctl.render.view import Column, Kind, Row, View, Width
from kvctl_agent.contract.extras import install

_PROGRESS_EVERY_S = 2.0


def _span(row: Row) -> int | None:
    first, last = row["first_at_ns"], row["last_at_ns"]
    return None if first is None else last - first


REPLAYED = View(
    "replayed",
    (
        Column("agent"),
        Column("role"),
        Column("inputs", Kind.COUNT),
        Column("rooms", Kind.COUNT),
        Column("span", Kind.DURATION, path=_span),
        Column(
            "verdict",
            path=lambda row: "clean" if row["breach"] is None else row["breach"]["invariant"],
            styles={"clean": "green"},
        ),
        Column("at_input", Kind.COUNT, path=lambda row: row["breach"] and row["breach"]["number"]),
        Column("room", Kind.ID, path=lambda row: row["breach"] and row["breach"]["room"]),
        Column("missed", Kind.COUNT, Width.WIDE),
        Column("dropped", Kind.COUNT, Width.WIDE),
        Column("pieces", Kind.COUNT, Width.WIDE),
        Column("incarnation", width=Width.WIDE),
        Column("text", width=Width.WIDE, path=lambda row: row["breach"] and row["breach"]["text"]),
    ),
    sort=("agent",),
    empty="the recording has no agents",
)


@click.command(
    cls=KvctlCommand,
    examples=[
        ("Run a recording again", "kvctl replay incident.kvrec"),
    ],
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--agent", "agents", multiple=True, metavar="NAME", help="Only this agent's inputs. Repeatable.")
@click.option("--shrink/--no-shrink", default=True, show_default=True, help="Shorten the inputs of a breach.")
@click.option(
    "--shrink-seconds",
    type=click.FloatRange(min=0.1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to try.",
)
@pass_settings
def replay(
    settings: Settings,
    file: Path,
    agents: tuple[str, ...],
    shrink: bool,
    shrink_seconds: float,
) -> None:
    """Run the inputs saved by kvctl record or kvctl debug bundle through the state machines again.

    After every input, the actions of the machine are checked against invariants that do not rely on its own state.
    Exit code 0: no invariant is broken; 1: one is, and the output names it; 4: no result within an hour; 6: the
    recording is of another build.
    """
    output = Output(settings)
    output.selection(REPLAYED)
    try:
        from kvctl.lab.replay import verdicts
    except ModuleNotFoundError as error:
        raise CliError(f"the agent's side is not installed ({error}): {install('agent')}") from error
    rows = verdicts.replay(file, agents, shrink_seconds if shrink else None, _Progress(output))
    if not rows:
        raise CliError(f"{file}: it has no inputs of state machines (a redacted bundle never has): nothing to replay")
    broken = [row for row in rows if row["breach"] is not None]
    for row in rows:
        for note in row["notes"]:
            output.note(f"{row['agent']}: {note}")
    report = Report(REPLAYED, rows, len(rows), objects=list, blocks=lambda kept, _: _blocks(kept))
    output.emit(report)
    raise click.exceptions.Exit(ExitCode.FAILED if broken else ExitCode.OK)


class _Progress:
    """Prints progress as a remark at most every two seconds; shorter replays print none."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._printed_at = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._printed_at >= _PROGRESS_EVERY_S:
            self._printed_at = now
            self._output.note(f"replay: {text}")


def _blocks(rows: Sequence[Row]) -> list[Block]:
    """Returns the table of agents, followed by the breached invariant of each agent and the inputs that led to it."""
    return [Grid(REPLAYED, rows), *(Text(_story(row)) for row in rows if row["breach"] is not None)]


def _story(row: Row) -> list[Line]:
    breach: Mapping[str, Any] = row["breach"]
    shrunk: Mapping[str, Any] | None = row["shrunk"]
    number = units.count(breach["number"])
    lines: list[Line] = [
        [(f"{row['agent']} broke {breach['invariant']}", "bold red"), (f" at input {number}: {breach['text']}", "")]
    ]
    story = breach["story"]
    if shrunk is not None:
        early = " (the time was up before every input had been tried)" if shrunk["early"] else ""
        lines.append([(f"{units.count(shrunk['inputs'])} inputs are enough{early}; the last ones:", "")])
        story = shrunk["story"]
    lines += [[(f"  {line}", "dim" if line.startswith(" ") else "")] for line in story]
    return lines
