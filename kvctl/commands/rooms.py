"""`kvctl rooms`: lists rooms, shows the timeline of one room on all its ranks, and aborts rooms."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from kvctl.client.calls import Call
from kvctl.client.faults import Fault
from kvctl.client.fleet import AgentAnswer, Fleet, Survey
from kvctl.client.room_timeline import RoomTimeline, join, most_informative_first
from kvctl.commands.mutations import DONE, Rounds, act, check_can_act, yes_option
from kvctl.commands.options import ROW_LIMIT, KvctlGroup, RoomOrRequest
from kvctl.commands.output import Output
from kvctl.commands.queries import run
from kvctl.commands.room_number import MAX_ROWS, room_number
from kvctl.commands.settings import Settings
from kvctl.errors import CliError
from kvctl.render.report import Grid, Report, Text
from kvctl.render.rooms import (
    CAUSES,
    FAILED,
    HISTORY,
    ROOMS,
    SLOW,
    TIMELINE,
    cause_rows,
    dropped_note,
    failed_rows,
    failure_counts,
    finished_rows,
    rank_rows,
    room_blocks,
)
from kvctl.render.selection import ExpressionError, Selection, select
from kvctl.render.units import duration
from kvctl.render.view import Row, View
from kvctl_agent.contract.admin import ErrorCode
from kvctl_agent.contract.states import STATE_LABELS

_CLOCK_ROUNDS = 3
_ACTIVE_LIMIT = 1000
_FINISHED_LIMIT = 20
_FAILED_LIMIT = 100
_Function = TypeVar("_Function", bound=Callable[..., Any])
_MAX_REASON = 500
Aborts = dict[str, dict[str, dict[str, Any]]]
"""Rooms to abort: row of each agent, by room number and agent name."""


@click.group(cls=KvctlGroup, default="ls")
def rooms() -> None:
    """Active, finished and failed rooms; without a subcommand, like `kvctl rooms ls`."""


def _limit(default: int) -> Callable[[_Function], _Function]:
    return click.option(
        "-n", "--limit", type=ROW_LIMIT, default=default, show_default=True, help="Maximum number of rows."
    )


@rooms.command(
    "ls",
    view=ROOMS,
    short_help="List active rooms, the oldest first.",
    examples=[
        ("Active rooms, updated every two seconds", "kvctl rooms -w"),
        ("Rooms older than five seconds, one row each", "kvctl rooms --filter 'age>5s' -l role=decode"),
        ("Room numbers for a script", "kvctl rooms -o json | jq -r '.data[].room'"),
    ],
)
@click.option("--state", type=click.Choice(STATE_LABELS, case_sensitive=False), help="Only rooms in this state.")
@_limit(_ACTIVE_LIMIT)
def list_rooms(settings: Settings, state: str | None, limit: int) -> None:
    """List active rooms, the oldest first.

    There is a row for every rank of a room; with -l role=decode each room appears once per decode rank.
    """
    _table(settings, ROOMS, limit, state)


@rooms.command(
    view=HISTORY,
    short_help="List the rooms that finished last.",
    examples=[
        ("Rooms that finished last", "kvctl rooms history"),
        ("All finished rooms that the agents keep, as CSV", "kvctl rooms history -n 100000 -o csv > rooms.csv"),
    ],
)
@_limit(_FINISHED_LIMIT)
def history(settings: Settings, limit: int) -> None:
    """List finished rooms, the latest first."""
    _table(settings, HISTORY, limit)


@rooms.command(
    view=SLOW,
    short_help="List the slowest finished rooms.",
    examples=[("The five slowest rooms, at the decode ranks", "kvctl rooms slow -n 5 -l role=decode")],
)
@_limit(_FINISHED_LIMIT)
def slow(settings: Settings, limit: int) -> None:
    """List finished rooms, the slowest first."""
    _table(settings, SLOW, limit)


@rooms.command(
    view=FAILED,
    short_help="List failed rooms, with the first cause of each.",
    examples=[
        ("Failed rooms, the latest first", "kvctl rooms failed"),
        ("Rooms that failed because a rank was lost", "kvctl rooms failed --filter code=KV_PEER_LOST"),
        ("Failed rooms by cause, the most frequent first", "kvctl rooms failed --by cause"),
        ("Failures of the last ten minutes, as CSV", "kvctl rooms failed --filter 'ago<10m' -o csv > failed.csv"),
    ],
)
@_limit(_FAILED_LIMIT)
@click.option("--by", type=click.Choice(["cause"]), help="One row per cause, the most frequent first.")
def failed(settings: Settings, limit: int, by: str | None) -> None:
    """List failed rooms, the latest first, one row per room with its first cause on any rank.

    Agents keep failed rooms separately from other finished rooms (configuration key failed_rooms). `waits_for` lists
    the agents that have not confirmed the end of the room; its memory is not reused until they do. With --by cause,
    rooms are counted whose causes differ only in names and numbers; --filter still selects rooms.
    """
    view = CAUSES if by else FAILED
    selection = Output(replace(settings, columns=None, sort_by=None) if by else settings).selection(FAILED)
    settings = replace(settings, filters=()) if by else settings
    order = Output(settings).selection(view)

    def read(survey: Survey) -> Report:
        answers = survey.answers("failed")
        clocks = {agent.name: agent.clock for agent in survey.agents}
        found = failed_rows((row for _, data in answers for row in data["rooms"]), clocks, survey.at_ns)
        rooms = selection.rows(found)
        kept = order.rows(cause_rows(rooms)) if by else rooms
        notes = [text] if (text := dropped_note([(agent.name, data) for agent, data in answers])) else []
        if by and found and not rooms:
            notes.append("no failed rooms match --filter")
        if (more := len(kept) - limit) > 0:
            notes.append(f"{more} more {'cause' if by else 'failed room'}{'s' * (more > 1)}: raise --limit")
        return Report(
            view,
            kept[:limit] if kept or by else found,
            len(answers),
            survey.faults,
            blocks=lambda shown, width: [*([Text([failure_counts(rooms)])] if rooms else []), Grid(view, shown)],
            notes=notes,
        )

    run(settings, view, (Call("failed", {"limit": MAX_ROWS}),), read)


def _table(settings: Settings, view: View, limit: int, state: str | None = None) -> None:
    """Prints the first `limit` of all agents' rooms that pass the filters, in the selected order.

    Args:
        state: state of the active rooms to list; None for all.
    """
    selection = Output(settings).selection(view)
    active = view is ROOMS
    # In another order, the first rooms of an agent need not be among the first of its answer.
    most = max(limit, MAX_ROWS) if settings.filters or settings.sort_by else limit
    call = Call(view.name, {"limit": most, **({"state": state or _filtered_state(selection)} if active else {})})

    def read(survey: Survey) -> Report:
        answers = survey.answers(call.command)
        if active:
            found = [row for _, data in answers for row in data]
        else:
            found = finished_rows(((row, agent.clock) for agent, data in answers for row in data), survey.at_ns)
        kept = selection.rows(found)
        notes = []
        cut = [agent.name for agent, data in answers if active and len(data) >= most]
        if active and (len(kept) > limit or (cut and most == limit)):  # finished rooms are expected to be incomplete
            notes.append(f"only the first {limit:,} are shown: raise --limit")
        elif cut:
            notes.append(f"{', '.join(cut)}: only the {most:,} oldest rooms were read")
        return Report(view, kept[:limit] or found, len(answers), survey.faults, notes=notes)

    run(settings, view, (call,), read)


def _filtered_state(selection: Selection) -> str | None:
    """Returns the state required by a filter such as `state=Failed`, so that agents send only rooms in this state.

    Returns None if no filter requires a state.
    """
    named = {each.text.casefold() for each in selection.filters if each.column.name == "state" and each.operator == "="}
    return next((label for label in STATE_LABELS if label.casefold() in named), None)


@rooms.command(
    view=TIMELINE,
    short_help="Show one room on all its ranks: timeline, and the rank that failed first.",
    examples=[
        ("Room 7 on all its ranks", "kvctl rooms show 7"),
        ("The room of a request", "kvctl rooms show cmpl-7f3a"),
        ("Also as a trace for ui.perfetto.dev", "kvctl rooms show 7 --perfetto room-7.json"),
    ],
)
@click.argument("room", type=RoomOrRequest())
@click.option(
    "--perfetto",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write a trace for ui.perfetto.dev; if the number was reused, of the room shown first.",
)
def show(settings: Settings, room: str, perfetto: Path | None) -> None:
    """Show one active or recently finished room: the timeline of all its ranks, and the rank that failed first.

    ROOM is a room number, or the id of a request or its beginning, as `kvctl rooms -o wide` shows it.
    """
    room = room_number(settings, room)

    def read(survey: Survey) -> Report:
        answers = survey.answers("room")
        answered = len(answers) + survey.drop_unknown_room_faults()
        details = [detail for _, data in answers for detail in data]
        clocks = {agent.name: agent.clock for agent in survey.agents}
        silent = {fault.agent: fault.problem for fault in survey.faults}
        joined = most_informative_first(join(details, clocks, survey.hosts, silent))
        report = _room_report(room, joined, answered, survey.faults)
        if perfetto is not None and joined:
            _write_trace(perfetto, joined[0])
            report.notes.append(f"wrote {perfetto}: open it in ui.perfetto.dev")
        return report

    run(settings, TIMELINE, (Call("room", {"room": room}),), read, clock_rounds=_CLOCK_ROUNDS)


def _write_trace(path: Path, room: RoomTimeline) -> None:
    from kvctl.render.perfetto import trace

    try:
        path.write_text(json.dumps(trace(room)), encoding="utf-8")
    except OSError as error:
        path.unlink(missing_ok=True)
        raise CliError(f"cannot write {path}: {error.strerror}") from error


def _room_report(number: str, joined: Sequence[RoomTimeline], answered: int, faults: Sequence[Fault]) -> Report:
    timelines: list[list[Row]] = [
        [{"room": room.room, "nonce": room.nonce, **event} for event in room.timeline] for room in joined
    ]
    rows = [row for timeline in timelines for row in timeline]

    def split(kept: Sequence[Row]) -> list[tuple[RoomTimeline, list[Row]]]:
        passed = {id(row) for row in kept}
        filtered = [[row for row in timeline if id(row) in passed] for timeline in timelines]
        return list(zip(joined, filtered, strict=True))

    report = Report(
        TIMELINE,
        rows,
        answered,
        faults,
        objects=lambda kept: [_document(room, timeline) for room, timeline in split(kept)],
        blocks=lambda kept, width: [
            block for room, timeline in split(kept) for block in room_blocks(room, timeline, width)
        ],
    )
    if not joined and answered and not faults:
        report.failure = f"no agent knows room {number}; see kvctl rooms, and kvctl rooms history for finished ones"
    if len(joined) > 1:
        report.notes.append(f"room number {number} was used {len(joined)} times")
    dropped = sum(rank["timeline_dropped"] for room in joined for rank in room.ranks)
    if dropped:
        report.notes.append(f"{dropped} timeline events were dropped: raise timeline_events of the agents to keep more")
    return report


def _document(room: RoomTimeline, timeline: Sequence[Row]) -> dict[str, Any]:
    ranks = [{key: value for key, value in rank.items() if key != "timeline"} for rank in rank_rows(room)]
    return {
        "room": room.room,
        "nonce": room.nonce,
        "request_ids": room.request_ids,
        "state": room.state,
        "started_at_ns": room.started_at_ns,
        "first_failing_rank": room.failing_rank,
        "failure": room.failure,
        "owed_parts": [asdict(missing) for missing in room.missing_parts],
        "ranks": ranks,
        "clocks": [
            {"agent": agent, "host": room.hosts.get(agent), **asdict(clock)}
            for agent, clock in sorted(room.clocks.items())
        ],
        "parts": [asdict(part) for part in room.parts],
        "timeline": list(timeline),
    }


@rooms.command(
    view=DONE,
    short_help="Abort rooms on all their ranks.",
    examples=[
        ("One room", "kvctl rooms abort 7 --reason 'client disconnected'"),
        ("The room of a request", "kvctl rooms abort cmpl-7f3a"),
        ("Rooms older than a minute, after confirming the list", "kvctl rooms abort --filter 'age>1m'"),
        ("Rooms that wait for prefill-0, from a script", "kvctl rooms abort --filter 'missing=prefill-0' --yes"),
    ],
)
@click.argument("room", nargs=-1, type=RoomOrRequest())
@click.option("--reason", default="", metavar="TEXT", help="Text that is added to the room's failure on every rank.")
@yes_option
def abort(settings: Settings, room: tuple[str, ...], reason: str, yes: bool) -> None:
    """Abort each ROOM on all its ranks, or all active rooms that match --filter.

    ROOM is a room number, or the id of a request or its beginning, as `kvctl rooms -o wide` shows it. The requests
    fail; pages become free when their writers have drained. --filter takes the columns of kvctl rooms: if the row of
    one rank matches, the room is aborted on all ranks. The rooms are listed before the confirmation. The exit code is 0
    even if no room matches. Level: operate.
    """
    if len(reason) > _MAX_REASON:
        raise click.UsageError(f"--reason has {len(reason)} characters; at most {_MAX_REASON} are allowed")
    if bool(room) == bool(settings.filters):
        raise click.UsageError("name rooms, or select them with --filter 'age>5s', but not both")
    try:
        matching = select(ROOMS, filters=settings.filters)
    except ExpressionError as error:
        raise click.UsageError(str(error)) from error
    check_can_act(settings, yes=yes)
    wanted = tuple(dict.fromkeys(room_number(settings, each) for each in room))
    found: Aborts = {}

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
        selected = {row["room"] for row in matching.rows(row for _, data in answers for row in data)}
        for agent, data in answers:
            for row in data:
                if row["room"] in selected:
                    found.setdefault(row["room"], {})[agent.name] = row
        cut = [agent.name for agent, data in answers if len(data) >= _ACTIVE_LIMIT]
        if cut:
            survey.remarks.append(
                f"{', '.join(cut)}: only {_ACTIVE_LIMIT} rooms were read; repeat the command for the others"
            )
        if not found and answers:
            survey.remarks.append("no rooms match --filter: nothing was aborted")
            return ""
        return _agents(survey, found)

    def rounds(agents: Sequence[AgentAnswer]) -> Rounds:
        for number, ranks in found.items():
            call = _abort(number, reason)
            yield [(agent, call) for agent in agents if agent.name in ranks]

    act(
        replace(settings, filters=()),
        _abort("0", reason),
        lambda agents: _question(found),
        yes=yes,
        look=() if room else (Call("rooms", {"limit": _ACTIVE_LIMIT}),),
        select=named if room else filtered,
        rounds=rounds,
        listing=lambda: _listing(found),
    )


def _abort(room: str, reason: str) -> Call:
    return Call("abort", {"room": room, "reason": reason or None})


def _agents(survey: Survey, found: Aborts) -> list[AgentAnswer]:
    return [agent for agent in survey.agents if any(agent.name in ranks for ranks in found.values())]


def _question(found: Aborts) -> str:
    if len(found) == 1:
        return "".join(f"Abort room {room} ({_states(ranks)})" for room, ranks in found.items())
    return f"Abort these {len(found)} rooms"


def _listing(found: Aborts) -> list[str]:
    """Returns a line per room to print above the question; none for a single room, which the question describes."""
    ages = {room: duration(max(row["age_ns"] for row in ranks.values())) for room, ranks in found.items()}
    width = max(map(len, found))
    lines = [f"  {room:>{width}}  {ages[room]:>7}  {_states(ranks)}" for room, ranks in found.items()]
    return lines if len(found) > 1 else []


def _states(ranks: dict[str, dict[str, Any]]) -> str:
    return ", ".join(f"{agent} {row['state']}" for agent, row in ranks.items())
