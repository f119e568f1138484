"""Draws one room: its result, its first failure, and the stages of each part on a common axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvctl.client.room_timeline import PartTimeline, RoomTimeline
from kvctl.render import palette, units
from kvctl.render.bars import legend, segments
from kvctl.render.kinds import Kind
from kvctl.render.report import Block, Grid, Line, Span, Text
from kvctl.render.rooms import RANKS, TIMELINE
from kvctl.render.view import Row
from kvctl.render.waterfall import life
from kvctl_agent.contract.values import layer_range

_MOST_BARS = 32
_MOST_DEBTS = 16


def blocks(room: RoomTimeline, timeline: Sequence[Row], width: int) -> list[Block]:
    """Formats header, ranks, parts and timeline of one room."""
    return [
        Text([*_header(room), *_verdict(room), *_debts(room), *_waits(room)]),
        Grid(RANKS, rank_rows(room)),
        *([Text(_bars(room, width))] if room.parts else []),
        Grid(TIMELINE, timeline),
    ]


def rank_rows(room: RoomTimeline) -> list[dict[str, Any]]:
    """Returns one row per rank, with the error of its clock offset."""
    return [
        {**rank, "clock_error_ns": room.clocks[rank["agent"]].error_ns if rank["agent"] in room.clocks else None}
        for rank in room.ranks
    ]


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
    return [spans, [(f"nonce {room.nonce}, opened {units.clock_time(room.started_at_ns)}", "dim")]]


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


def _debts(room: RoomTimeline) -> list[Line]:
    """Formats the parts that are owed: writer, decode rank, age, and what they wait for."""
    lines: list[Line] = []
    for debt in room.debts[:_MOST_DEBTS]:
        what = []
        if debt.chunks and debt.layers:
            where = f"{_range('chunk', debt.chunks)}, {_range('layer', debt.layers)}"
            what.append(f"{debt.cells} cell{'s' * (debt.cells != 1)} ({where})")
        if debt.finals:
            what.append(f"{debt.finals} final part{'s' * (debt.finals != 1)}")
        lines.append(
            [
                (debt.writer, "bold"),
                (" owes ", ""),
                (debt.decode, "bold"),
                (f" {' and '.join(what)} for {units.duration(debt.age_ns)}: {debt.waits_for}", ""),
            ]
        )
    if len(room.debts) > _MOST_DEBTS:
        lines.append([(f"{len(room.debts) - _MOST_DEBTS} more debts (-o json has all)", "dim")])
    return lines


def _range(noun: str, span: tuple[int, int]) -> str:
    """Formats [first, end) as `chunk 3` or `layers 0-31`."""
    return f"{noun} {span[0]}" if span[1] - span[0] == 1 else f"{noun}s {Kind.LAYERS.value.human(span)}"


def _waits(room: RoomTimeline) -> list[Line]:
    """Formats what ranks wait for other than parts."""
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


def _bars(room: RoomTimeline, width: int) -> list[Line]:
    shown = room.parts[:_MOST_BARS]
    labels = [_label(part) for part in shown]
    margin = max(map(len, labels)) + 2
    cells = max(10, width - margin - 11)
    start = min(at for part in room.parts for at in part.moments.values())
    end = max(at for part in room.parts for at in part.moments.values()) - start
    lines: list[Line] = [[(f"{'':<{margin}}0{units.duration(end):>{cells - 1}}", "dim")]]
    for part, label in zip(shown, labels, strict=True):
        took = max(part.moments.values()) - min(part.moments.values())
        bar = segments(life(part.moments, start), float(end), cells)
        lines.append([(f"{label:<{margin}}", ""), *bar, (f"  {units.duration(took):>9}", "")])
    if len(room.parts) > len(shown):
        lines.append([(f"{len(room.parts) - len(shown)} more parts (-o json has all)", "dim")])
    return [*lines, legend()]


def _label(part: PartTimeline) -> str:
    return f"w{part.writer} c{part.chunk} L{layer_range(*part.layers)} → {part.decode}"
