"""View of the contexts: named fleets."""

from __future__ import annotations

from kvctl.render.kinds import Kind
from kvctl.render.view import Column, View, Width

CONTEXTS = View(
    "contexts",
    (
        Column("context"),
        Column("in_use", kind=Kind.FLAG, header="IN USE", styles={"True": "bold green"}),
        Column("endpoint", kind=Kind.LIST),
        Column("labels", kind=Kind.LIST, width=Width.NORMAL),
        Column("timeout", width=Width.NORMAL),
        Column("key", width=Width.NORMAL),
        Column("server_key", width=Width.WIDE),
    ),
    sort=("context",),
    empty="no contexts: kvctl context add NAME -e tcp://HOST:PORT",
)
