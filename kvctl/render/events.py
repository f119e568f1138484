"""View of flight-recorder events."""

from __future__ import annotations

from kvctl.render import palette
from kvctl.render.view import Column, Kind, View, Width

EVENTS = View(
    "events",
    (
        Column("at", Kind.TIME, header="TIME", fixed=12),
        Column("agent", fixed=12),
        Column("severity", help="debug, info, warning or error.", styles=palette.SEVERITIES, fixed=8),
        Column("kind", help="Category of the event.", fixed=14),
        Column("room", Kind.ID, fixed=8),
        Column("peer", width=Width.NORMAL, fixed=12),
        Column("text", Kind.SENTENCE, help="Description of the event."),
        Column("sequence", Kind.COUNT, Width.WIDE, "Number of the event in the agent's flight recorder.", fixed=8),
    ),
    identity=("agent", "sequence", "at_ns"),
    sort=("at", "agent", "sequence"),
    empty="no events",
)
