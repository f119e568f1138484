"""Views of rooms: active, finished and failed rooms; the report of one room with its ranks, parts and timeline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from kvctl.client.clock import ClockOffset
from kvctl.client.room_timeline import RoomTimeline, join
from kvctl.render import palette, units
from kvctl.render.bars import drawn_stages, legend, segments
from kvctl.render.clocks import corrections
from kvctl.render.findings import without_names
from kvctl.render.report import Block, Grid, Line, Span, Text
from kvctl.render.view import Column, Kind, Row, View, Width
from kvctl_agent.contract.values import layer_range

if TYPE_CHECKING:
    from kvctl_agent.contract.snapshots import RoomDetail


def _progress(row: Row) -> str | None:
    """Formats cells done of cells planned, `3/8`: scattered on a decode rank, sent on a prefill rank."""
    coverage = row.get("coverage")
    if not coverage:
        return None
    done = coverage["scattered"] if row["role"] == "decode" else coverage["sent"]
    return None if done is None else f"{done}/{coverage['planned']}"


def _failure(row: Row) -> str | None:
    failure = row.get("failure")
    return failure and f"{failure['code']} at {failure['rank']}: {failure['text']}"


def _state_age(row: Row) -> Any:
    """Returns how long an active room has been in its state; None for a finished room, whose state is final."""
    return None if row.get("finished_at_ns") is not None else row.get("state_age_ns")


_REQUEST = Column(
    "request_id", width=Width.WIDE, help="The engine's id of the request, if it has one.", header="REQUEST"
)

_ROOM = Column("room", Kind.ID)
_AGENT = Column("agent")
_ROLE = Column("role", width=Width.NORMAL, styles=palette.ROLES)
_STATE = Column("state", help="Bootstrapping, WaitingForInput, Transferring, Success or Failed.", styles=palette.STATES)
_LATENCY = Column(
    "latency",
    Kind.DURATION,
    Width.NORMAL,
    "Decode rank: from open to success. Prefill rank: from the first ready part until the room is sent.",
)
_PROGRESS = Column(
    "progress",
    width=Width.NORMAL,
    help="Cells done of cells planned: scattered on a decode rank, sent on a prefill rank.",
    path=_progress,
    header="CELLS",
)
_BYTES = Column("bytes", Kind.BYTES, Width.NORMAL)
_FAILURE = Column("failure", help="First cause of the failure: code, rank and text.", path=_failure)
_TOKENS = Column("tokens", Kind.COUNT, Width.NORMAL)
_DETAILS = (
    _REQUEST,
    Column("missing", Kind.LIST, Width.WIDE, "Agents whose message ends this state.", header="WAITS FOR"),
    Column("owed", Kind.MAP, Width.WIDE, "Decode rank: cells that have not landed, by writer."),
    Column("paths", Kind.MAP, Width.NORMAL),
    Column("landed", Kind.COUNT, Width.WIDE, path="coverage.landed"),
    Column("pages", Kind.COUNT, Width.WIDE, "Pages of the room on this rank."),
    Column("parts", Kind.COUNT, Width.WIDE, "Parts transferred so far."),
    Column("peers", Kind.LIST, Width.WIDE, "Agents at the other end of the room."),
    Column("hidden", Kind.DURATION, Width.WIDE),
    Column("exposed", Kind.DURATION, Width.WIDE),
    Column("opened_at", Kind.TIME, Width.WIDE, "Time at which the room was opened."),
    Column("forward_done_at", Kind.TIME, Width.WIDE, "Prefill rank: end of the forward of the prompt."),
    Column("finished_at", Kind.TIME, Width.WIDE, "Time at which the room finished."),
    Column("nonce", Kind.ID, Width.WIDE),
)
_FINISHED = (
    _ROOM,
    _AGENT,
    _ROLE,
    _STATE,
    Column("ago", Kind.DURATION, help="Time since the room ended."),
    Column("age", Kind.DURATION, help="Time from open to end.", header="LASTED"),
    _LATENCY,
    _FAILURE,
    _BYTES,
    _PROGRESS,
    _TOKENS,
    *_DETAILS,
)

ROOMS = View(
    "rooms",
    (
        _ROOM,
        _AGENT,
        _ROLE,
        _STATE,
        Column("state_age", Kind.DURATION, Width.NORMAL, path=_state_age, header="FOR"),
        Column("age", Kind.DURATION, help="Time since the room was opened."),
        _PROGRESS,
        _BYTES,
        _FAILURE,
        _TOKENS,
        Column("parked", Kind.COUNT, Width.NORMAL, "Parts that wait for a ring region or a lease."),
        _LATENCY,
        *_DETAILS,
    ),
    identity=("agent", "room", "nonce"),
    sort=("-age", "room", "agent"),
    empty="no active rooms",
)
HISTORY = View(
    "history",
    _FINISHED,
    sort=("ago", "room", "agent"),
    identity=("agent", "room", "nonce"),
    empty="no finished rooms yet",
)
SLOW = View("slow", _FINISHED, sort=("-latency", "room", "agent"), empty="no finished rooms yet")


def finished_rows(answers: Iterable[tuple[Row, ClockOffset]], now_ns: int) -> list[Row]:
    """Returns rows of HISTORY or SLOW: adds to each row the time since the room ended.

    Args:
        answers: each row of an agent's answer to `history` or `slow`, with the offset of the agent's clock.
    """
    return [{**row, "ago_ns": max(0, now_ns - row["finished_at_ns"] + clock.correction_ns)} for row, clock in answers]


RANKS = View(
    "room-ranks",
    (
        _AGENT,
        Column("role", styles=palette.ROLES),
        _STATE,
        Column("state_age", Kind.DURATION, path=_state_age, header="FOR"),
        Column(
            "planned", Kind.COUNT, help="Cells (writer, chunk, layer) in this rank's plan.", path="coverage.planned"
        ),
        Column(
            "sent", Kind.COUNT, help="Cells whose write the transfer engine reported complete.", path="coverage.sent"
        ),
        Column("landed", Kind.COUNT, path="coverage.landed"),
        Column("scattered", Kind.COUNT, help="Cells that are in their pages.", path="coverage.scattered"),
        Column("bytes", Kind.BYTES),
        Column("paths", Kind.MAP, Width.NORMAL),
        Column("hidden", Kind.DURATION, Width.NORMAL),
        Column("exposed", Kind.DURATION, Width.NORMAL),
        _REQUEST,
        Column("clock_error", Kind.DURATION, Width.NORMAL, header="CLOCK ±"),
    ),
)


TIMELINE = View(
    "room",
    (
        Column("relative", Kind.MILLISECONDS, help="Milliseconds since the room was first opened.", header="+MS"),
        Column("agent"),
        Column(
            "stage",
            help="Stage of a part, or event of the room.",
            styles={"fail": "bold red", "abort": "bold red", "done": "green"},
        ),
        Column("writer", Kind.COUNT, Width.NORMAL, "Number of the prefill rank that writes the part."),
        Column("chunk", Kind.COUNT, Width.NORMAL),
        Column("layers", Kind.LAYERS, Width.NORMAL),
        Column("peer", width=Width.NORMAL),
        Column("detail", Kind.SENTENCE, help="Details of the event."),
        Column("at", Kind.TIME, Width.WIDE, "Wall clock of this machine.", header="CLOCK"),
        Column("room", Kind.ID, Width.WIDE),
        Column("nonce", Kind.ID, Width.WIDE),
    ),
    identity=("agent", "at_ns", "stage", "writer", "chunk", "layers"),
    empty="no events recorded",
    also=(("Ranks of the room", RANKS),),
)


_ROLES = ("prefill", "decode")
_REMARK = re.compile(r" ?\([^)]*\)")
_NAMED = 4  # maximum number of agents named in one note

CAUSES = View(
    "failed_causes",
    (
        Column("rooms", Kind.COUNT, help="Rooms that failed for this cause."),
        Column("code"),
        Column("last_ago", Kind.DURATION, help="Time since the latest of these failures.", header="LAST"),
        Column("first_ago", Kind.DURATION, Width.NORMAL, "Time since the first one.", header="FIRST"),
        Column("room", Kind.ID, help="The room that failed last.", header="EXAMPLE"),
        Column("cause", Kind.SENTENCE, help="Its cause; those of the others have other names or numbers at most."),
        Column("peers", Kind.LIST, Width.NORMAL, "Agents at the other end, the most frequent first."),
        Column("ranks", Kind.LIST, Width.NORMAL, "Agents on which the rooms failed first, likewise."),
        Column("first_at", Kind.TIME, Width.WIDE, "Time of the first of these failures."),
        Column("last_at", Kind.TIME, Width.WIDE, "Time of the latest one."),
    ),
    identity=("code", "first_at_ns"),
    sort=("-rooms", "last_ago"),
    empty="no failed rooms",
)

FAILED = View(
    "failed",
    (
        _ROOM,
        Column("ago", Kind.DURATION, help="Time since the failure."),
        Column("rank", help="Agent on which the room failed first."),
        Column("code"),
        Column("text", help="First cause of the failure."),
        Column("after", Kind.DURATION, Width.NORMAL, "Time from open to failure."),
        Column("peers", Kind.LIST, Width.WIDE, "Agents at the other end of the room of that agent."),
        Column("agents", Kind.LIST, Width.WIDE, "Agents that have the room."),
        Column("waits_for", Kind.LIST, Width.NORMAL, "Agents that must answer before the room's memory can be reused."),
        Column("failed_at", Kind.TIME, Width.WIDE, "Time at which the room failed."),
        Column("tokens", Kind.COUNT, Width.WIDE),
        Column("bytes", Kind.BYTES, Width.WIDE, "KV bytes transferred before the failure."),
        _REQUEST,
        Column("nonce", Kind.ID, Width.WIDE),
    ),
    identity=("room", "nonce", "failed_at_ns"),
    sort=("-failed_at", "room"),
    empty="no failed rooms",
    also=(("With --by cause", CAUSES),),
)


def failed_rows(answers: Iterable[Row], clocks: Mapping[str, ClockOffset], now_ns: int) -> list[Row]:
    """Returns one row per failed room, with its first cause on any rank and times by this machine's clock."""
    by_number: dict[str, list[RoomDetail]] = {}
    for row in answers:
        detail = cast("RoomDetail", {**row, "timeline": [], "timeline_dropped": 0})
        by_number.setdefault(row["room"], []).append(detail)
    uses = [room for details in by_number.values() for room in join(details, clocks)]
    return [_failed_row(room, now_ns) for room in uses if room.failure is not None]


