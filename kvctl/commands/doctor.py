"""`kvctl doctor`: what is wrong with the fleet and with this host, what it comes from, and what to type next."""

from __future__ import annotations

import click

from kvctl.commands.looking import Look, Looking, earlier
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.reading import conclude, source
from kvctl.commands.settings import Settings
from kvctl.exit_codes import ExitCode
from kvctl.health.host.inspection import inspect, local_agents
from kvctl.health.host.silence import silences
from kvctl.health.host.view import HostView
from kvctl.health.snapshot import HEALTH_CALLS
from kvctl.views.doctor import DOCTOR, blocks, is_problem, rows
from kvctl.views.report import Report
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
    """What is wrong, ranked: evidence, likely cause, the exact next command; and what this host means for transfers.

    Looks at the fleet twice, a second apart, and at this host: locked memory, RDMA and GPU, engines and their
    environment, namespaces, limits, ports, versions. Exit code 0 when nothing is wrong, 1 when something is, 3 when
    there is no agent (the host is looked at all the same). With --from only the fleet: the host would be another.
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
        raise click.exceptions.Exit(_verdict(report, ExitCode.OK))
    looking = Looking(settings, earlier(settings))
    with source(settings) as fleet:
        survey = fleet.survey(HEALTH_CALLS)
    look = looking(survey)
    host = HostView(agents=local_agents(look.snapshot)) if settings.from_file is None else None
    report = _report(look, host)
    output.emit(report)
    raise click.exceptions.Exit(_verdict(report, conclude(output, settings, survey, report)))


def _report(look: Look | None, host: HostView | None) -> Report:
    """What is to be said.

    Args:
        look: None where no agent was asked.
        host: None where the fleet is remembered by a file, and was elsewhere.
    """
    snapshot = None if look is None else look.snapshot
    facts = [] if host is None else inspect(host, socket_dir(), snapshot)
    if look is None or snapshot is None:
        return Report(
            DOCTOR, rows((), (), facts), 0, blocks=lambda kept, width: blocks(kept, width, "this host only", 0)
        )
    agents, quiet = len(snapshot.agents), len(look.judged.muted)
    looked_at = f"{agents} agent{'s' * (agents != 1)}" + (" and this host" if host is not None else "")
    if not agents and host is not None:
        looked_at = "this host only: no agent answered"
    return Report(
        DOCTOR,
        rows(look.judged.raised, silences(snapshot.survey, host), facts),
        agents,
        snapshot.faults,
        blocks=lambda kept, width: blocks(kept, width, looked_at, quiet),
        notes=list(look.remarks),
    )


def _verdict(report: Report, otherwise: ExitCode) -> ExitCode:
    """Something wrong is 1, if there was anybody to be wrong."""
    if otherwise in {ExitCode.OK, ExitCode.PARTIAL} and any(is_problem(each) for each in report.rows):
        return ExitCode.FAILED
    return otherwise
