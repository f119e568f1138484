"""`kvctl drain` and `kvctl resume`: make agents refuse new rooms, or accept them again."""

from __future__ import annotations

from typing import NoReturn

import click

from kvctl.client.calls import Call
from kvctl.commands.mutations import DONE, act, named, once_and_live, yes_option
from kvctl.commands.options import command, completed_by
from kvctl.commands.queries import live
from kvctl.commands.settings import Settings
from kvctl.commands.wait import Drained, Patience, wait_for
from kvctl.exit_codes import ExitCode

_agents = click.argument("agents", nargs=-1, shell_complete=completed_by("agents"))
_all = click.option("--all", "everyone", is_flag=True, help="All agents that kvctl agents lists.")


@command(
    view=DONE,
    examples=[
        ("One agent, and wait for its rooms", "kvctl drain decode-0 --wait 60s"),
        ("All agents of a container that is about to be stopped", "kvctl drain --all --yes --wait 60s"),
        ("All decode ranks, from a script", "kvctl drain -l role=decode --yes"),
        ("The whole fleet", "kvctl drain --all"),
    ],
)
@_agents
@_all
@yes_option
@click.option(
    "--wait",
    "patience",
    metavar="TIME",
    help="Then wait at most this long until no room is active; exit code 4 if some still are.",
)
def drain(settings: Settings, agents: tuple[str, ...], everyone: bool, yes: bool, patience: str | None) -> None:
    """Make AGENTS accept no new rooms; rooms in flight finish.

    Name the agents, select them with -e or -l, or use --all. First take the engine out of its router: every new room
    fails with an error. --wait waits for the rooms in flight, as kvctl wait --for drained does; undo with kvctl resume.
    Level: operate.
    """
    if patience is None:
        _act(settings, Call("drain"), agents, everyone, yes)
    limit = Patience("--wait", patience)
    drained = Drained()
    chosen = settings.naming(agents)
    with live(chosen) as fleet:
        drained.progress(fleet.survey(drained.calls))  # learns the agents, which may end as soon as they are drained
    try:
        _act(settings, Call("drain"), agents, everyone, yes)
    except click.exceptions.Exit as done:
        if done.exit_code != ExitCode.OK:
            raise
    wait_for(chosen, drained, "drained", limit)


@command(view=DONE, examples=[("One agent", "kvctl resume decode-0"), ("All drained agents", "kvctl resume --all")])
@_agents
@_all
@yes_option
def resume(settings: Settings, agents: tuple[str, ...], everyone: bool, yes: bool) -> None:
    """Make drained AGENTS accept new rooms again.

    Name the agents, select them with -e or -l, or use --all. Level: operate.
    """
    _act(settings, Call("resume"), agents, everyone, yes)


def _act(settings: Settings, call: Call, agents: tuple[str, ...], everyone: bool, yes: bool) -> NoReturn:
    resuming = call.command == "resume"
    _check_selected(settings, agents, everyone, draining=resuming)
    effect = "will accept new rooms again" if resuming else "will accept no new rooms"
    act(
        settings,
        call,
        lambda found: f"{call.command.title()} {named(found)} ({'it' if len(found) == 1 else 'they'} {effect})",
        yes=yes,
        names=agents,
    )


def _check_selected(settings: Settings, agents: tuple[str, ...], everyone: bool, draining: bool) -> None:
    """Raises click.UsageError unless the command line names agents, selects them with -e or -l, or has --all.

    Endpoints of a context or of the environment name the fleet, so they do not count as a selection.

    Args:
        draining: whether the error lists the agents that are draining, or those that are not.
    """
    if agents and everyone:
        raise click.UsageError("name agents or use --all, not both")
    flags = click.get_current_context().ensure_object(dict)
    if agents or everyone or flags.get("endpoint") or flags.get("labels"):
        return
    once_and_live(settings)
    with live(settings) as fleet:
        answers = fleet.survey((Call("status"),)).answers("status")
    found = [agent for agent, data in answers if bool(data.get("draining")) is draining]
    those = f"{'draining' if draining else 'not draining'}: {named(found) if found else 'none'}"
    raise click.UsageError(f"name the agents, or use --all{f' ({those})' if answers else ''}")
