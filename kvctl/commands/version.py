"""`kvctl version`: what this tool is, and with `--agents` what it would talk to."""

from __future__ import annotations

import platform
from typing import Any

import click

from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.output import Output
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.render.report import Report
from kvctl.render.view import Column, Kind, View, Width
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.admin import PROTOCOL_MAX, PROTOCOL_MIN

VERSION_VIEW = View(
    "version",
    (
        Column("component", help="kvctl, or the name of the agent."),
        Column("version"),
        Column("protocol", kind=Kind.LIST),
        Column("python", width=Width.NORMAL, help="Version of Python."),
        Column("endpoint", width=Width.WIDE),
    ),
)


@click.command(
    cls=KvctlCommand,
    view=VERSION_VIEW,
    examples=[
        ("This tool", "kvctl version"),
        ("This tool and the running agents", "kvctl version --agents"),
    ],
)
@click.option("--agents", is_flag=True, help="Versions of the running agents, too.")
@pass_settings
def version(settings: Settings, agents: bool) -> None:
    """Version of this tool and the admin protocols that it speaks."""
    own = {
        "component": "kvctl",
        "version": VERSION,
        "protocol": [PROTOCOL_MIN, PROTOCOL_MAX],
        "python": platform.python_version(),
        "endpoint": None,
    }
    if not agents:
        Output(settings).emit(Report(VERSION_VIEW, [own], answered=1))
        return

    def read(survey: Survey) -> Report:
        rows: list[dict[str, Any]] = [
            own,
            *(
                {
                    "component": agent.name,
                    "version": agent.hello["version"],
                    "protocol": agent.hello["protocol"],
                    "python": None,
                    "endpoint": agent.endpoint.address,
                }
                for agent in survey.agents
            ),
        ]
        others = sorted({agent.hello["version"] for agent in survey.agents} - {VERSION})
        notes = [f"agents of another version than this kvctl: {', '.join(others)}"] if others else []
        return Report(VERSION_VIEW, rows, len(survey.agents), survey.faults, notes=notes)

    run(settings, VERSION_VIEW, (), read)
