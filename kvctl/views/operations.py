"""Views of what commands that act have done, and of what probing a lane has found."""

from __future__ import annotations

from kvctl.views.kinds import Kind
from kvctl.views.view import Column, View

DONE = View(
    "done",
    (
        Column("agent"),
        Column("subject"),
        Column("result", styles={"unchanged": "dim", "revoking": "yellow", "aside": "yellow", "draining": "yellow", "": "green"}),
        Column("text", header="WHAT"),
    ),
    sort=("agent", "subject"),
    empty="nothing was done",
)

PROBE = View(
    "probe",
    (
        Column("agent"),
        Column("peer"),
        Column("bytes", kind=Kind.BYTES, header="DESCRIPTOR"),
        Column("descriptors", kind=Kind.COUNT, header="IN A WRITE"),
        Column("descriptor", kind=Kind.DURATION, header="EACH"),
        Column("gb_per_s", kind=Kind.RATE, header="GB/S"),
    ),
    sort=("agent", "peer", "bytes"),
    empty="no lane was measured",
)
