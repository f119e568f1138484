"""`kvctl hosts`: lists the hosts of the agents, and shows one host with its agents."""

from __future__ import annotations

import click

from kvctl.client.fleet import Survey
from kvctl.client.health_reads import HEALTH_CALLS
from kvctl.commands.health_query import agent_rows
from kvctl.commands.options import KvctlGroup, completed_by
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.health.engine import HealthWatch
from kvctl.render.hosts import HOSTS, host_rows, host_screen
from kvctl.render.report import Report
from kvctl.render.status import STATUS
from kvctl_agent.contract.values import near

_CLOCK_ROUNDS = 3


@click.group(cls=KvctlGroup, default="ls")
def hosts() -> None:
    """Hosts of the agents: agents by role, instances, rate, clock, health; `kvctl hosts` alone lists them."""


@hosts.command(
    view=HOSTS,
    short_help="One line per host, the odd ones first.",
    examples=[
        ("All hosts, the odd ones first", "kvctl hosts"),
        ("Hosts of which agents do not answer", "kvctl hosts --filter 'silent>0'"),
        ("Clocks, for a script", "kvctl hosts -o tsv --columns host,clock_offset,clock_error"),
    ],
)
def ls(settings: Settings) -> None:
    """One line per host: agents, instances, rate, ring use, round trip, clock, health; the odd ones come first.

    The clock of a host is compared with the one of this machine; of all its agents, the measurement with the smallest
    error counts. A host of which no agent answers is one line.
    """
    health = HealthWatch()

    def read(survey: Survey) -> Report:
        reading = health(survey)
        found = agent_rows(survey, reading)
        rows = host_rows(found.rows, survey)
        return Report(HOSTS, rows, found.answered, found.faults, notes=found.notes)

    run(settings, HOSTS, HEALTH_CALLS, read, clock_rounds=_CLOCK_ROUNDS)


@hosts.command(
    view=STATUS, short_help="One host and its agents.", examples=[("The agents of one host", "kvctl hosts show node-3")]
)
@click.argument("host", shell_complete=completed_by("hosts"))
def show(settings: Settings, host: str) -> None:
    """One host and its agents, with the columns of kvctl status."""
    health = HealthWatch()

    def read(survey: Survey) -> Report:
        reading = health(survey)
        found = agent_rows(survey, reading)
        rows = [row for row in found.rows if row["host"] == host]
        names = {row["name"] for row in rows}
        report = Report(
            STATUS, rows, sum("rank" in row for row in rows), [fault for fault in found.faults if fault.agent in names]
        )
        if rows:
            (about,) = host_rows(rows, survey)
            report.blocks = lambda kept, width: host_screen(about, kept)
        elif found.rows:
            known = sorted({row["host"] for row in found.rows if row["host"]})
            hint = near(host, known) or f"; kvctl hosts lists the {len(known)} that have"
            report.failure = f"no agent is on a host {host}{hint}"
        return report

    run(settings, STATUS, HEALTH_CALLS, read, clock_rounds=_CLOCK_ROUNDS)
