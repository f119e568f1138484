"""View of the flight recorder."""

from __future__ import annotations

from kvctl.render import palette
from kvctl.render.view import Column, Kind, View, Width

EVENTS = View(
    "events",
    (
        Column("at", kind=Kind.TIME, header="TIME", fixed=12),
        Column("agent", fixed=12),
        Column("severity", styles=palette.SEVERITIES, fixed=8),
        Column("kind", fixed=14),
        Column("room", kind=Kind.ID, fixed=8),
        Column("peer", width=Width.NORMAL, fixed=12),
        Column("text"),
        Column("sequence", kind=Kind.COUNT, width=Width.WIDE, fixed=8),
    ),
    sort=("at", "agent", "sequence"),
    empty="no events",
)
