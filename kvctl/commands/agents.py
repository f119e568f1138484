"""`kvctl agents`: who is there, who left only a socket behind, and how far away they are."""

from __future__ import annotations

from typing import Any

import click

from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.reading import run
from kvctl.commands.settings import Settings
from kvctl.views.agents import AGENTS
from kvctl.views.report import Report

_CLOCK_ROUNDS = 3


@click.command(
    cls=KvctlCommand,
    view=AGENTS,
    examples=[
        ("Agents of this machine", "kvctl agents"),
        ("Agents on other machines", "kvctl agents -e tcp://node-1:7000 --key ops --server-key fleet.pub"),
    ],
)
@pass_settings
def agents(settings: Settings) -> None:
    """Who is there: state, round trip, uptime, version, incarnation, clock offset with its bound.

    Sockets of processes that are gone are marked stale; the next agent of that name takes them over.
    """
    run(settings, AGENTS, (), _read, clock_rounds=_CLOCK_ROUNDS)


def _read(survey: Survey) -> Report:
    rows: list[dict[str, Any]] = [
        {
            **agent.hello,
            "agent": agent.name,
            "state": "draining" if agent.hello.get("draining") else "ok",
            "rtt_ns": agent.rtt_ns,
            "clock_offset_ns": agent.clock.offset_ns,
            "clock_error_ns": agent.clock.error_ns,
            "endpoint": agent.endpoint.address,
        }
        for agent in survey.agents
    ]
    answered = len(rows)
    gone = {endpoint.name for endpoint in survey.discovery.stale}
    rows += [
        {"agent": endpoint.name, "state": "stale", "endpoint": endpoint.address} for endpoint in survey.discovery.stale
    ]
    rows += [{"agent": fault.agent, "state": fault.code} for fault in survey.faults if fault.agent not in gone]
    notes = [f"{len(gone)} stale: the process is gone, its socket is not in anybody's way"] if gone else []
    return Report(AGENTS, rows, answered, survey.faults, notes=notes)
