"""`kvctl layers`: shows stage times by layer group, the share that compute hid, and why forwards were not pipelined."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import command
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.render.layers import LAYERS, PipelineDecisions, busiest, draw_waterfall
from kvctl.render.report import Block, Grid, Report, Text
from kvctl.render.view import Row


@command(view=LAYERS, examples=[("Stage times of all layer groups", "kvctl layers")])
def layers(settings: Settings) -> None:
    """Show transfer times by layer group and stage, and the share of the transfer time that compute hid.

    The stages are ready, gate, queue, gather, post, wire, arrive and scatter. Times are medians over the group's parts;
    ready counts from the first layer group of the chunk. Below the table: the number of pipelined forwards, and the
    reasons for not pipelining the others. On a terminal, layer groups with few parts are left out, unless -o wide or
    --filter is given. kvctl rooms show draws the parts of one room.
    """
    everything = settings.output == "wide" or bool(settings.filters)

    def read(survey: Survey) -> Report:
        answers = survey.answers("layers")
        rows = [row for _, data in answers for row in data]
        decisions = PipelineDecisions(data for _, data in survey.answers("status"))

        def blocks(kept: Sequence[Row], width: int) -> list[Block]:
            shown = kept if everything else busiest(kept)
            waterfall: list[Block] = [Text(draw_waterfall(shown, width))] if kept else []
            more = f"{len(kept) - len(shown)} more layer groups, with fewer parts: -o wide shows all"
            rest: list[Block] = [Text([[(more, "dim")]])] if len(shown) < len(kept) else []
            reasons = [Text(lines)] if (lines := decisions.lines()) else []
            return [*waterfall, Grid(LAYERS, shown), *rest, *reasons]

        return Report(LAYERS, rows, len(answers), survey.faults, blocks=blocks)

    run(settings, LAYERS, (Call("layers"), Call("status", optional=True)), read)
