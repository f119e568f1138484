"""`kvctl staging`: lists rings, buffers and gated parts, draws a map of each ring, and releases ring memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import AgentAnswer, Fleet, Survey
from kvctl.commands.mutations import DONE, FORCE, act, check_can_act, yes_option
from kvctl.commands.options import KvctlGroup, Parsed, RoomOrRequest
from kvctl.commands.queries import run
from kvctl.commands.room_number import room_number
from kvctl.commands.settings import Settings
from kvctl.render.report import Block, Grid, Report, Text
from kvctl.render.staging import ALLOCATIONS, GATED, STAGING, allocation_legend, draw_ring
from kvctl.render.units import duration, size
from kvctl.render.view import Row

_CALLS = (Call("staging"),)


@click.group(cls=KvctlGroup, default="show")
def staging() -> None:
    """Staging rings of decode ranks and staging buffers of prefill ranks; without a subcommand, like show."""


@staging.command(
    view=STAGING,
    short_help="List rings, buffers, oldest allocations, gated parts.",
    examples=[("Rings of decode ranks, updated every second", "kvctl staging -l role=decode -w 1")],
)
def show(settings: Settings) -> None:
    """List rings and their use, the oldest allocation with its room, staging buffers, and gated parts."""
    run(settings, STAGING, _CALLS, _read_show)


@staging.command(
    "map",
    view=ALLOCATIONS,
    short_help="Draw each ring.",
    examples=[
        ("The ring of one decode rank", "kvctl staging map -e decode-0"),
        ("Allocations older than a second, for a script", "kvctl staging map --filter 'age>1s' -o json"),
    ],
)
def draw_map(settings: Settings) -> None:
    """Draw each decode rank's ring: allocations by state, head, watermark.

    The other formats (tsv, csv, json) contain the allocations.
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
        pictures: list[Block] = [Text(draw_ring(ring, width)) for ring in rings]
        return [*pictures, Text([allocation_legend()]), Grid(ALLOCATIONS, kept)]

    return Report(ALLOCATIONS, rows, len(answers), survey.faults, blocks=blocks)


class _Allocation(NamedTuple):
    agent: str
    serial: int


def _allocation(text: str) -> _Allocation:
    """Parses the name of an allocation, AGENT:SERIAL as in the map and in the health codes."""
    agent, separator, serial = text.rpartition(":")
    if not separator or not agent or not serial.isdecimal() or len(serial) > 18 or int(serial) == 0:
        raise ValueError(f"{text!r} is not AGENT:SERIAL, such as decode-0:17; kvctl staging map lists the allocations")
    return _Allocation(agent, int(serial))


@staging.command(
    view=DONE,
    short_help="Free ring memory of a lost or stuck writer.",
    examples=[
        ("One allocation of kvctl staging map", "kvctl staging release decode-0:17"),
        ("All ring memory and pages of the failed room 7", "kvctl staging release --room 7"),
    ],
)
@click.argument("allocation", type=Parsed("allocation", _allocation), required=False)
@click.option(
    "--room", type=RoomOrRequest(), help="Free all memory of this failed room, given by its number or request id."
)
@click.option("--force", is_flag=True, help="Free memory even if the writer may still write to it.")
@yes_option
def release(settings: Settings, allocation: _Allocation | None, room: str | None, force: bool, yes: bool) -> None:
    """Free one ALLOCATION (AGENT:SERIAL) of a decode rank's ring, or with --room all memory of a failed room.

    A live writer returns an allocation that it has not written, and requests another one. Memory to which a lost writer
    may still write is freed only with --force: first make sure that the writer's process has ended, because its writes
    would corrupt another room. Level: operate.
    """
    if (allocation is None) == (room is None):
        raise click.UsageError("name one allocation (AGENT:SERIAL), or a room with --room")
    if allocation is not None:
        _release_allocation(settings, allocation, force, yes)
    assert room is not None
    check_can_act(settings, yes=yes)
    _release_room(settings, room_number(settings, room), force, yes)


def _release_allocation(settings: Settings, wanted: _Allocation, force: bool, yes: bool) -> None:
    def holders(fleet: Fleet, survey: Survey) -> Sequence[AgentAnswer] | str:
        found = [agent for agent in survey.agents if agent.name == wanted.agent]
        names = ", ".join(agent.name for agent in survey.agents)
        return found or f"no agent named {wanted.agent} answers; there are: {names}"

    def question(agents: Sequence[AgentAnswer]) -> str:
        ring = agents[0].data["staging"]["ring"] if "staging" in agents[0].data else None
        rows = ring["allocations"] if ring else []
        row = next((row for row in rows if row["serial"] == wanted.serial), None)
        text = f"Release allocation {wanted.serial} of {wanted.agent}"
        if row is not None:
            nbytes, age = size(row["end"] - row["offset"]), duration(row["age_ns"])
            text += f" ({nbytes}, room {row['room']}, {row['state']} for {age}, writer {row['writer']})"
        return f"{text} {FORCE}" if force else text

    names = () if settings.endpoints else (wanted.agent,)
    call = Call("release", {"serial": wanted.serial, "force": force})
    act(settings, call, question, yes=yes, names=names, look=(Call("staging"),), select=holders)


def _release_room(settings: Settings, room: str, force: bool, yes: bool) -> None:
    def holders(fleet: Fleet, survey: Survey) -> Sequence[AgentAnswer] | str:
        found = [agent for agent, _ in survey.answers("room") if agent.hello["role"] == "decode"]
        return found or f"no decode rank knows room {room}; kvctl rooms lists the active rooms"

    def question(agents: Sequence[AgentAnswer]) -> str:
        text = f"Release all memory of room {room} on {', '.join(agent.name for agent in agents)}"
        return f"{text} {FORCE}" if force else text

    call = Call("release", {"room": room, "force": force})
    act(settings, call, question, yes=yes, look=(Call("room", {"room": room}),), select=holders)
