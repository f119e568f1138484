"""`kvctl doctor`: what is wrong with the fleet and with this host, what it comes from, and what to type next."""

from __future__ import annotations

import click

from kvctl.commands.health_query import HealthQuery, HealthReading, earlier
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.queries import conclude, source
from kvctl.commands.settings import Settings
from kvctl.exit_codes import ExitCode
from kvctl.health.host.inspection import inspect, local_agents
from kvctl.health.host.silence import silences
from kvctl.health.host.view import HostView
from kvctl.health.snapshot import HEALTH_CALLS
from kvctl.render.doctor import DOCTOR, blocks, is_problem, rows
from kvctl.render.report import Report
from kvctl_agent.contract.admin import socket_dir


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
