"""`kvctl rooms`: active rooms, finished rooms, and one room over all the ranks that know it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from kvctl.client.calls import Call
from kvctl.client.faults import Fault
from kvctl.client.fleet import Survey
from kvctl.client.joined import JoinedRoom, join, most_informative_first
from kvctl.commands.names import RoomNumber
from kvctl.commands.options import KvctlGroup, pass_settings
from kvctl.commands.reading import run
from kvctl.commands.rooms_abort import abort
from kvctl.commands.settings import Settings
from kvctl.errors import CliError
from kvctl.views.report import Report
from kvctl.views.room_report import blocks, rank_rows
from kvctl.views.rooms import HISTORY, ROOMS, SLOW, TIMELINE
from kvctl.views.view import Row, View
from kvctl_agent.contract.states import STATE_LABELS

_CLOCK_ROUNDS = 3
_ALL = 1000
_FEW = 20
_Function = TypeVar("_Function", bound=Callable[..., Any])


@click.group(cls=KvctlGroup, default="ls")
def rooms() -> None:
    """Active and finished rooms, one row per room and rank; `kvctl rooms` alone lists the active ones."""


def _limit(default: int) -> Callable[[_Function], _Function]:
    return click.option(
        "-n", "--limit", type=click.IntRange(min=1), default=default, show_default=True, help="Rows per agent at most."
    )


@rooms.command(
    "ls",
    view=ROOMS,
    short_help="Active rooms, the oldest first.",
    examples=[
        ("Active rooms, read again every two seconds", "kvctl rooms -w"),
        ("Rooms older than five seconds, each once", "kvctl rooms --filter 'age>5s' -l role=decode"),
        ("Room numbers for a script", "kvctl rooms -o json | jq -r '.data[].room'"),
    ],
)
@click.option("--state", type=click.Choice(STATE_LABELS, case_sensitive=False), help="Only rooms in this state.")
@_limit(_ALL)
@pass_settings
def list_rooms(settings: Settings, state: str | None, limit: int) -> None:
    """Active rooms, the oldest first.

    Every rank that takes part in a room has its own row: -l role=decode shows each room once.
    """
    _table(settings, ROOMS, Call("rooms", {"state": state, "limit": limit}), limit)


@rooms.command(
    view=HISTORY,
    short_help="Rooms that finished last.",
    examples=[
        ("Rooms that finished last", "kvctl rooms history"),
        ("All rooms that the agents remember, as CSV", "kvctl rooms history -n 1000 -o csv > rooms.csv"),
    ],
)
@_limit(_FEW)
@pass_settings
def history(settings: Settings, limit: int) -> None:
    """Rooms that finished last, the latest first."""
    _table(settings, HISTORY, Call("history", {"limit": limit}))


@rooms.command(
    view=SLOW,
    short_help="Slowest finished rooms.",
    examples=[("The five slowest rooms of each decode rank", "kvctl rooms slow -n 5 -l role=decode")],
)
@_limit(_FEW)
@pass_settings
def slow(settings: Settings, limit: int) -> None:
    """Slowest finished rooms, the slowest first."""
    _table(settings, SLOW, Call("slow", {"limit": limit}))


def _table(settings: Settings, view: View, call: Call, cut_at: int | None = None) -> None:
    def read(survey: Survey) -> Report:
        answers = survey.answers(call.command)
        rows = [row for _, data in answers for row in data]
        notes = [
            f"{agent.name}: only {cut_at} rooms shown, raise --limit"
            for agent, data in answers
            if cut_at is not None and len(data) >= cut_at
        ]
        return Report(view, rows, len(answers), survey.faults, notes=notes)

    run(settings, view, (call,), read)


@rooms.command(
    view=TIMELINE,
    short_help="One room on all its ranks: timeline, and the rank that failed first.",
    examples=[
        ("Room 7 on all its ranks", "kvctl rooms show 7"),
        ("The same as a trace for ui.perfetto.dev", "kvctl rooms show 7 --perfetto room-7.json"),
    ],
)
@click.argument("room", type=RoomNumber())
@click.option(
    "--perfetto",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write it as a trace for ui.perfetto.dev; of a number used again, the use shown first.",
)
@pass_settings
def show(settings: Settings, room: str, perfetto: Path | None) -> None:
    """One room, active or finished lately: all its ranks on one timeline, and the rank that failed first."""

    def read(survey: Survey) -> Report:
        answers = survey.answers("room")
        answered = len(answers) + survey.set_unknown_rooms_aside()
        details = [detail for _, data in answers for detail in data]
        joined = most_informative_first(join(details, {agent.name: agent.clock for agent in survey.agents}))
        report = _room_report(room, joined, answered, survey.faults)
        if perfetto is not None and joined:
            _export(perfetto, joined[0])
            report.notes.append(f"written to {perfetto}: open it in ui.perfetto.dev")
        return report

    run(settings, TIMELINE, (Call("room", {"room": room}),), read, clock_rounds=_CLOCK_ROUNDS)


def _export(path: Path, room: JoinedRoom) -> None:
    from kvctl.views.perfetto import trace

    try:
        path.write_text(json.dumps(trace(room)), encoding="utf-8")
    except OSError as error:
        path.unlink(missing_ok=True)
        raise CliError(f"cannot write {path}: {error.strerror}") from error


def _room_report(number: str, joined: Sequence[JoinedRoom], answered: int, faults: Sequence[Fault]) -> Report:
    timelines: list[list[Row]] = [
        [{"room": room.room, "nonce": room.nonce, **event} for event in room.timeline] for room in joined
    ]
    rows = [row for timeline in timelines for row in timeline]

    def split(kept: Sequence[Row]) -> list[tuple[JoinedRoom, list[Row]]]:
        passed = {id(row) for row in kept}
        split = [[row for row in timeline if id(row) in passed] for timeline in timelines]
        return list(zip(joined, split, strict=True))

    report = Report(
        TIMELINE,
        rows,
        answered,
        faults,
        objects=lambda kept: [_document(room, timeline) for room, timeline in split(kept)],
        blocks=lambda kept, width: [block for room, timeline in split(kept) for block in blocks(room, timeline, width)],
    )
    if not joined and answered and not faults:
        report.failure = f"no agent knows room {number}; see kvctl rooms, and kvctl rooms history for finished ones"
    if len(joined) > 1:
        report.notes.append(f"room number {number} was used {len(joined)} times")
    dropped = sum(rank["timeline_dropped"] for room in joined for rank in room.ranks)
    if dropped:
        report.notes.append(f"{dropped} timeline events were not kept (timeline_events in the agents' configuration)")
    return report


def _document(room: JoinedRoom, timeline: Sequence[Row]) -> dict[str, Any]:
    ranks = [{key: value for key, value in rank.items() if key != "timeline"} for rank in rank_rows(room)]
    return {
        "room": room.room,
        "nonce": room.nonce,
        "state": room.state,
        "started_at_ns": room.started_at_ns,
        "first_failing_rank": room.failing_rank,
        "failure": room.failure,
        "ranks": ranks,
        "clocks": [
            {"agent": agent, "offset_ns": clock.offset_ns, "error_ns": clock.error_ns}
            for agent, clock in sorted(room.clocks.items())
        ],
        "parts": [
            {
                "writer": part.writer,
                "chunk": part.chunk,
                "layers": list(part.layers),
                "decode": part.decode,
                "moments": part.moments,
            }
            for part in room.parts
        ],
        "timeline": list(timeline),
    }


rooms.add_command(abort)
