"""`kvctl health`: lists findings and health codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from kvctl.client.fleet import Survey
from kvctl.client.health_reads import DIAGNOSIS_CALLS
from kvctl.commands.health_query import code_of, complete_code, earlier, ignore_option
from kvctl.commands.options import KvctlGroup
from kvctl.commands.output import Output
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.health.codes import CODES
from kvctl.health.engine import HealthWatch, Ignored
from kvctl.health.finding import Code, Severity
from kvctl.render import palette
from kvctl.render.findings import HEALTH, labelled, overview, row
from kvctl.render.report import Block, Report, Text
from kvctl.render.view import Column, Kind, Row, View, Width

CODES_VIEW = View(
    "health_codes",
    (
        Column("code"),
        Column("severity", Kind.VERDICT, help="Highest severity of the code.", styles=palette.VERDICTS),
        Column("area", width=Width.NORMAL, help="Area of kvctl check that includes the code."),
        Column("sees", Kind.SENTENCE, help="Symptoms."),
        Column("means", Kind.SENTENCE, Width.WIDE, "Meaning of the code."),
        Column("remedy", Kind.SENTENCE, Width.WIDE),
        Column("alert", width=Width.WIDE, help="Equivalent Prometheus expression, if the metrics suffice."),
    ),
)


def code_row(code: Code) -> dict[str, Any]:
    """Returns the row of CODES_VIEW for one health code."""
    return {
        "code": code.name,
        "severity": code.severity.label,
        "area": code.area,
        "sees": code.sees,
        "means": code.means,
        "remedy": code.remedy,
        "alert": code.alert,
    }


def page(rows: Sequence[Row], width: int) -> list[Block]:
    """Formats the full description of each health code for a terminal; a `Report`'s `blocks`."""
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


@click.group(cls=KvctlGroup, default="show")
def health() -> None:
    """Findings about the fleet, worst first; `kvctl health` alone shows one line per finding."""


@health.command(
    view=HEALTH,
    short_help="One line per finding, the worst first.",
    examples=[
        ("Findings, the worst first", "kvctl health"),
        ("Stop a script if there is a problem", "kvctl health -q || exit 1"),
        ("Critical findings only, every 10 s", "kvctl health --filter 'severity=critical' -w 10"),
        ("Without one code for one agent", "kvctl health --ignore KV_PEER_LOST:decode-0"),
    ],
)
@ignore_option
def show(settings: Settings, ignored: Sequence[Ignored]) -> None:
    """One line per finding, the worst first.

    Reads the fleet twice, a second apart, because some problems show only in the growth of counters; with -w each
    reading is compared with the one before. kvctl doctor shows evidence and remedies.

    Exit codes as for kvctl doctor: 0 no problem, 1 a warning, a critical finding or an agent that does not answer, 3 no
    agent. Findings of severity info and ignored ones do not count; --filter changes only the output. For monitoring,
    use kvctl check.
    """
    query = HealthWatch(earlier(settings), ignored)

    def read(survey: Survey) -> Report:
        reading = query(survey)
        agents, silent = len(reading.snapshot.answered), len({fault.agent for fault in survey.faults})
        return Report(
            HEALTH,
            [row(each) for each in reading.findings],
            agents,
            survey.faults,
            blocks=lambda kept, width: (
                overview(kept, agents, silent, len(CODES), len(reading.ignored), survey.hosts) if agents else []
            ),
            wrong=bool(survey.faults) or any(each.severity > Severity.INFO for each in reading.findings),
        )

    run(settings, HEALTH, DIAGNOSIS_CALLS, read)


@health.command(
    view=CODES_VIEW,
    short_help="Every health code and its symptom.",
    examples=[("All health codes", "kvctl health codes")],
)
def codes(settings: Settings) -> None:
    """Every health code with the symptom that an operator sees; contacts no agent."""
    rows = [code_row(each) for each in CODES]
    Output(settings).emit(Report(CODES_VIEW, rows, answered=0))


@health.command(
    view=CODES_VIEW,
    short_help="The page of a code.",
    examples=[("What KV_RING_PINNED means and what to do", "kvctl health explain ring_pinned")],
)
@click.argument("code", shell_complete=complete_code)
def explain(settings: Settings, code: str) -> None:
    """The page of a code: symptom, meaning, remedy, and the same condition as a Prometheus alert.

    Upper or lower case, with or without KV_; contacts no agent.
    """
    Output(settings).emit(Report(CODES_VIEW, [code_row(code_of(code))], answered=0, blocks=page))
