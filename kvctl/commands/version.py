"""`kvctl version`: prints the versions of this tool and, with `--agents`, of the running agents."""

from __future__ import annotations

import platform
from typing import Any

import click

from kvctl.client.fleet import Survey
from kvctl.commands.options import command
from kvctl.commands.output import Output
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.render.report import Report
from kvctl.render.view import Column, Kind, View, Width
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.admin import PROTOCOL_MAX, PROTOCOL_MIN

VERSIONS = View(
    "version",
    (
        Column("component", help="kvctl, or the name of the agent."),
        Column("version"),
        Column("protocol", Kind.LIST),
        Column("python", width=Width.NORMAL, help="Version of Python."),
        Column("endpoint", width=Width.WIDE),
    ),
)


@command(
    view=VERSIONS,
    examples=[("This tool", "kvctl version"), ("This tool and the running agents", "kvctl version --agents")],
)
@click.option("--agents", is_flag=True, help="Also the versions of the running agents.")
def version(settings: Settings, agents: bool) -> None:
    """Version of this tool and the admin protocols that it supports."""
    own = {
        "component": "kvctl",
        "version": VERSION,
        "protocol": [PROTOCOL_MIN, PROTOCOL_MAX],
        "python": platform.python_version(),
        "endpoint": None,
    }
    if agents:
        run(settings, VERSIONS, (), lambda survey: _read(survey, own))
    Output(settings).emit(Report(VERSIONS, [own], answered=1))


def _read(survey: Survey, own: dict[str, Any]) -> Report:
    rows = [own]
    for agent in survey.agents:
        reported = {"version": agent.hello["version"], "protocol": agent.hello["protocol"], "python": None}
        rows.append({"component": agent.name, **reported, "endpoint": agent.endpoint.shown_address})
    others = sorted({agent.hello["version"] for agent in survey.agents} - {VERSION})
    notes = [f"agents of another version than this kvctl: {', '.join(others)}"] if others else []
    return Report(VERSIONS, rows, len(survey.agents), survey.faults, notes=notes)
