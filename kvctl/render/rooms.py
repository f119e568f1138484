"""Views of rooms: active and finished ones, and the events of one room."""

from __future__ import annotations

from typing import Any

from kvctl.render import palette
from kvctl.render.kinds import Kind
from kvctl.render.view import Column, Row, View, Width


def _progress(row: Row) -> str | None:
    """Returns cells done of cells planned: scattered on a decode rank, sent on a prefill rank."""
    coverage = row.get("coverage")
    if not coverage:
        return None
    done = coverage["scattered"] if row["role"] == "decode" else coverage["sent"]
    return None if done is None else f"{done}/{coverage['planned']}"


def _failure(row: Row) -> str | None:
    failure = row.get("failure")
    return failure and f"{failure['rank']}: {failure['code']}: {failure['text']}"


def _state_age(row: Row) -> Any:
    """Returns the time in the state of an active room; None for a finished one, whose state no longer changes."""
    return None if row.get("finished_at_ns") is not None else row.get("state_age_ns")


_COLUMNS = (
    Column("room", kind=Kind.ID),
    Column("agent"),
    Column("role", styles=palette.ROLES, width=Width.NORMAL),
    Column("state", styles=palette.STATES),
    Column("state_age", _state_age, Kind.DURATION, Width.NORMAL, header="FOR"),
    Column("age", kind=Kind.DURATION),
    Column("latency", kind=Kind.DURATION),
    Column("progress", _progress, header="CELLS"),
    Column("bytes", kind=Kind.BYTES),
    Column("failure", _failure),
    Column("tokens", kind=Kind.COUNT, width=Width.NORMAL),
    Column("parked", kind=Kind.COUNT, width=Width.NORMAL),
    Column("missing", kind=Kind.LIST, width=Width.WIDE, header="WAITS FOR"),
    Column("owed", kind=Kind.MAP, width=Width.WIDE),
    Column("paths", kind=Kind.MAP, width=Width.NORMAL),
    Column("landed", "coverage.landed", Kind.COUNT, Width.WIDE),
    Column("pages", kind=Kind.COUNT, width=Width.WIDE),
    Column("parts", kind=Kind.COUNT, width=Width.WIDE),
    Column("peers", kind=Kind.LIST, width=Width.WIDE),
    Column("hidden", kind=Kind.DURATION, width=Width.WIDE),
    Column("exposed", kind=Kind.DURATION, width=Width.WIDE),
    Column("opened_at", kind=Kind.TIME, width=Width.WIDE),
    Column("forward_done_at", kind=Kind.TIME, width=Width.WIDE),
    Column("finished_at", kind=Kind.TIME, width=Width.WIDE),
    Column("nonce", kind=Kind.ID, width=Width.WIDE),
)

ROOMS = View("rooms", _COLUMNS, sort=("-age", "room", "agent"), empty="no active rooms")
HISTORY = View("history", _COLUMNS, sort=("-finished_at", "room", "agent"), empty="no finished rooms yet")
SLOW = View("slow", _COLUMNS, sort=("-latency", "room", "agent"), empty="no finished rooms yet")

TIMELINE = View(
    "room",
    (
        Column("relative", kind=Kind.MILLISECONDS, header="+MS"),
        Column("agent"),
        Column("stage", styles={"fail": "bold red", "abort": "bold red", "done": "green"}),
        Column("writer", kind=Kind.COUNT, width=Width.NORMAL),
        Column("chunk", kind=Kind.COUNT, width=Width.NORMAL),
        Column("layers", kind=Kind.LAYERS, width=Width.NORMAL),
        Column("peer", width=Width.NORMAL),
        Column("detail"),
        Column("at", kind=Kind.TIME, width=Width.WIDE, header="CLOCK"),
        Column("room", kind=Kind.ID, width=Width.WIDE),
        Column("nonce", kind=Kind.ID, width=Width.WIDE),
    ),
    empty="no events recorded",
)

RANKS = View(
    "room-ranks",
    (
        Column("agent"),
        Column("role", styles=palette.ROLES),
        Column("state", styles=palette.STATES),
        Column("state_age", _state_age, Kind.DURATION, header="FOR"),
        Column("planned", "coverage.planned", Kind.COUNT),
        Column("sent", "coverage.sent", Kind.COUNT),
        Column("landed", "coverage.landed", Kind.COUNT),
        Column("scattered", "coverage.scattered", Kind.COUNT),
        Column("bytes", kind=Kind.BYTES),
        Column("paths", kind=Kind.MAP, width=Width.NORMAL),
        Column("hidden", kind=Kind.DURATION, width=Width.NORMAL),
        Column("exposed", kind=Kind.DURATION, width=Width.NORMAL),
        Column("clock_error", kind=Kind.DURATION, width=Width.NORMAL, header="CLOCK ±"),
    ),
)
