"""View of failed rooms: one row per room with its first cause, combined from all ranks that report it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from kvctl.client.clock import ClockOffset
from kvctl.client.room_timeline import RoomTimeline, join
from kvctl.render.kinds import Kind
from kvctl.render.report import Line, Span
from kvctl.render.view import Column, Row, View, Width
from kvctl_agent.contract.snapshots import RoomDetail

_ROLES = ("prefill", "decode")
_NAMED = 4  # maximum number of agents named in one note

FAILED = View(
    "failed",
    (
        Column("room", kind=Kind.ID),
        Column("ago", kind=Kind.DURATION),
        Column("rank"),
        Column("code"),
        Column("text"),
        Column("after", kind=Kind.DURATION, width=Width.NORMAL),
        Column("agents", kind=Kind.LIST, width=Width.WIDE),
        Column("waits_for", kind=Kind.LIST, width=Width.NORMAL),
        Column("failed_at", kind=Kind.TIME, width=Width.WIDE),
        Column("tokens", kind=Kind.COUNT, width=Width.WIDE),
        Column("bytes", kind=Kind.BYTES, width=Width.WIDE),
        Column("nonce", kind=Kind.ID, width=Width.WIDE),
    ),
    sort=("-failed_at", "room"),
    empty="no failed rooms",
)


def failed_rows(answers: Iterable[Row], clocks: Mapping[str, ClockOffset], now_ns: int) -> list[Row]:
    """Returns one row per failed room, with times by this machine's clock.

    Args:
        answers: rows of all agents' answers to `failed`.
        clocks: clock offsets by agent name.
        now_ns: this machine's wall clock when they answered.
    """
    by_number: dict[str, list[RoomDetail]] = {}
    for row in answers:
        detail = cast(RoomDetail, {**row, "timeline": [], "timeline_dropped": 0})
        by_number.setdefault(row["room"], []).append(detail)
    uses = [room for details in by_number.values() for room in join(details, clocks)]
    return [_row(room, now_ns) for room in uses if room.failure is not None]


def _row(room: RoomTimeline, now_ns: int) -> dict[str, Any]:
    failure, after = room.failure, room.failed_after_ns
    assert failure is not None
    return {
        "room": room.room,
        "nonce": room.nonce,
        "failed_at_ns": failure["at_ns"],
        "ago_ns": max(0, now_ns - failure["at_ns"]),
        "after_ns": after if after is not None and after >= 0 else None,
        "rank": failure["rank"],
        "code": failure["code"],
        "text": failure["text"],
        "agents": [rank["agent"] for rank in room.ranks],
        "waits_for": sorted({name for rank in room.ranks for name in rank["missing"]}),
        "tokens": next((rank["tokens"] for rank in room.ranks if rank["tokens"] is not None), None),
        "bytes": max(sum(rank["bytes"] for rank in room.ranks if rank["role"] == role) for role in _ROLES),
    }


def causes(rows: Sequence[Row]) -> Line:
    """Returns the number of failed rooms by code, most frequent first."""
    spans: list[Span] = [(f"{len(rows):,} failed room{'s' * (len(rows) != 1)}", "bold red" if rows else "")]
    for code, count in Counter(row["code"] for row in rows).most_common():
        spans.append((f"   {code} {count:,}", ""))
    return spans


def dropped(answers: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns a note on the agents that have dropped failed rooms; "" if none has.

    Args:
        answers: (agent name, its answer to `failed`).
    """
    gone = [f"{data['dropped_total']:,} of {name}" for name, data in answers if data["dropped_total"]]
    more = f" and {len(gone) - _NAMED} more agents" if len(gone) > _NAMED else ""
    return f"failed rooms no longer kept: {', '.join(gone[:_NAMED])}{more} (failed_rooms)" if gone else ""
