"""Views of `kvctl agents` and `kvctl version`."""

from __future__ import annotations

from kvctl.render import palette
from kvctl.render.kinds import Kind
from kvctl.render.view import Column, View, Width

AGENTS = View(
    "agents",
    (
        Column("agent"),
        Column("state", styles=palette.AGENT_STATES),
        Column("role", styles=palette.ROLES),
        Column("rtt", kind=Kind.DURATION),
        Column("uptime", kind=Kind.DURATION),
        Column("version"),
        Column("pid", kind=Kind.ID),
        Column("incarnation", width=Width.NORMAL),
        Column("clock_offset", kind=Kind.DURATION, width=Width.WIDE),
        Column("clock_error", kind=Kind.DURATION, width=Width.WIDE),
        Column("protocol", kind=Kind.LIST, width=Width.WIDE),
        Column("level", width=Width.WIDE),
        Column("capabilities", kind=Kind.LIST, width=Width.WIDE),
        Column("endpoint", width=Width.WIDE),
    ),
    sort=("agent",),
    empty="no agents",
)

VERSION = View(
    "version",
    (
        Column("component"),
        Column("version"),
        Column("protocol", kind=Kind.LIST),
        Column("python", width=Width.NORMAL),
        Column("endpoint", width=Width.WIDE),
    ),
)
