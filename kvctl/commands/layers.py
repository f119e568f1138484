"""`kvctl layers`: the waterfall of stages by layer group, how much of it compute hid, and what was pipelined why."""

from __future__ import annotations

from collections.abc import Sequence

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlCommand, RoomNumber, pass_settings
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.render.layers import LAYERS, PipelineDecisions, draw_waterfall
from kvctl.render.report import Block, Grid, Report, Text
from kvctl.render.view import Row


@click.command(
    cls=KvctlCommand,
    view=LAYERS,
    examples=[
        ("Stage times of all layer groups", "kvctl layers"),
        ("One room, with its own times", "kvctl layers --room 7"),
    ],
)
@click.option("--room", type=RoomNumber(), help="Only this room, with its own times.")
@pass_settings
def layers(settings: Settings, room: str | None) -> None:
    """Transfer times by layer group (ready, gate, gather, post, wire, arrive, scatter), and how much compute hid.

    Times are medians over the group's parts; ready is how much later than the first group it was computed. Below the
    table: how many forwards were pipelined, and why the others were not.
    """

    def read(survey: Survey) -> Report:
        answers = survey.answers("layers")
        strangers = survey.set_unknown_rooms_aside()
        rows = [row for _, data in answers for row in data]
        decisions = PipelineDecisions(data for _, data in survey.answers("status"))

        def blocks(kept: Sequence[Row], width: int) -> list[Block]:
            picture: list[Block] = [Text(draw_waterfall(kept, width))] if kept else []
            reasons = [Text(lines)] if room is None and (lines := decisions.lines()) else []
            return [*picture, Grid(LAYERS, kept), *reasons]

        report = Report(LAYERS, rows, len(answers) + strangers, survey.faults, blocks=blocks)
        if strangers and not answers and not survey.faults:
            report.failure = f"no agent knows room {room}; see kvctl rooms, and kvctl rooms history for finished ones"
        return report

    run(settings, LAYERS, (Call("layers", {"room": room}), *([Call("status")] if room is None else [])), read)
