"""`kvctl config show`: every configuration value of the agents, and where it comes from."""

from __future__ import annotations

from typing import Any

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.options import KvctlGroup, pass_settings
from kvctl.commands.reading import run
from kvctl.commands.settings import Settings
from kvctl.views.config import CONFIG
from kvctl.views.report import Report


@click.group(cls=KvctlGroup, default="show")
def config() -> None:
    """Configuration of the agents; `kvctl config` alone shows it."""


@config.command(view=CONFIG, short_help="Every value with its origin.")
@pass_settings
def show(settings: Settings) -> None:
    """Every value with its origin: default, file, environment or argument. Agents that agree share a row."""
    run(settings, CONFIG, (Call("config"),), _read)


def _read(survey: Survey) -> Report:
    answers = survey.answers("config")
    shared: dict[tuple[str, str, str], dict[str, Any]] = {}
    for agent, rows in answers:
        for row in rows:
            merged = shared.setdefault((row["key"], repr(row["value"]), row["origin"]), {**row, "agents": []})
            merged["agents"].append(agent.name)
    return Report(CONFIG, list(shared.values()), len(answers), survey.faults)
