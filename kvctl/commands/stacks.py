"""`kvctl stacks`: what every thread of the agents does right now, the first question about one that hangs."""

from __future__ import annotations

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.render.report import Report, Text
from kvctl.render.stacks import STACKS, traceback


@click.command(
    cls=KvctlCommand,
    view=STACKS,
    examples=[("All threads of one agent", "kvctl stacks -e decode-0")],
)
@pass_settings
def stacks(settings: Settings) -> None:
    """The Python stack of every thread of every agent, the innermost frame last.

    The admin thread that answers is among them. Native frames are not: for those, `py-spy dump --native --pid PID`.
    """
    run(settings, STACKS, (Call("stacks"),), _read)


def _read(survey: Survey) -> Report:
    answers = survey.answers("stacks")
    rows = [{"agent": agent.name, **thread} for agent, data in answers for thread in data]
    return Report(STACKS, rows, len(answers), survey.faults, blocks=lambda kept, width: [Text(traceback(kept))])
