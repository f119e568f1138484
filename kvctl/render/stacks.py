"""View of threads and their stacks."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.render.kinds import Kind
from kvctl.render.report import Line
from kvctl.render.view import Column, Row, View, Width

STACKS = View(
    "stacks",
    (
        Column("agent"),
        Column("thread", "name"),
        Column("ident", kind=Kind.ID, width=Width.WIDE),
        Column("daemon", kind=Kind.FLAG, width=Width.WIDE),
        Column("depth", lambda row: len(row["frames"]), Kind.COUNT),
        Column("at", lambda row: row["frames"][-1] if row["frames"] else None),
        Column("frames", kind=Kind.LIST, width=Width.WIDE),
    ),
    sort=("agent", "thread"),
    empty="no threads",
)


def traceback(rows: Sequence[Row]) -> list[Line]:
    """Formats threads and their frames as a Python traceback, innermost frame last."""
    lines: list[Line] = []
    for row in rows:
        if lines:
            lines.append([("", "")])
        kind = "daemon thread" if row["daemon"] else "thread"
        lines.append([(row["agent"], "bold"), (f"  {kind} ", ""), (row["name"], "bold"), (f"  {row['ident']}", "dim")])
        for frame in row["frames"]:
            place, _, code = frame.partition(": ")
            lines.append([("  ", ""), (place, "" if frame is row["frames"][-1] else "dim")])
            if code:
                lines.append([("      ", ""), (code, "cyan")])
    return lines
