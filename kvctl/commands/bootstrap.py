"""`kvctl bootstrap`: what the registries of the prefill instances say, the first question about a fleet that waits."""

from __future__ import annotations

from collections.abc import Sequence

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.render.bootstrap import BOOTSTRAP, RANKS, instances
from kvctl.render.report import Block, Grid, Report, Text
from kvctl.render.view import Row

_MOST_RANKS = 32


@click.command(
    cls=KvctlCommand,
    view=BOOTSTRAP,
    examples=[("Ranks that are missing or not connected", "kvctl bootstrap")],
)
@pass_settings
def bootstrap(settings: Settings) -> None:
    """Per prefill instance: expected, registered and missing ranks, and the decode ranks that are connected to all.

    On a terminal the ranks are listed below. `waiting`: the registry lacks ranks; `silent`: it does not answer;
    `unanswered`: ranks that are registered but do not answer kvctl.
    """
    run(settings, BOOTSTRAP, (Call("bootstrap"), Call("peers"), Call("status")), _read)


def _read(survey: Survey) -> Report:
    answers = survey.answers("bootstrap")
    roles = {agent.name: agent.hello["role"] for agent in survey.agents}
    peers = [row for _, data in survey.answers("peers") for row in data]
    rows = instances((row for _, data in answers for row in data), peers, roles)
    waiting = [(agent.name, data["waiting_for"]) for agent, data in survey.answers("status") if data["waiting_for"]]

    def blocks(kept: Sequence[Row], width: int) -> list[Block]:
        picture: list[Block] = [Grid(BOOTSTRAP, kept)]
        for row in kept:
            # What is missing stands last and is what was asked for; of the rest there can be hundreds.
            cut = max(0, len(row["ranks"]) - _MOST_RANKS)
            picture.append(
                Grid(RANKS, row["ranks"][cut:], f"ranks of {row['registry']}" + f", the last {_MOST_RANKS}" * (cut > 0))
            )
        if waiting:
            lines = [[(f"{name} ", "bold"), (f"waits: {text}", "yellow")] for name, text in waiting]
            picture.append(Text(lines))
        return picture

    return Report(BOOTSTRAP, rows, len(answers), survey.faults, blocks=blocks)
