"""Finds the room of a request, for commands that take a room number or a request id."""

from __future__ import annotations

from kvctl.client.calls import Call
from kvctl.commands.queries import no_agent, source
from kvctl.commands.settings import Settings
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode

MAX_ROWS = 20_000  # rows; fits well into one answer, and by default agents keep fewer finished rooms
_MAX_NAMED = 4  # rooms named in an error


def room_number(settings: Settings, room: str) -> str:
    """Returns `room` if it is a number; otherwise the number of the room whose request id it is, or begins with it.

    Raises:
        CliError: there is no such room, or several rooms have ids that begin so.
    """
    if room.isdecimal():
        return room
    limit = {"limit": MAX_ROWS}
    calls = (Call("rooms", {"state": None, **limit}), Call("history", limit), Call("failed", limit))
    with source(settings) as fleet:
        survey = fleet.survey(calls)
    if not survey.agents:
        raise CliError(no_agent(settings, survey).message, ExitCode.NO_AGENT)
    answers = [data for call in calls for _, data in survey.answers(call.command)]
    rows = [row for data in answers for row in (data["rooms"] if isinstance(data, dict) else data)]
    names = [(str(row["room"]), str(row.get("request_id") or "")) for row in rows]
    named = [(number, name) for number, name in names if name.startswith(room)]
    found = dict(pair for pair in named if pair[1] == room) or dict(named)
    if not found:
        unanswered = f"; {len(survey.faults)} queries failed" if survey.faults else ""
        text = f"no agent knows a room of request {room}{unanswered}"
        raise CliError(f"{text}: kvctl rooms -o wide and kvctl rooms history -o wide show request ids")
    if len(found) > 1:
        listed = ", ".join(f"{number} ({name})" for number, name in list(found.items())[:_MAX_NAMED])
        raise CliError(f"{len(found)} rooms have request ids that begin with {room}: {listed}; pass a room number")
    return next(iter(found))
