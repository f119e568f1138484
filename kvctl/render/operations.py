"""Views of the results of actions, and of the results of `kvctl peers probe`."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.render.kinds import Kind
from kvctl.render.report import Block, Line, Text
from kvctl.render.view import Column, Row, View

_RESULTS = {"unchanged": "dim", "revoking": "yellow", "aside": "yellow", "draining": "yellow", "": "green"}

DONE = View(
    "done",
    (
        Column("agent"),
        Column("subject"),
        Column("result", styles=_RESULTS),
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
        Column("bytes", kind=Kind.BYTES, header="SIZE"),
        Column("descriptors", kind=Kind.COUNT, header="DESCRIPTORS"),
        Column("write", kind=Kind.DURATION, header="WRITE"),
        Column("descriptor", kind=Kind.DURATION, header="PER DESCRIPTOR"),
        Column("gb_per_s", kind=Kind.RATE, header="GB/S"),
    ),
    sort=("agent", "peer", "bytes"),
    empty="no connection was measured",
)


def done_lines(rows: Sequence[Row]) -> list[Block]:
    """Formats the results of actions, one per line and never truncated."""
    widths = {name: max((len(row[name]) for row in rows), default=0) for name in ("agent", "subject", "result")}
    lines: list[Line] = [
        [
            (f"{row['agent']:<{widths['agent']}}  ", ""),
            (f"{row['subject']:<{widths['subject']}}  ", ""),
            (f"{row['result']:<{widths['result']}}  ", _RESULTS.get(row["result"], _RESULTS[""])),
            (row["text"], ""),
        ]
        for row in rows
    ]
    return [Text(lines)]
