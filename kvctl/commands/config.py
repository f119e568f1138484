"""`kvctl config`: every configuration value of the agents, and where it comes from."""

from __future__ import annotations

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.config_explain import explain
from kvctl.commands.config_set import set_value
from kvctl.commands.options import KvctlGroup, pass_settings
from kvctl.commands.queries import run
from kvctl.commands.settings import Settings
from kvctl.render.config import CONFIG, ORIGINS, shared
from kvctl.render.report import Report


@click.group(cls=KvctlGroup, default="show")
def config() -> None:
    """Configuration of the agents; `kvctl config` alone shows it."""


@config.command(
    view=CONFIG,
    short_help="Every value with its origin.",
    examples=[
        ("Values that differ from the defaults", "kvctl config show --origin"),
        ("One key on all agents", "kvctl config --filter 'key=staging_ring_mb'"),
    ],
)
@click.option(
    "--origin",
    is_flag=True,
    help="Only values that are not the default, with their origin: file, environment, argument.",
)
@pass_settings
def show(settings: Settings, origin: bool) -> None:
    """Every value with its origin: default, file, environment or argument. Agents that agree share a row."""
    view = ORIGINS if origin else CONFIG

    def read(survey: Survey) -> Report:
        answers = survey.answers("config")
        rows = shared([(agent.name, data) for agent, data in answers])
        chosen = [row for row in rows if not origin or row["origin"] != "default"]
        return Report(view, chosen, len(answers), survey.faults)

    run(settings, view, (Call("config"),), read)


config.add_command(explain)
config.add_command(set_value)