def _failed_row(room: RoomTimeline, now_ns: int) -> dict[str, Any]:
    failure, after = room.failure, room.failed_after_ns
    assert failure is not None
    return {
        "room": room.room,
        "nonce": room.nonce,
        "request_id": ",".join(room.request_ids) or None,
        "failed_at_ns": failure["at_ns"],
        "ago_ns": max(0, now_ns - failure["at_ns"]),
        "after_ns": after if after is not None and after >= 0 else None,
        "rank": failure["rank"],
        "code": failure["code"],
        "text": failure["text"],
        "peers": next((rank["peers"] for rank in room.ranks if rank["agent"] == failure["rank"]), []),
        "agents": [rank["agent"] for rank in room.ranks],
        "waits_for": sorted({name for rank in room.ranks for name in rank["missing"]}),
        "tokens": next((rank["tokens"] for rank in room.ranks if rank["tokens"] is not None), None),
        "bytes": max(sum(rank["bytes"] for rank in room.ranks if rank["role"] == role) for role in _ROLES),
    }


def cause_rows(failed: Iterable[Row]) -> list[Row]:
    """Returns one row of CAUSES per cause: per code and text, apart from names, numbers and remarks in parentheses."""
    alike: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(failed, key=lambda row: row["failed_at_ns"], reverse=True):
        alike.setdefault((row["code"], _REMARK.sub("", without_names(row["text"]))), []).append(row)
    return [
        {
            "rooms": len(same),
            "code": code,
            "last_ago_ns": same[0]["ago_ns"],
            "first_ago_ns": same[-1]["ago_ns"],
            "room": same[0]["room"],
            "cause": same[0]["text"],
            "peers": [name for name, _ in Counter(name for row in same for name in row["peers"]).most_common()],
            "ranks": [name for name, _ in Counter(row["rank"] for row in same).most_common()],
            "first_at_ns": same[-1]["failed_at_ns"],
            "last_at_ns": same[0]["failed_at_ns"],
        }
        for (code, _), same in alike.items()
    ]


