"""`kvctl drain` and `kvctl resume`: whether agents accept new rooms."""

from __future__ import annotations

from collections.abc import Sequence

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import AgentAnswer, Fleet
from kvctl.commands.mutations import DONE, act, named, once_and_live, yes_option
from kvctl.commands.options import AgentName, KvctlCommand, pass_settings
from kvctl.commands.settings import Settings


@click.command(
    cls=KvctlCommand,
    view=DONE,
    examples=[
        ("One agent; then wait for its rooms", "kvctl drain decode-0 && kvctl wait --for drained -e decode-0"),
        ("All decode ranks, from a script", "kvctl drain -l role=decode --yes"),
        ("The whole fleet", "kvctl drain --all"),
    ],
)
@click.argument("agents", nargs=-1, type=AgentName())
@click.option("--all", "everyone", is_flag=True, help="All agents that kvctl agents lists.")
@yes_option
@pass_settings
def drain(settings: Settings, agents: tuple[str, ...], everyone: bool, yes: bool) -> None:
    """Make AGENTS accept no new rooms; rooms in flight finish.

    Name the agents, choose them with -e or -l, or say --all. Take the engine out of its router first: it gets an error
    for each new room. kvctl wait --for drained waits for the rooms in flight, kvctl resume undoes it. Level: operate.
    """
    _check_chosen(settings, agents, everyone, draining=False)
    act(
        settings,
        Call("drain"),
        lambda found: f"Drain {named(found)} ({_they(found)} will accept no new rooms)",
        yes=yes,
        names=agents,
    )


@click.command(
    cls=KvctlCommand,
    view=DONE,
    examples=[("One agent", "kvctl resume decode-0"), ("All that were drained", "kvctl resume --all")],
)
@click.argument("agents", nargs=-1, type=AgentName())
@click.option("--all", "everyone", is_flag=True, help="All agents that kvctl agents lists.")
@yes_option
@pass_settings
def resume(settings: Settings, agents: tuple[str, ...], everyone: bool, yes: bool) -> None:
    """Make drained AGENTS accept new rooms again.

    Name the agents, choose them with -e or -l, or say --all. Level: operate.
    """
    _check_chosen(settings, agents, everyone, draining=True)
    act(
        settings,
        Call("resume"),
        lambda found: f"Resume {named(found)} ({_they(found)} will accept new rooms again)",
        yes=yes,
        names=agents,
    )


def _they(agents: Sequence[AgentAnswer]) -> str:
    return "it" if len(agents) == 1 else "they"


def _check_chosen(settings: Settings, agents: tuple[str, ...], everyone: bool, draining: bool) -> None:
    """Raises click.UsageError unless the command line says which agents, or all of them.

    Endpoints of a context or the environment say where the fleet is, not which of it is meant.

    Args:
        draining: of the agents that the error names.
    """
    if agents and everyone:
        raise click.UsageError("name agents or say --all, not both")
    flags = click.get_current_context().ensure_object(dict)
    if agents or everyone or flags.get("endpoint") or flags.get("labels"):
        return
    once_and_live(settings)
    with Fleet(settings.endpoints, settings.labels, settings.timeout_ns, settings.keys) as fleet:
        answers = fleet.survey((Call("status"),)).answers("status")
    found = [agent for agent, data in answers if bool(data.get("draining")) is draining]
    those = f"{'draining' if draining else 'not draining'}: {named(found) if found else 'none'}"
    raise click.UsageError(f"name the agents, or say --all{f' ({those})' if answers else ''}")
