"""View of `kvctl doctor`: ranked problems, each with the next command, then the checks of this host."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from kvctl.health.finding import Finding, Severity
from kvctl.health.host.fact import Fact
from kvctl.health.host.silence import Silence
from kvctl.render import palette
from kvctl.render.findings import headline, labelled, paragraph, row
from kvctl.render.kinds import Kind
from kvctl.render.report import Block, Line, Text
from kvctl.render.view import Column, Row, View, Width

HOST = "host"
_TOPIC = 18
_COMMAND = re.compile(r"`([^`]+)`")

DOCTOR = View(
    "doctor",
    (
        Column("rank", kind=Kind.COUNT, header="#"),
        Column("severity", kind=Kind.VERDICT, styles=palette.VERDICTS),
        Column("code"),
        Column("subject"),
        Column("cause"),
        Column("next", width=Width.NORMAL),
        Column("since", kind=Kind.DURATION, width=Width.WIDE),
        Column("agents", kind=Kind.LIST, width=Width.WIDE),
        Column("evidence", lambda each: each["evidence"], Kind.MAP, Width.WIDE),
        Column("remedy", width=Width.WIDE),
    ),
)


def rows(findings: Iterable[Finding], silent: Iterable[Silence], facts: Sequence[Fact]) -> list[dict[str, Any]]:
    """Returns the rows, most severe first; passed host checks come last and have no rank."""
    unheard = [_silent(each) for each in silent]
    found = [_found(finding) for finding in findings]
    bad = [_of_host(fact) for fact in facts if fact.severity > Severity.INFO]
    # A process that hangs explains more than the findings that other agents report about it.
    problems = sorted([*unheard, *found, *bad], key=lambda each: -Severity[each["severity"].upper()])
    ranked = [{**each, "rank": number} for number, each in enumerate(problems, 1)]
    return [*ranked, *(_of_host(fact) for fact in facts if fact.severity is Severity.INFO)]


def is_problem(each: Row) -> bool:
    """Whether the row is more severe than info."""
    return each["rank"] is not None and Severity[each["severity"].upper()] > Severity.INFO


def next_step(remedy: str) -> str | None:
    """Returns the first command of a remedy, ready to paste into a shell; None if it has no command."""
    command = _COMMAND.search(remedy)
    return command[1] if command else None


def _found(finding: Finding) -> dict[str, Any]:
    return {**row(finding), "rank": None, "next": next_step(finding.remedy)}


def _silent(each: Silence) -> dict[str, Any]:
    finding = Finding(each.code, Severity.CRITICAL, each.agent or "agents", (), each.text, each.remedy)
    return {**_found(finding), "agents": [each.agent] if each.agent else []}


def _of_host(fact: Fact) -> dict[str, Any]:
    finding = Finding(
        code=fact.code or HOST,
        severity=fact.severity,
        subject=fact.topic,
        agents=(),
        cause=f"{fact.found}: {fact.means}",
        remedy=fact.remedy,
        evidence={"found": fact.found, "means": fact.means},
    )
    return _found(finding)


def blocks(kept: Sequence[Row], width: int, looked_at: str, quiet: int) -> list[Block]:
    """Formats a paragraph per ranked row, a table of the host checks, and the command to continue with.

    Args:
        kept: the rows.
        width: of the terminal.
        looked_at: describes what was examined.
        quiet: number of muted findings.
    """
    problems = [each for each in kept if each["rank"] is not None]
    facts = [each for each in kept if each["rank"] is None]
    head: Line = [headline(problems), (f"   {looked_at}", "dim"), (f", {quiet} muted" if quiet else "", "yellow")]
    found: list[Block] = [Text([head])]
    found += [Text(paragraph(_as_told(each), width, each["rank"])) for each in problems]
    if facts:
        found.append(Text([[("this host", "bold")], *(line for each in facts for line in _fact(each, width))]))
    first = next((each["next"] for each in problems if is_problem(each)), None)
    if first is not None:
        found.append(Text([[("next: ", "bold"), (first, "bold")]]))
    return found


def _fact(each: Row, width: int) -> list[Line]:
    evidence = each["evidence"]
    text = f"{evidence['found']}: {evidence['means']}"
    if each["remedy"]:
        text += f" ({each['remedy']})"
    return labelled(each["subject"], text, width, _TOPIC)


def _as_told(each: Row) -> Row:
    """Leaves out the summary of a host check, whose cause already contains it."""
    return {**each, "evidence": {}} if set(each["evidence"]) == {"found", "means"} else each
