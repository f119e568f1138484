"""View of flight-recorder events."""

from __future__ import annotations

from kvctl.render import palette
from kvctl.render.view import Column, Kind, View, Width

EVENTS = View(
    "events",
    (
        Column("at", kind=Kind.TIME, header="TIME", fixed=12),
        Column("agent", fixed=12),
        Column("severity", styles=palette.SEVERITIES, fixed=8, help="debug, info, warning or error."),
        Column("kind", fixed=14, help="Category of the event."),
        Column("room", kind=Kind.ID, fixed=8),
        Column("peer", width=Width.NORMAL, fixed=12),
        Column("text", kind=Kind.SENTENCE, help="Description of the event."),
        Column(
            "sequence",
            kind=Kind.COUNT,
            width=Width.WIDE,
            fixed=8,
            help="Number of the event in the agent's flight recorder.",
        ),
    ),
    sort=("at", "agent", "sequence"),
    empty="no events",
)
