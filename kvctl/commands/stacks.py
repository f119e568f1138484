"""`kvctl stacks`: prints the Python stack of every thread of the agents, to see why one that answers stands still."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import command
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.render.report import Line, Report, Text
from kvctl.render.view import Column, Kind, Row, View, Width

STACKS = View(
    "stacks",
    (
        Column("agent"),
        Column("thread", help="Name of the thread.", path="name"),
        Column("ident", Kind.ID, Width.WIDE, "Identifier of the thread."),
        Column("daemon", Kind.FLAG, Width.WIDE, "Whether the thread is a daemon thread."),
        Column("depth", Kind.COUNT, help="Number of frames.", path=lambda row: len(row["frames"])),
        Column("at", help="Innermost frame.", path=lambda row: row["frames"][-1] if row["frames"] else None),
        Column("frames", Kind.LIST, Width.WIDE, "All frames, outermost first."),
    ),
    sort=("agent", "thread"),
    empty="no threads",
)


@command(view=STACKS, examples=[("All threads of one agent", "kvctl stacks -e decode-0")])
def stacks(settings: Settings) -> None:
    """Print the Python stack of every thread of every agent, the innermost frame last.

    The thread that answers this command is included. A process that is stopped, or in which a thread keeps the
    interpreter (GIL), does not answer. For native frames use `py-spy dump --native --pid PID`.
    """
    run(settings, STACKS, (Call("stacks"),), _read)


def _read(survey: Survey) -> Report:
    answers = survey.answers("stacks")
    rows = [{"agent": agent.name, **thread} for agent, data in answers for thread in data]
    return Report(STACKS, rows, len(answers), survey.faults, blocks=lambda kept, width: [Text(_traceback(kept))])


def _traceback(rows: Sequence[Row]) -> list[Line]:
    """Formats threads and their frames like Python tracebacks."""
    lines: list[Line] = []
    for row in rows:
        if lines:
            lines.append([("", "")])
        kind = "daemon thread" if row["daemon"] else "thread"
        lines.append([(row["agent"], "bold"), (f"  {kind} ", ""), (row["name"], "bold"), (f"  {row['ident']}", "dim")])
        for frame in row["frames"]:
            location, _, code = frame.partition(": ")
            lines.append([("  ", ""), (location, "" if frame is row["frames"][-1] else "dim")])
            if code:
                lines.append([("      ", ""), (code, "cyan")])
    return lines
