"""`kvctl layers`: shows stage times by layer group, the share that compute hid, and why forwards were not pipelined."""

from __future__ import annotations

from collections.abc import Sequence

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import RoomOrRequest, command
from kvctl.commands.queries import run
from kvctl.commands.room_number import room_number
from kvctl.commands.settings import Settings
from kvctl.render.layers import LAYERS, PipelineDecisions, busiest, draw_waterfall
from kvctl.render.report import Block, Grid, Report, Text
from kvctl.render.view import Row


@command(
    view=LAYERS,
    examples=[
        ("Stage times of all layer groups", "kvctl layers"),
        ("The times of one room", "kvctl layers --room 7"),
    ],
)
@click.option("--room", type=RoomOrRequest(), help="Only the times of this room, given by its number or request id.")
def layers(settings: Settings, room: str | None) -> None:
    """Show transfer times by layer group and stage, and the share of the transfer time that compute hid.

    The stages are ready, gate, queue, gather, post, wire, arrive and scatter. Times are medians over the group's parts;
    ready counts from the first layer group of the chunk. Below the table: the number of pipelined forwards, and the
    reasons for not pipelining the others. On a terminal, layer groups with few parts are left out, unless -o wide,
    --room or --filter is given.
    """
    everything = settings.output == "wide" or room is not None or bool(settings.filters)
    room = room_number(settings, room) if room is not None else None

    def read(survey: Survey) -> Report:
        answers = survey.answers("layers")
        without_room = survey.drop_unknown_room_faults()
        rows = [row for _, data in answers for row in data]
        decisions = PipelineDecisions(data for _, data in survey.answers("status"))

        def blocks(kept: Sequence[Row], width: int) -> list[Block]:
            shown = kept if everything else busiest(kept)
            waterfall: list[Block] = [Text(draw_waterfall(shown, width))] if kept else []
            more = f"{len(kept) - len(shown)} more layer groups, with fewer parts: -o wide shows all"
            rest: list[Block] = [Text([[(more, "dim")]])] if len(shown) < len(kept) else []
            reasons = [Text(lines)] if room is None and (lines := decisions.lines()) else []
            return [*waterfall, Grid(LAYERS, shown), *rest, *reasons]

        report = Report(LAYERS, rows, len(answers) + without_room, survey.faults, blocks=blocks)
        if without_room and not answers and not survey.faults:
            report.failure = f"no agent knows room {room}; see kvctl rooms, and kvctl rooms history for finished ones"
        return report

    run(
        settings,
        LAYERS,
        (Call("layers", {"room": room}), *([Call("status", optional=True)] if room is None else [])),
        read,
    )