def failure_counts(rows: Sequence[Row]) -> Line:
    """Formats the number of failed rooms by code, most frequent first."""
    spans: list[Span] = [(f"{len(rows):,} failed room{'s' * (len(rows) != 1)}", "bold red" if rows else "")]
    for code, count in Counter(row["code"] for row in rows).most_common():
        spans.append((f"   {code} {count:,}", ""))
    return spans


def dropped_note(answers: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns a note about failed rooms that agents no longer keep; "" if there are none.

    Args:
        answers: pairs of an agent's name and its answer to `failed`.
    """
    dropped = [f"{data['dropped_total']:,} of {name}" for name, data in answers if data["dropped_total"]]
    more = f" and {len(dropped) - _NAMED} more agents" if len(dropped) > _NAMED else ""
    return f"failed rooms no longer kept: {', '.join(dropped[:_NAMED])}{more} (failed_rooms)" if dropped else ""


_MOST_BARS = 32
_MAX_MISSING = 16


def room_blocks(room: RoomTimeline, timeline: Sequence[Row], width: int) -> list[Block]:
    """Formats the header, ranks, parts and timeline of one room."""
    return [
        Text([*_header(room), *_clocks(room), *_verdict(room), *_missing_parts(room), *_waits(room)]),
        Grid(RANKS, rank_rows(room)),
        *([Text(_part_bars(room, width))] if room.parts else []),
        Grid(TIMELINE, timeline),
    ]


def rank_rows(room: RoomTimeline) -> list[dict[str, Any]]:
    """Returns one row of RANKS per rank of a room; adds the error of the rank's clock offset."""
    return [
        {**rank, "clock_error_ns": room.clocks[rank["agent"]].error_ns if rank["agent"] in room.clocks else None}
        for rank in room.ranks
    ]


def _clocks(room: RoomTimeline) -> list[Line]:
    text = corrections(room.clocks, room.hosts)
    return [[(f"clocks: {text}, corrected", "dim")]] if text else []


def _header(room: RoomTimeline) -> list[Line]:
    decode = [rank for rank in room.ranks if rank["role"] == "decode"]
    counted = decode or room.ranks
    tokens = next((rank["tokens"] for rank in room.ranks if rank["tokens"] is not None), None)
    moved = units.size(sum(rank["bytes"] for rank in counted))
    latency = max((rank["latency_ns"] for rank in counted if rank["latency_ns"] is not None), default=None)
    spans: list[Span] = [
        ("room ", ""),
        (room.room, "bold"),
        ("  ", ""),
        (room.state, palette.STATES.get(room.state, "")),
    ]
    length = f"{units.count(tokens)} tokens  " if tokens is not None else ""
    spans += [(f"  age {units.duration(room.age_ns)}", ""), (f"  {length}{moved}", "")]
    if latency is not None:
        spans.append((f"  latency {units.duration(latency)}", ""))
    exposed = max((rank["exposed_ns"] for rank in room.ranks if rank["exposed_ns"] is not None), default=None)
    if exposed is not None:  # the room has to wait for its slowest writer
        spans.append((f"  exposed {units.duration(exposed)}", ""))
    request = [[(f"request {', '.join(room.request_ids)}", "")]] if room.request_ids else []
    return [spans, *request, [(f"nonce {room.nonce}, opened {units.clock_time(room.started_at_ns)}", "dim")]]


def _verdict(room: RoomTimeline) -> list[Line]:
    failure, after = room.failure, room.failed_after_ns
    if failure is None or after is None:
        return []
    moment = f"at +{units.duration(after)}" if after >= 0 else f"{units.duration(-after)} before the first event here"
    lines: list[Line] = [
        [
            ("failed first: ", "bold red"),
            (failure["rank"], "bold"),
            (f" {moment}: {failure['code']}: {failure['text']}", ""),
        ]
    ]
    if failure["rank"] not in room.clocks:
        text = f"{failure['rank']} was not asked or did not answer: the time of its failure is by its own clock"
        lines.append([(text, "yellow")])
    return lines


def _missing_parts(room: RoomTimeline) -> list[Line]:
    """Formats the parts that are missing, by writer and decode rank, with their age and what they wait for."""
    lines: list[Line] = []
    for missing in room.missing_parts[:_MAX_MISSING]:
        described = []
        if missing.chunks and missing.layers:
            ranges = f"{_range('chunk', missing.chunks)}, {_range('layer', missing.layers)}"
            described.append(f"{missing.cells} cell{'s' * (missing.cells != 1)} ({ranges})")
        if missing.finals:
            described.append(f"{missing.finals} final part{'s' * (missing.finals != 1)}")
        lines.append(
            [
                (missing.writer, "bold"),
                (" owes ", ""),
                (missing.decode, "bold"),
                (f" {' and '.join(described)} for {units.duration(missing.age_ns)}: {missing.waits_for}", ""),
            ]
        )
    if len(room.missing_parts) > _MAX_MISSING:
        lines.append([(f"{len(room.missing_parts) - _MAX_MISSING} more missing parts (-o json has all)", "dim")])
    return lines


def _range(noun: str, span: tuple[int, int]) -> str:
    """Formats [first, end) as `chunk 3` or `layers 0-31`."""
    return f"{noun} {span[0]}" if span[1] - span[0] == 1 else f"{noun}s {Kind.LAYERS.value.human(span)}"


def _waits(room: RoomTimeline) -> list[Line]:
    """Formats a line for each rank that waits for something other than parts."""
    lines: list[Line] = []
    for rank in room.ranks:
        names, active = ", ".join(rank["missing"]), rank["finished_at_ns"] is None
        text = ""
        if rank["failure"] is not None:
            text = f"keeps its memory of the room until {names} confirm{'s' * (len(rank['missing']) == 1)} its end"
            text = text if names else ""
        elif active and rank["state"] == "Bootstrapping" and (names or not rank["peers"]):
            age = units.duration(rank["state_age_ns"])
            text = f"waits for {names or 'a decode rank'} to {'accept' if names else 'open'} the room for {age}"
        elif active and rank["unscattered"]:
            cells = f"{rank['unscattered']} cell{'s' * (rank['unscattered'] != 1)}"
            text = f"has {cells} that arrived and are not in its pages"
        if text:
            lines.append([(rank["agent"], "bold"), (f" {text}", "")])
    return lines


def _part_bars(room: RoomTimeline, width: int) -> list[Line]:
    shown = room.parts[:_MOST_BARS]
    labels = [f"w{part.writer} c{part.chunk} L{layer_range(*part.layers)} → {part.decode}" for part in shown]
    margin = max(map(len, labels)) + 2
    cells = max(10, width - margin - 11)
    start = min(at for part in room.parts for at in part.moments.values())
    end = max(at for part in room.parts for at in part.moments.values()) - start
    lines: list[Line] = [[(f"{'':<{margin}}0{units.duration(end):>{cells - 1}}", "dim")]]
    for part, label in zip(shown, labels, strict=True):
        took = max(part.moments.values()) - min(part.moments.values())
        bar = segments(drawn_stages(part.moments, start), float(end), cells)
        lines.append([(f"{label:<{margin}}", ""), *bar, (f"  {units.duration(took):>9}", "")])
    if len(room.parts) > len(shown):
        lines.append([(f"{len(room.parts) - len(shown)} more parts (-o json has all)", "dim")])
    return [*lines, legend()]
