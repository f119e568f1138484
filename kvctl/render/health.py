"""Views of the health codes, of the page of one code, and of mutes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvctl.health.areas import area
from kvctl.health.finding import Code
from kvctl.health.mutes import Mute
from kvctl.render import palette
from kvctl.render.findings import labelled
from kvctl.render.kinds import Kind
from kvctl.render.report import Block, Text
from kvctl.render.view import Column, Row, View, Width

CODES_VIEW = View(
    "health_codes",
    (
        Column("code"),
        Column("severity", kind=Kind.VERDICT, styles=palette.VERDICTS),
        Column("area", width=Width.NORMAL),
        Column("sees"),
        Column("means", width=Width.WIDE),
        Column("remedy", width=Width.WIDE),
        Column("alert", width=Width.WIDE),
    ),
)

MUTES = View(
    "health_mutes",
    (
        Column("target", header="MUTED"),
        Column("left", kind=Kind.DURATION),
        Column("until_worse", header="UNTIL WORSE THAN"),
        Column("reason"),
        Column("made_at", kind=Kind.SECOND, width=Width.WIDE),
    ),
    sort=("left",),
    empty="nothing is muted",
)


def code_row(code: Code) -> dict[str, Any]:
    """Returns the row of one health code."""
    return {
        "code": code.name,
        "severity": code.severity.label,
        "area": area(code.name),
        "sees": code.sees,
        "means": code.means,
        "remedy": code.remedy,
        "alert": code.alert,
    }


def page(rows: Sequence[Row], width: int) -> list[Block]:
    """Formats the page of a health code."""
    return [
        Text(
            [
                [
                    (row["code"], "bold"),
                    (
                        f"  {palette.VERDICT_GLYPHS[row['severity']]} {row['severity']}",
                        palette.VERDICTS[row["severity"]],
                    ),
                    (f"  kvctl check {row['area']}", "dim"),
                ],
                *(
                    line
                    for label in ("sees", "means", "remedy", "alert")
                    for line in labelled(label, row[label] or "", width)
                ),
            ]
        )
        for row in rows
    ]


def mute_row(mute: Mute, now_ns: int) -> dict[str, Any]:
    """Returns the row of one mute."""
    worst = mute.baseline
    return {
        "target": mute.target,
        "code": mute.code,
        "subject": mute.subject,
        "left_ns": mute.until_ns - now_ns,
        "until_ns": mute.until_ns,
        "made_at_ns": mute.made_at_ns,
        "until_worse": f"{worst.count} {worst.severity.label}, weight {worst.weight:.3g}" if worst else None,
        "reason": mute.reason or None,
    }
