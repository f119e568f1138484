"""Views of `kvctl tune`: the options with their predicted results, and predictions compared with measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvctl.render import units
from kvctl.render.report import Block, Grid, Line, Text
from kvctl.render.view import Column, Kind, Row, View, Width

TUNE = View(
    "tune",
    (
        Column("choice", lambda row: "▶" if row["recommended"] else "·", styles={"▶": "bold green"}),
        Column("path"),
        Column("page_size", kind=Kind.COUNT, header="PAGE"),
        Column("chunk_tokens", kind=Kind.COUNT, header="CHUNK", width=Width.NORMAL),
        Column("ring", "ring_bytes", Kind.BYTES),
        Column("cp_mode", width=Width.NORMAL),
        Column("group_size", lambda row: row["group_size"] or None, Kind.COUNT, Width.NORMAL, header="GROUP"),
        Column("rooms_per_s", kind=Kind.NUMBER, header="ROOMS/S"),
        Column("gb_per_s", kind=Kind.NUMBER, header="GB/S"),
        Column("p50", kind=Kind.DURATION),
        Column("p99", kind=Kind.DURATION),
        Column("hidden", kind=Kind.RATIO, width=Width.NORMAL),
        Column("alone", kind=Kind.DURATION, width=Width.WIDE),
        Column("cpu", "cpu_ns", Kind.DURATION, Width.WIDE),
        Column("padded", kind=Kind.RATIO, width=Width.WIDE),
        Column("bound", width=Width.WIDE),
        Column("why"),
    ),
)

CONFIRM = View(
    "tune_confirm",
    (
        Column("path"),
        Column("predicted_rooms_per_s", kind=Kind.NUMBER, header="ROOMS/S PREDICTED"),
        Column("measured_rooms_per_s", kind=Kind.NUMBER, header="ROOMS/S MEASURED"),
        Column("rooms_off", kind=Kind.RATIO, header="ROOMS/S OFF"),
        Column("predicted_p50", kind=Kind.DURATION),
        Column("measured_p50", kind=Kind.DURATION),
        Column("p50_off", kind=Kind.RATIO),
        Column("bound", width=Width.NORMAL),
    ),
)


def blocks(rows: Sequence[Row], facts: Mapping[str, Any], checked: Sequence[Row]) -> list[Block]:
    """Formats the measurements, the options, the settings to paste, and the accuracy of the predictions."""
    shown: list[Block] = [Text(_facts(facts)), Grid(TUNE, rows)]
    settings: list[Line] = [[("", "")], [("set on every agent", "bold"), (" (KVCTL_… or agent.toml)", "dim")]]
    settings += [[(f"  {line}", "green")] for line in toml(facts["settings"])]
    shown.append(Text([*settings, [("", "")]] if checked else settings))
    if checked:
        shown.append(Grid(CONFIRM, checked, title="confirmed by the bench"))
    return shown


def toml(settings: Mapping[str, Any]) -> list[str]:
    """Formats settings as lines of `agent.toml`."""
    return [f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in settings.items()]


def _facts(facts: Mapping[str, Any]) -> list[Line]:
    lane, room = facts["lane"], facts["room"]
    small, each_us = lane["us_by_bytes"][0]
    return [
        _fact("probe", facts["origin"]),
        _fact(
            "lane",
            f"{units.three_digits(lane['write_gb_per_s'])} GB/s in one write, {units.three_digits(each_us)} µs per "
            f"descriptor of {units.size(small)}, {units.three_digits(lane['us_per_write'])} µs per write",
        ),
        _fact(
            "memory",
            f"memcpy {units.three_digits(facts['memcpy_gb_per_s'])} GB/s on one thread, {facts['cores']} cores",
        ),
        _fact(
            "room",
            f"{room['tokens']} tokens, {units.size(room['bytes'])} from {room['writers']} writers to {room['readers']} "
            f"readers; {facts['load']}",
        ),
        [("", "")],
    ]


def _fact(label: str, text: str) -> Line:
    return [(f"{label:<9}", "dim"), (text, "")]
