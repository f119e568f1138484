"""`kvctl layers`: the waterfall of stages by layer group, and how much of it compute hid."""

from __future__ import annotations

from collections.abc import Sequence

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.reading import run
from kvctl.commands.rooms import RoomNumber
from kvctl.commands.settings import Settings
from kvctl.views.layers import LAYERS
from kvctl.views.report import Block, Grid, Report, Text
from kvctl.views.view import Row
from kvctl.views.waterfall import draw


@click.command(cls=KvctlCommand)
@click.option("--room", type=RoomNumber(), help="Only this room, with its real moments.")
@pass_settings
def layers(settings: Settings, room: str | None) -> None:
    """Where the time goes, by layer group: gate, gather, post, wire, arrive, scatter; exposed and overlapped time."""

    def read(survey: Survey) -> Report:
        answers = survey.answers("layers")
        strangers = survey.set_unknown_rooms_aside()
        rows = [row for _, data in answers for row in data]
        report = Report(LAYERS, rows, len(answers) + strangers, survey.faults, blocks=_blocks)
        if strangers and not answers and not survey.faults:
            report.failure = f"no agent knows room {room}; see kvctl rooms, and kvctl rooms history for finished ones"
        return report

    run(settings, LAYERS, (Call("layers", {"room": room}),), read)


def _blocks(kept: Sequence[Row], width: int) -> list[Block]:
    picture: list[Block] = [Text(draw(kept, width))] if kept else []
    return [*picture, Grid(LAYERS, kept)]
