"""`kvctl doctor`: ranks findings about the fleet and this host, with cause and next command."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from kvctl.client.health_reads import DIAGNOSIS_CALLS
from kvctl.commands.health_query import earlier, ignore_option
from kvctl.commands.options import command
from kvctl.commands.output import Output
from kvctl.commands.queries import conclude, source
from kvctl.commands.settings import Settings
from kvctl.exit_codes import ExitCode
from kvctl.health.engine import HealthReading, HealthWatch, Ignored
from kvctl.health.finding import Finding, Severity
from kvctl.health.host.inspection import command_facts, explain_faults, inspect, local_agents
from kvctl.health.host.view import HOST, Fact, HostView
from kvctl.render import palette
from kvctl.render.findings import folded, headline, labelled, paragraph, row
from kvctl.render.report import Block, Line, Report, Text
from kvctl.render.view import Column, Kind, Row, View, Width
from kvctl_agent.contract.admin import socket_dir

_TOPIC = 18
_COMMAND = re.compile(r"`([^`]+)`")

DOCTOR = View(
    "doctor",
    (
        Column(
            "rank",
            Kind.COUNT,
            help="Position in the list, most severe first; empty for host checks that passed.",
            header="#",
        ),
        Column("severity", Kind.VERDICT, help="Severity of the finding.", styles=palette.VERDICTS),
        Column("code"),
        Column("subject"),
        Column("cause", Kind.SENTENCE),
        Column("next", width=Width.NORMAL, help="Command to run next."),
        Column("since", Kind.DURATION, Width.WIDE),
        Column("agents", Kind.LIST, Width.WIDE),
        Column("evidence", Kind.MAP, Width.WIDE, path=lambda each: each["evidence"]),
        Column("remedy", Kind.SENTENCE, Width.WIDE),
    ),
)


def rows(findings: Iterable[Finding], faults: Iterable[Finding], facts: Sequence[Fact]) -> list[dict[str, Any]]:
    """Returns the rows of DOCTOR, most severe first; host checks that passed come last and have no rank.

    Args:
        faults: findings about agents that did not answer.
    """
    # A process that hangs explains more than the findings that other agents report about it.
    found = [_finding(finding) for finding in (*faults, *findings)]
    host = [_host_check(fact) for fact in facts if fact.severity > Severity.INFO]
    problems = sorted([*found, *host], key=lambda each: -Severity[each["severity"].upper()])
    ranked = [{**each, "rank": number} for number, each in enumerate(problems, 1)]
    return [*ranked, *(_host_check(fact) for fact in facts if fact.severity is Severity.INFO)]


def is_problem(each: Row) -> bool:
    """Returns whether the row is ranked and more severe than info."""
    return each["rank"] is not None and Severity[each["severity"].upper()] > Severity.INFO


def next_step(remedy: str) -> str | None:
    """Returns the first command of a remedy, ready to paste into a shell; None if it has no command."""
    command = _COMMAND.search(remedy)
    return command[1] if command else None


def _finding(finding: Finding) -> dict[str, Any]:
    return {**row(finding), "rank": None, "next": next_step(finding.remedy)}


def _host_check(fact: Fact) -> dict[str, Any]:
    finding = Finding(
        code=fact.code or HOST,
        severity=fact.severity,
        subject=fact.topic,
        agents=(),
        cause=f"{fact.found}: {fact.means}",
        remedy=fact.remedy,
        evidence={"found": fact.found, "means": fact.means},
    )
    return _finding(finding)


def blocks(
    kept: Sequence[Row],
    width: int,
    examined: str,
    ignored: int = 0,
    complete: bool = True,
    hosts: Mapping[str, str] | None = None,
) -> list[Block]:
    """Formats the ranked rows as paragraphs, the host checks as a table, and the next command to run.

    Args:
        examined: text that names the agents and hosts examined.
        hosts: hosts of all agents by name, to fold findings of one code.
    """
    ranked = [each for each in kept if each["rank"] is not None]
    problems = [{**each, "rank": number} for number, each in enumerate(folded(ranked, hosts or {}), 1)]
    facts = [each for each in kept if each["rank"] is None]
    head: Line = [
        headline(ranked, complete),
        (f"   {examined}", "dim"),
        (f", {ignored} ignored" if ignored else "", "yellow"),
    ]
    found: list[Block] = [Text([head])]
    found += [Text(paragraph(_without_summary(each), width, each["rank"])) for each in problems]
    if facts:
        found.append(Text([[("this host", "bold")], *(line for each in facts for line in _fact(each, width))]))
    first = next((each["next"] for each in problems if is_problem(each)), None)
    if first is not None:
        found.append(Text([[("next: ", "bold"), (first, "bold")]]))
    return found


def _fact(each: Row, width: int) -> list[Line]:
    text = each["cause"]
    if each["remedy"]:
        text += f" ({each['remedy']})"
    return labelled(each["subject"], text, width, _TOPIC)


def _without_summary(each: Row) -> Row:
    """Returns a host check without its evidence, which the cause already contains; returns other rows unchanged."""
    return {**each, "evidence": {}} if set(each["evidence"]) == {"found", "means"} else each


@command(
    view=DOCTOR,
    examples=[
        ("What is wrong, and the next command", "kvctl doctor"),
        ("Only this host: limits, devices, libraries", "kvctl doctor --host-only"),
        ("A recording", "kvctl doctor --from incident.kvrec"),
        ("Servers without an agent", "kvctl doctor --url http://prefill-0:30000 --url http://decode-0:30000"),
        ("The command of a server, before it is started", "kvctl doctor -- vllm serve MODEL --port 8100 …"),
    ],
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@ignore_option
@click.option("--host-only", is_flag=True, help="Only this host; contacts no agent.")
@click.option(
    "--url",
    "urls",
    multiple=True,
    metavar="URL",
    help="An engine's server without an agent, by the metrics that it exports, and not this host. Repeatable.",
)
def doctor(
    settings: Settings, command: tuple[str, ...], ignored: Sequence[Ignored], host_only: bool, urls: tuple[str, ...]
) -> None:
    """Ranked findings with evidence, likely cause and next command, and checks of this host.

    Reads the fleet twice, a second apart, asks agents that do not answer in time once more, and checks this host:
    locked memory, RDMA and GPU, engines and their environment, namespaces, limits, ports, versions, options of vLLM
    servers with kvctl's connector. With --from only the fleet, which may have run elsewhere.

    With --url, servers of SGLang, vLLM, Dynamo or NIXL's exporter are examined by their metrics alone, read twice five
    seconds apart: queues that only grow, failures, expired leases, KV that is computed again, slow transfers, requests
    without tokens. The same as -e URL, without checks of this host.

    COMMAND is the command line of a server of SGLang or vLLM with kvctl, after --. It is not run; only this host is
    checked, the server's options, environment and packages, and what conflicts with the servers that run here. For
    SGLang, the Python of the command imports it, which takes seconds.

    Exit codes as for kvctl health: 0 no problem, 1 a warning, a critical finding or an agent that does not answer, 3 no
    agent (the host is checked anyway). A warning about this host is 1, too.
    """
    if settings.watch_ns is not None:
        raise click.UsageError("doctor runs once; for repeated readings: kvctl health -w")
    if host_only and settings.from_file is not None:
        raise click.UsageError("--host-only checks this host, --from a recorded fleet: use one of them")
    if command and settings.from_file is not None:
        raise click.UsageError("a command is checked on this host, --from reads a recorded fleet: use one of them")
    if urls and (host_only or command or settings.from_file is not None):
        raise click.UsageError("--url examines servers that run: omit --host-only, --from and COMMAND")
    endpoints = [url if "://" in url else f"http://{url}" for url in urls]
    if not all(url.startswith(("http://", "https://", "metrics://")) for url in endpoints):
        raise click.UsageError("--url takes http://, https:// or metrics:// addresses; for those of agents, use -e")
    settings = replace(settings, endpoints=(*settings.endpoints, *endpoints))
    output = Output(settings)
    output.selection(DOCTOR)
    if host_only or command:
        host = HostView()
        about = command_facts(host, command)
        if command and about is None:
            raise click.UsageError(
                "the command starts no server of SGLang or vLLM: write it as in: kvctl doctor -- vllm serve MODEL … "
                "or kvctl doctor -- python -m sglang.launch_server …"
            )
        report = _report(None, host, command=about)
        output.emit(report)
        raise click.exceptions.Exit(ExitCode.FAILED if report.wrong else ExitCode.OK)
    query = HealthWatch(earlier(settings), ignored)
    with source(settings) as fleet:
        survey = fleet.survey(DIAGNOSIS_CALLS)
        reading = query(survey)
        found = survey.discovery.live
        elsewhere = urls or settings.from_file is not None or (found and all(each.metrics for each in found))
        local = None if elsewhere else HostView(agents=local_agents(reading.snapshot))
        report = _report(reading, local)
    output.emit(report)
    raise click.exceptions.Exit(conclude(output, settings, survey, report))


def _report(reading: HealthReading | None, host: HostView | None, command: Sequence[Fact] | None = None) -> Report:
    """Returns the report on the fleet, on this host, or on both.

    Args:
        reading: the fleet's health; None to report on this host only.
        host: the host to inspect; None if the fleet was read from a file.
        command: facts about a server that is not started yet; None to check those that run.
    """
    facts = [] if host is None else inspect(host, socket_dir(), None if reading is None else reading.snapshot, command)
    if reading is None:
        found = rows((), (), facts)
        return Report(
            DOCTOR,
            found,
            0,
            blocks=lambda kept, width: blocks(kept, width, "this host only"),
            wrong=any(map(is_problem, found)),
        )
    snapshot, ignored = reading.snapshot, len(reading.ignored)
    agents = len(snapshot.answered)
    hosts = len({agent.answer.host for agent in snapshot.answered.values()})
    where = f" on {hosts} hosts" if hosts > 1 else ""
    examined = f"{agents} agent{'s' * (agents != 1)}{where}" + (" and this host" if host is not None else "")
    if not agents and host is not None:
        examined = "this host only: no agent answered"
    complete = bool(agents) and not snapshot.faults
    found = rows(reading.findings, explain_faults(snapshot.survey, host), facts)
    return Report(
        DOCTOR,
        found,
        agents,
        snapshot.faults,
        blocks=lambda kept, width: blocks(kept, width, examined, ignored, complete, snapshot.survey.hosts),
        wrong=any(map(is_problem, found)),
    )
