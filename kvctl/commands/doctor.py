"""`kvctl doctor`: what is wrong with the fleet and with this host, what it comes from, and what to type next."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import click

from kvctl.commands.health_query import HealthQuery, HealthReading, earlier
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.queries import conclude, source
from kvctl.commands.settings import Settings
from kvctl.exit_codes import ExitCode
from kvctl.health.finding import Finding, Severity
from kvctl.health.host.fact import Fact
from kvctl.health.host.inspection import inspect, local_agents
from kvctl.health.host.silence import Silence, silences
from kvctl.health.host.view import HostView
from kvctl.health.snapshot import HEALTH_CALLS
from kvctl.render import palette
from kvctl.render.findings import headline, labelled, paragraph, row
from kvctl.render.report import Block, Line, Report, Text
from kvctl.render.view import Column, Kind, Row, View, Width
from kvctl_agent.contract.admin import socket_dir

HOST = "host"
_TOPIC = 18
_COMMAND = re.compile(r"`([^`]+)`")

DOCTOR = View(
    "doctor",
    (
        Column(
            "rank",
            kind=Kind.COUNT,
            header="#",
            help="Position in the list, most severe first; empty for host checks that passed.",
        ),
        Column("severity", kind=Kind.VERDICT, styles=palette.VERDICTS, help="Severity of the finding."),
        Column("code"),
        Column("subject"),
        Column("cause"),
        Column("next", width=Width.NORMAL, help="Command to run next."),
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
    said = each["evidence"]
    text = f"{said['found']}: {said['means']}"
    if each["remedy"]:
        text += f" ({each['remedy']})"
    return labelled(each["subject"], text, width, _TOPIC)


def _as_told(each: Row) -> Row:
    """Leaves out the summary of a host check, whose cause already contains it."""
    return {**each, "evidence": {}} if set(each["evidence"]) == {"found", "means"} else each


@click.command(
    cls=KvctlCommand,
    view=DOCTOR,
    examples=[
        ("What is wrong, and the next command", "kvctl doctor"),
        ("Only this host: limits, devices, libraries", "kvctl doctor --host-only"),
        ("A bundle that somebody sent", "kvctl doctor --from incident.tar.zst"),
    ],
)
@click.option("--host-only", is_flag=True, help="Only this host; asks no agent.")
@pass_settings
def doctor(settings: Settings, host_only: bool) -> None:
    """Ranked findings: evidence, likely cause and next command; and what this host means for transfers.

    Reads the fleet twice, a second apart, and looks at this host: locked memory, RDMA and GPU, engines and their
    environment, namespaces, limits, ports, versions. With --from only the fleet: the host would be another.

    Exit codes as of kvctl health: 0 nothing is wrong, 1 a warning, a critical finding or an agent that does not answer,
    3 no agent (the host is checked all the same). A warning about this host is 1, too.
    """
    if settings.watch_ns is not None:
        raise click.UsageError("doctor looks once; kvctl health -w watches")
    if host_only and settings.from_file is not None:
        raise click.UsageError("--host-only looks at this host, and --from at a fleet that was elsewhere")
    output = Output(settings)
    output.selection(DOCTOR)
    if host_only:
        report = _report(None, HostView())
        output.emit(report)
        raise click.exceptions.Exit(ExitCode.FAILED if report.wrong else ExitCode.OK)
    looking = HealthQuery(settings, earlier(settings))
    with source(settings) as fleet:
        survey = fleet.survey(HEALTH_CALLS)
    look = looking(survey)
    host = HostView(agents=local_agents(look.snapshot)) if settings.from_file is None else None
    report = _report(look, host)
    output.emit(report)
    raise click.exceptions.Exit(conclude(output, settings, survey, report))


def _report(look: HealthReading | None, host: HostView | None) -> Report:
    """What is to be said.

    Args:
        look: None where no agent was asked.
        host: None where the fleet is remembered by a file, and was elsewhere.
    """
    snapshot = None if look is None else look.snapshot
    facts = [] if host is None else inspect(host, socket_dir(), snapshot)
    if look is None or snapshot is None:
        found = rows((), (), facts)
        return Report(
            DOCTOR,
            found,
            0,
            blocks=lambda kept, width: blocks(kept, width, "this host only", 0),
            wrong=any(map(is_problem, found)),
        )
    agents, quiet = len(snapshot.agents), len(look.judged.muted)
    looked_at = f"{agents} agent{'s' * (agents != 1)}" + (" and this host" if host is not None else "")
    if not agents and host is not None:
        looked_at = "this host only: no agent answered"
    found = rows(look.judged.raised, silences(snapshot.survey, host), facts)
    return Report(
        DOCTOR,
        found,
        agents,
        snapshot.faults,
        blocks=lambda kept, width: blocks(kept, width, looked_at, quiet),
        wrong=any(map(is_problem, found)),
        notes=list(look.remarks),
    )
