"""`kvctl staging`: rings, buffers, who is gated on what; and a picture of each ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlGroup, pass_settings
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.commands.staging_release import release
from kvctl.render import ring_map
from kvctl.render.report import Block, Grid, Report, Text
from kvctl.render.staging import ALLOCATIONS, GATED, STAGING
from kvctl.render.view import Row

_CALLS = (Call("staging"),)


@click.group(cls=KvctlGroup, default="show")
def staging() -> None:
    """Staging rings of decode ranks and staging buffers of prefill ranks; `kvctl staging` alone shows them."""


@staging.command(
    view=STAGING,
    short_help="Rings, buffers, oldest allocation, gated parts.",
    examples=[("Rings of decode ranks, read again every second", "kvctl staging -l role=decode -w 1")],
)
@pass_settings
def show(settings: Settings) -> None:
    """Rings and their use, the oldest allocation with its room, staging buffers, and which parts are gated on what."""
    run(settings, STAGING, _CALLS, _read_show)


@staging.command(
    "map",
    view=ALLOCATIONS,
    short_help="A picture of each ring.",
    examples=[
        ("The ring of one decode rank", "kvctl staging map -e decode-0"),
        ("Allocations older than a second, for a script", "kvctl staging map --filter 'age>1s' -o json"),
    ],
)
@pass_settings
def draw_map(settings: Settings) -> None:
    """A picture of each decode rank's ring: allocations by state, head, watermark.

    Formats for programs list the allocations.
    """
    run(settings, ALLOCATIONS, _CALLS, _read_map)


def _read_show(survey: Survey) -> Report:
    rows: list[dict[str, Any]] = [data for _, data in survey.answers("staging")]

    def blocks(kept: Sequence[Row], width: int) -> list[Block]:
        gated = [{"agent": row["agent"], **part} for row in kept for part in row["gated"]]
        return [Grid(STAGING, kept), *([Grid(GATED, gated, "gated parts")] if gated else [])]

    return Report(STAGING, rows, len(rows), survey.faults, blocks=blocks)


def _read_map(survey: Survey) -> Report:
    answers: list[dict[str, Any]] = [data for _, data in survey.answers("staging")]
    rings = [answer for answer in answers if answer["ring"] is not None]
    rows = [{"agent": ring["agent"], **each} for ring in rings for each in ring["ring"]["allocations"]]

    def blocks(kept: Sequence[Row], width: int) -> list[Block]:
        if not rings:
            return [Text([[("no decode rank has a staging ring", "dim")]])]
        pictures: list[Block] = [Text(ring_map.draw(ring, width)) for ring in rings]
        return [*pictures, Text([ring_map.legend()]), Grid(ALLOCATIONS, kept)]

    return Report(ALLOCATIONS, rows, len(answers), survey.faults, blocks=blocks)


staging.add_command(release)
