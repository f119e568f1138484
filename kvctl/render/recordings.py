"""Views of recordings and of the results of replaying them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvctl.render import units
from kvctl.render.report import Block, Grid, Line, Text
from kvctl.render.view import Column, Kind, Row, View, Width

RECORDED = View(
    "recorded",
    (
        Column("agent"),
        Column("role"),
        Column("inputs", kind=Kind.COUNT),
        Column("missed", kind=Kind.COUNT),
        Column("size", path="nbytes", kind=Kind.BYTES),
        Column("dropped", kind=Kind.COUNT, width=Width.WIDE),
        Column("incarnation", width=Width.WIDE),
    ),
    sort=("agent",),
    empty="no agents",
)


def _span(row: Row) -> int | None:
    first, last = row["first_at_ns"], row["last_at_ns"]
    return None if first is None else last - first


REPLAYED = View(
    "replayed",
    (
        Column("agent"),
        Column("role"),
        Column("inputs", kind=Kind.COUNT),
        Column("rooms", kind=Kind.COUNT),
        Column("span", path=_span, kind=Kind.DURATION),
        Column(
            "verdict",
            path=lambda row: "clean" if row["breach"] is None else row["breach"]["invariant"],
            styles={"clean": "green"},
        ),
        Column("at_input", path=lambda row: row["breach"] and row["breach"]["number"], kind=Kind.COUNT),
        Column("room", path=lambda row: row["breach"] and row["breach"]["room"], kind=Kind.ID),
        Column("missed", kind=Kind.COUNT, width=Width.WIDE),
        Column("dropped", kind=Kind.COUNT, width=Width.WIDE),
        Column("pieces", kind=Kind.COUNT, width=Width.WIDE),
        Column("incarnation", width=Width.WIDE),
        Column("text", path=lambda row: row["breach"] and row["breach"]["text"], width=Width.WIDE),
    ),
    sort=("agent",),
    empty="the recording has no agents",
)


def blocks(rows: Sequence[Row]) -> list[Block]:
    """Formats the table, followed by the history of each violation."""
    return [Grid(REPLAYED, rows), *(Text(_story(row)) for row in rows if row["breach"] is not None)]


def _story(row: Row) -> list[Line]:
    breach: Mapping[str, Any] = row["breach"]
    shrunk: Mapping[str, Any] | None = row["shrunk"]
    number = units.count(breach["number"])
    lines: list[Line] = [
        [(f"{row['agent']} broke {breach['invariant']}", "bold red"), (f" at input {number}: {breach['text']}", "")]
    ]
    story = breach["story"]
    if shrunk is not None:
        early = ", and time was up before nothing more could be left out" if shrunk["early"] else ""
        lines.append([(f"{units.count(shrunk['inputs'])} inputs are enough for it{early}; the last ones:", "")])
        story = shrunk["story"]
    lines += [[(f"  {line}", "dim" if line.startswith(" ") else "")] for line in story]
    if row["test"]:
        lines.append([("a test that repeats it: ", ""), (row["test"], "bold")])
    return lines
