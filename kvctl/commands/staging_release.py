"""`kvctl staging release`: give back what a writer that is gone, or stuck, holds on a decode rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import AgentAnswer, Fleet, Survey
from kvctl.commands.mutations import act, yes_option
from kvctl.commands.names import RoomNumber
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.settings import Settings
from kvctl.render.operations import DONE
from kvctl.render.units import duration, size

_FORCE = "by force: what their writers still write may land in memory of another room"


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


@click.command(
    cls=KvctlCommand,
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
