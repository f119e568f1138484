"""`kvctl rooms abort`: fail rooms on all their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import AgentAnswer, Fleet, Survey
from kvctl.commands.mutations import Rounds, act, yes_option
from kvctl.commands.names import RoomNumber
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.settings import Settings
from kvctl.render.expressions import ExpressionError
from kvctl.render.operations import DONE
from kvctl.render.rooms import ROOMS
from kvctl.render.selection import select
from kvctl.render.units import duration
from kvctl_agent.contract.admin import ErrorCode

Found = dict[str, dict[str, dict[str, Any]]]
"""Rooms to abort: room number, agent, its row of that room."""

_LONGEST_REASON = 500
_MOST_ROWS = 1000


@click.command(
    cls=KvctlCommand,
    view=DONE,
    filter_view=ROOMS,
    short_help="Fail rooms on all their ranks.",
    examples=[
        ("One room", "kvctl rooms abort 7 --reason 'client is gone'"),
        ("Rooms older than a minute, after a look at the list", "kvctl rooms abort --filter 'age>1m'"),
        ("Rooms that wait for prefill-0, from a script", "kvctl rooms abort --filter 'missing=prefill-0' --yes"),
    ],
)
@click.argument("room", nargs=-1, type=RoomNumber())
@click.option("--reason", default="", metavar="TEXT", help="Is added to the room's failure on every rank.")
@yes_option
@pass_settings
def abort(settings: Settings, room: tuple[str, ...], reason: str, yes: bool) -> None:
    """Fail each ROOM on every rank that knows it, or all active rooms that match --filter.

    The requests fail; pages are free once their writers have drained. --filter takes what kvctl rooms takes: a room is
    aborted on all its ranks where the row of one of them matches. The rooms are listed before you are asked. Exit code
    0 also when no room matches. Level: operate.
    """
    if len(reason) > _LONGEST_REASON:
        raise click.UsageError(f"--reason has {len(reason)} characters, at most {_LONGEST_REASON} are kept")
    if bool(room) == bool(settings.filters):
        raise click.UsageError("name rooms, or choose them with --filter 'age>5s', not both")
    try:
        matching = select(ROOMS, filters=settings.filters)
    except ExpressionError as error:
        raise click.UsageError(str(error)) from error
    wanted = tuple(dict.fromkeys(room))
    found: Found = {}

    def named(fleet: Fleet, survey: Survey) -> Sequence[AgentAnswer] | str:
        by_endpoint = {agent.endpoint: agent for agent in survey.agents}
        calls = [Call("room", {"room": number}) for number in wanted]
        for reply in fleet.ask([(endpoint, call) for call in calls for endpoint in by_endpoint]):
            if reply.fault is None:
                found.setdefault(reply.call.args["room"], {})[by_endpoint[reply.endpoint].name] = reply.data[0]
            elif reply.fault.code != ErrorCode.UNKNOWN_ROOM:
                survey.faults.append(reply.fault)
        unknown = [number for number in wanted if number not in found]
        if unknown:
            text = f"no agent knows room {', '.join(unknown)}"
            return f"{text}; see kvctl rooms, and kvctl rooms history for finished ones"
        return _agents(survey, found)

    def filtered(fleet: Fleet, survey: Survey) -> Sequence[AgentAnswer] | str:
        answers = survey.answers("rooms")
        chosen = {row["room"] for row in matching.rows(row for _, data in answers for row in data)}
        for agent, data in answers:
            for row in data:
                if row["room"] in chosen:
                    found.setdefault(row["room"], {})[agent.name] = row
        cut = [agent.name for agent, data in answers if len(data) >= _MOST_ROWS]
        if cut:
            survey.remarks.append(
                f"{', '.join(cut)}: only {_MOST_ROWS} rooms were looked at; run it again for the rest"
            )
        if not found and answers:
            survey.remarks.append("no rooms match --filter: nothing was aborted")
            return ""
        return _agents(survey, found)

    def rounds(agents: Sequence[AgentAnswer]) -> Rounds:
        for number, ranks in found.items():
            call = _call(number, reason)
            yield [(agent, call) for agent in agents if agent.name in ranks]

    act(
        replace(settings, filters=()),
        _call("0", reason),
        lambda agents: _question(found),
        yes=yes,
        look=() if room else (Call("rooms", {"limit": _MOST_ROWS}),),
        concerned=named if room else filtered,
        rounds=rounds,
        listing=lambda: _listing(found),
    )


def _call(room: str, reason: str) -> Call:
    return Call("abort", {"room": room, "reason": reason or None})


def _agents(survey: Survey, found: Found) -> list[AgentAnswer]:
    return [agent for agent in survey.agents if any(agent.name in ranks for ranks in found.values())]


def _question(found: Found) -> str:
    if len(found) == 1:
        return "".join(f"Abort room {room} ({_states(ranks)})" for room, ranks in found.items())
    return f"Abort these {len(found)} rooms"


def _listing(found: Found) -> list[str]:
    """A line for each of several rooms; one room is described by the question."""
    ages = {room: duration(max(row["age_ns"] for row in ranks.values())) for room, ranks in found.items()}
    width = max(map(len, found))
    lines = [f"  {room:>{width}}  {ages[room]:>7}  {_states(ranks)}" for room, ranks in found.items()]
    return lines if len(found) > 1 else []


def _states(ranks: dict[str, dict[str, Any]]) -> str:
    return ", ".join(f"{agent} {row['state']}" for agent, row in ranks.items())
