"""Views of staging: one row per agent, one per ring allocation, one per gated part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvctl.render import palette
from kvctl.render.kinds import Kind
from kvctl.render.view import Column, Row, View, Width


def oldest(row: Row) -> Mapping[str, Any] | None:
    """Returns the oldest allocation, which holds back the watermark; None if there is none."""
    ring = row.get("ring")
    allocations = ring["allocations"] if ring else []
    return next((allocation for allocation in allocations if not allocation["aside"]), None)


def _aside(row: Row) -> int | None:
    ring = row.get("ring")
    return sum(allocation["aside"] for allocation in ring["allocations"]) if ring else None


def _oldest(row: Row, key: str) -> Any:
    found = oldest(row)
    return found and found[key]


def _used(row: Row) -> float | None:
    ring = row.get("ring")
    return min(1.0, ring["used_bytes"] / ring["size_bytes"]) if ring and ring["size_bytes"] else None


def _ahead(row: Row) -> int | None:
    """Returns the bytes granted for later rounds of the ring, whose writers must wait."""
    ring = row.get("ring")
    return max(0, ring["used_bytes"] - ring["size_bytes"]) if ring else None


def _live(row: Row) -> int | None:
    ring = row.get("ring")
    return len(ring["allocations"]) if ring else None


STAGING = View(
    "staging",
    (
        Column("agent"),
        Column("role", styles=palette.ROLES, width=Width.NORMAL),
        Column("enabled", kind=Kind.FLAG, width=Width.NORMAL),
        Column("ring", "ring.size_bytes", Kind.BYTES),
        Column("used", _used, Kind.RATIO),
        Column("live", _live, Kind.COUNT),
        Column("oldest", lambda row: _oldest(row, "age_ns"), Kind.DURATION),
        Column("oldest_room", lambda row: _oldest(row, "room"), Kind.ID, header="OF ROOM"),
        Column("aside", _aside, Kind.COUNT, Width.NORMAL),
        Column("gated", lambda row: len(row["gated"]), Kind.COUNT),
        Column("buffers", "buffers.size_bytes", Kind.BYTES, Width.NORMAL),
        Column("pieces_used", "buffers.pieces_used", Kind.COUNT, Width.NORMAL),
        Column("fallbacks", "fallbacks_total", Kind.COUNT, Width.NORMAL),
        Column("oldest_state", lambda row: _oldest(row, "state"), width=Width.WIDE),
        Column("ahead", _ahead, Kind.BYTES, Width.WIDE),
        Column("high_water", "ring.high_water_bytes", Kind.BYTES, Width.WIDE),
        Column("head", "ring.head_bytes", Kind.BYTES, Width.WIDE),
        Column("round", "ring.round", Kind.COUNT, Width.WIDE),
        Column("tail_round", "ring.watermark.round", Kind.COUNT, Width.WIDE),
        Column("tail", "ring.watermark.tail", Kind.BYTES, Width.WIDE),
        Column("tail_age", "ring.watermark.age_ns", Kind.DURATION, Width.WIDE),
        Column("granted", "ring.granted_total", Kind.COUNT, Width.WIDE),
        Column("refused", "ring.refused_total", Kind.COUNT, Width.WIDE),
        Column("revoked", "ring.revoked_total", Kind.COUNT, Width.WIDE),
        Column("copies_waiting", "ring.copies.waiting", Kind.COUNT, Width.WIDE),
        Column("copying", "ring.copies.copying_age_ns", Kind.DURATION, Width.WIDE),
        Column("pieces", "buffers.pieces", Kind.COUNT, Width.WIDE),
        Column("pieces_high_water", "buffers.pieces_high_water", Kind.COUNT, Width.WIDE),
        Column("piece", "buffers.piece_bytes", Kind.BYTES, Width.WIDE),
    ),
    sort=("agent",),
)

ALLOCATIONS = View(
    "staging_map",
    (
        Column("agent"),
        Column("serial", kind=Kind.COUNT, width=Width.NORMAL),
        Column("room", kind=Kind.ID),
        Column("writer"),
        Column("chunk", kind=Kind.COUNT, width=Width.NORMAL),
        Column("layers", kind=Kind.LAYERS, width=Width.NORMAL),
        Column("state", styles=palette.ALLOCATION_STATES),
        Column("aside", kind=Kind.FLAG, width=Width.NORMAL),
        Column("age", kind=Kind.DURATION),
        Column("room_state", styles=palette.STATES, width=Width.NORMAL),
        Column("posted", kind=Kind.FLAG, width=Width.WIDE),
        Column("size", lambda row: row["end"] - row["offset"], Kind.BYTES),
        Column("offset", "offset", Kind.BYTES, Width.WIDE),
        Column("round", kind=Kind.COUNT, width=Width.WIDE),
        Column("nonce", kind=Kind.ID, width=Width.WIDE),
    ),
    sort=("agent", "-age"),
    empty="no live allocations",
)

GATED = View(
    "staging_gated",
    (
        Column("agent"),
        Column("room", kind=Kind.ID),
        Column("peer"),
        Column("chunk", kind=Kind.COUNT, width=Width.NORMAL),
        Column("layers", kind=Kind.LAYERS, width=Width.NORMAL),
        Column("bytes", kind=Kind.BYTES, width=Width.NORMAL),
        Column("age", kind=Kind.DURATION),
        Column("waiting_for"),
        Column("requests", kind=Kind.COUNT, width=Width.NORMAL, header="ASKED"),
        Column("asked_age", kind=Kind.DURATION, width=Width.WIDE, header="ASKED FOR"),
    ),
    sort=("-age",),
    empty="no gated parts",
)
