"""`kvctl peers`: who is connected to whom, and what stands between them."""

from __future__ import annotations

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.reading import run
from kvctl.commands.settings import Settings
from kvctl.views.peers import PEERS
from kvctl.views.report import Report


@click.command(cls=KvctlCommand)
@pass_settings
def peers(settings: Settings) -> None:
    """Connections between agents: state, last heartbeat, round trip, lane, errors, incompatible factors."""
    run(settings, PEERS, (Call("peers"),), _read)


def _read(survey: Survey) -> Report:
    answers = survey.answers("peers")
    return Report(PEERS, [row for _, data in answers for row in data], len(answers), survey.faults)
