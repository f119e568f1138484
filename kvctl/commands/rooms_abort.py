"""`kvctl rooms abort`: fail one room on all its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import AgentAnswer, Survey
from kvctl.commands.acting import act, yes_option
from kvctl.commands.names import RoomNumber
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.settings import Settings
from kvctl.views.operations import DONE

_LONGEST_REASON = 500


@click.command(cls=KvctlCommand, view=DONE, short_help="Fail one room on all its ranks.")
@click.argument("room", type=RoomNumber())
@click.option("--reason", default="", metavar="TEXT", help="Goes into the room's failure on every rank.")
@yes_option
@pass_settings
def abort(settings: Settings, room: str, reason: str, yes: bool) -> None:
    """Fail ROOM on every rank that knows it; its request fails, its pages are free once its writers have drained.

    Level: operate.
    """
    if len(reason) > _LONGEST_REASON:
        raise click.UsageError(f"--reason has {len(reason)} characters, at most {_LONGEST_REASON} are kept")

    def ranks(survey: Survey) -> Sequence[AgentAnswer] | str:
        found = [agent for agent, _ in survey.answers("room")]
        return found or f"no agent knows room {room}; see kvctl rooms, and kvctl rooms history for finished ones"

    def question(agents: Sequence[AgentAnswer]) -> str:
        states = [f"{agent.name} {agent.data['room'][0]['state']}" for agent in agents]
        return f"abort room {room} ({', '.join(states)})"

    call = Call("abort", {"room": room, "reason": reason or None})
    act(settings, call, question, yes=yes, look=(Call("room", {"room": room}),), concerned=ranks)
