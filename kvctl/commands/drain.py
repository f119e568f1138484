"""`kvctl drain` and `kvctl resume`: whether agents take new rooms."""

from __future__ import annotations

import click

from kvctl.client.calls import Call
from kvctl.commands.acting import act, named, yes_option
from kvctl.commands.names import AgentName
from kvctl.commands.options import KvctlCommand, pass_settings
from kvctl.commands.settings import Settings
from kvctl.views.operations import DONE


@click.command(cls=KvctlCommand, view=DONE)
@click.argument("agents", nargs=-1, type=AgentName())
@yes_option
@pass_settings
def drain(settings: Settings, agents: tuple[str, ...], yes: bool) -> None:
    """Have AGENTS (all that match, where none is named) take no new rooms; those in flight go on to their end.

    Take the engine out of its router first: it gets an error for each new room. kvctl wait --for drained waits for the
    rooms in flight, kvctl resume undoes it. Level: operate.
    """
    act(
        settings,
        Call("drain"),
        lambda found: f"take no new rooms any more: {named(found)}",
        yes=yes,
        names=agents,
    )


@click.command(cls=KvctlCommand, view=DONE)
@click.argument("agents", nargs=-1, type=AgentName())
@yes_option
@pass_settings
def resume(settings: Settings, agents: tuple[str, ...], yes: bool) -> None:
    """Have AGENTS (all that match, where none is named) take new rooms again. Level: operate."""
    act(settings, Call("resume"), lambda found: f"take new rooms again: {named(found)}", yes=yes, names=agents)
