"""`kvctl staging`: rings, buffers, who is gated on what; and a picture of each ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import AgentAnswer, Fleet, Survey
from kvctl.commands.mutations import DONE, act, yes_option
from kvctl.commands.options import KvctlGroup, RoomNumber, pass_settings
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.render.report import Block, Grid, Report, Text
from kvctl.render.staging import ALLOCATIONS, GATED, STAGING, allocation_legend, draw_ring
from kvctl.render.units import duration, size
from kvctl.render.view import Row

_FORCE = "by force: what their writers still write may land in memory of another room"
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
        pictures: list[Block] = [Text(draw_ring(ring, width)) for ring in rings]
        return [*pictures, Text([allocation_legend()]), Grid(ALLOCATIONS, kept)]

    return Report(ALLOCATIONS, rows, len(answers), survey.faults, blocks=blocks)


class _Allocation(NamedTuple):
    agent: str
    serial: int


class AllocationName(click.ParamType[_Allocation]):
    """An allocation as the map and the health codes write it: AGENT:SERIAL."""

    name = "allocation"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> _Allocation:
        agent, separator, serial = str(value).rpartition(":")
        if not separator or not agent or not serial.isdecimal() or len(serial) > 18 or int(serial) == 0:
            self.fail(f"{value!r} is not AGENT:SERIAL, as in decode-0:17: kvctl staging map lists them", param, ctx)
        return _Allocation(agent, int(serial))


@staging.command(
    view=DONE,
    short_help="Free ring memory that a lost or stuck writer holds.",
    examples=[
        ("One allocation: kvctl staging map lists them", "kvctl staging release decode-0:17"),
        ("Everything that failed room 7 holds, its pages included", "kvctl staging release --room 7"),
    ],
)
@click.argument("allocation", type=AllocationName(), required=False)
@click.option("--room", type=RoomNumber(), help="Free all that this failed room holds, its pages included.")
@click.option("--force", is_flag=True, help="Also where nothing proves that its writer has ended: make sure first.")
@yes_option
@pass_settings
def release(settings: Settings, allocation: _Allocation | None, room: str | None, force: bool, yes: bool) -> None:
    """Free one ALLOCATION (AGENT:SERIAL) of a decode rank's ring, or with --room all that a failed room holds.

    A live writer is asked to give back what it has not written, and asks for another place. What a lost writer may
    still write to is freed only with --force: make sure first that its process is gone, because what it writes would
    land in memory of another room. Level: operate.
    """
    if (allocation is None) == (room is None):
        raise click.UsageError("name one allocation (AGENT:SERIAL), or a room with --room")
    if allocation is not None:
        _release_allocation(settings, allocation, force, yes)
    assert room is not None
    _release_room(settings, room, force, yes)


def _release_allocation(settings: Settings, wanted: _Allocation, force: bool, yes: bool) -> None:
    def holders(fleet: Fleet, survey: Survey) -> Sequence[AgentAnswer] | str:
        found = [agent for agent in survey.agents if agent.name == wanted.agent]
        return found or f"no agent named {wanted.agent} answers; there are: {', '.join(_names(survey))}"

    def question(agents: Sequence[AgentAnswer]) -> str:
        ring = agents[0].data["staging"]["ring"] if "staging" in agents[0].data else None
        rows = ring["allocations"] if ring else []
        held = next((row for row in rows if row["serial"] == wanted.serial), None)
        what = f"Release allocation {wanted.serial} of {wanted.agent}"
        if held is not None:
            nbytes, age = size(held["end"] - held["offset"]), duration(held["age_ns"])
            what += f" ({nbytes}, room {held['room']}, {held['state']} for {age}, writer {held['writer']})"
        return f"{what} {_FORCE}" if force else what

    names = () if settings.endpoints else (wanted.agent,)
    call = Call("release", {"serial": wanted.serial, "force": force})
    act(settings, call, question, yes=yes, names=names, look=(Call("staging"),), concerned=holders)


def _release_room(settings: Settings, room: str, force: bool, yes: bool) -> None:
    def holders(fleet: Fleet, survey: Survey) -> Sequence[AgentAnswer] | str:
        found = [agent for agent, _ in survey.answers("room") if agent.hello["role"] == "decode"]
        return found or f"no decode rank knows room {room}; kvctl rooms shows those that are active"

    def question(agents: Sequence[AgentAnswer]) -> str:
        what = f"Release all that room {room} holds on {', '.join(agent.name for agent in agents)}"
        return f"{what} {_FORCE}" if force else what

    call = Call("release", {"room": room, "force": force})
    act(settings, call, question, yes=yes, look=(Call("room", {"room": room}),), concerned=holders)


def _names(survey: Survey) -> list[str]:
    return [agent.name for agent in survey.agents]
