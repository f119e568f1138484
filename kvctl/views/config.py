"""View of the agents' configuration: one row per value, with the agents that share it."""

from __future__ import annotations

from kvctl.views.kinds import Kind
from kvctl.views.view import Column, View, Width

CONFIG = View(
    "config",
    (
        Column("key"),
        Column("value"),
        Column("unit", width=Width.NORMAL),
        Column("origin", width=Width.NORMAL),
        Column("agents", kind=Kind.LIST),
        Column("default", width=Width.WIDE),
        Column("runtime", kind=Kind.FLAG, width=Width.WIDE),
        Column("help", width=Width.WIDE),
    ),
    sort=("key",),
)
