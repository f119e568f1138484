"""Shell completion: click's scripts, and the values that they request from `kvctl`.

At every press of the completion key the scripts run `kvctl` with VARIABLE set. Completion must therefore be quick and
never fail: if the command line, a file or an agent is invalid, there are simply no completions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from kvctl.commands.options import GlobalOptions, KvctlCommand
from kvctl.commands.settings import contexts as saved_contexts
from kvctl.commands.settings import resolve
from kvctl.render.sanitize import one_line

if TYPE_CHECKING:
    from kvctl.client.calls import Call
    from kvctl.client.fleet import AgentAnswer

FILES = {"bash": "kvctl.bash", "zsh": "_kvctl", "fish": "kvctl.fish"}
"""File name that each shell requires of its script."""

VARIABLE = "_KVCTL_COMPLETE"
# Time limits for agents. 80 ms plus the start of the interpreter is about 200 ms, which a person does not notice. If no
# agent answers in this time, the machine is busy, and a late answer is better than none.
_ANSWER_NS = (80_000_000, 400_000_000)
_MOST_ROOMS = 64
_UNQUOTED = re.compile(r"[A-Za-z0-9_.,:=@%+/-]*")  # the scripts insert values as they are

Items = list[CompletionItem[str]]


@click.command(
    cls=KvctlCommand,
    examples=[
        ("bash, for all shells", "kvctl completion bash > ~/.local/share/bash-completion/completions/kvctl"),
        ("zsh, for all shells", "kvctl completion zsh > ~/.zfunc/_kvctl"),
        ("fish, for this shell", "kvctl completion fish | source"),
    ],
)
@click.argument("shell", type=click.Choice(tuple(FILES)))
def completion(shell: str) -> None:
    """Print the script with which SHELL completes commands, options, their values, agents and rooms.

    To try it in the current shell: source <(kvctl completion bash) or source <(kvctl completion zsh).
    """
    click.echo(script(shell), nl=False)


def script(shell: str) -> str:
    """Returns the script for a shell."""
    kind = get_completion_class(shell)
    assert kind is not None
    made = kind(completion, {}, "kvctl", VARIABLE)
    return made.source_template % made.source_vars()


def answer(root: click.Command) -> int:
    """Prints the completions of the command line that the script has put into the environment."""
    try:
        return shell_complete(root, {}, "kvctl", VARIABLE, os.environ[VARIABLE])
    except (Exception, SystemExit):  # see the module's docstring
        return 0


def agents(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Completes the names of the context's agents, or else of live agents on this machine."""
    from kvctl.client.endpoints import discover, is_address

    flags = {**ctx.ensure_object(dict), "endpoint": ()}
    if any(map(is_address, resolve(flags).endpoints)):
        return _matching(((agent.name, "") for agent in _agents(ctx, flags=flags)), incomplete)
    return _matching(((endpoint.name, "") for endpoint in discover().live), incomplete)


def hosts(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Completes the names of the agents' hosts."""
    return _matching(((host, "") for host in sorted({agent.host for agent in _agents(ctx) if agent.host})), incomplete)


def labels(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Completes the keys of labels, and the values of host and role in the last of several."""
    from kvctl.client.endpoints import LABELS

    before, comma, last = incomplete.rpartition(",")
    key, separator, value = last.partition("=")
    if not separator:
        return _matching(((f"{before}{comma}{each}=", "") for each in LABELS), incomplete)
    start = f"{before}{comma}{key}="
    if key == "host":
        return [CompletionItem(f"{start}{item.value}") for item in hosts(ctx, param, value)]
    return _matching(((f"{start}{role}", "") for role in ("prefill", "decode") if key == "role"), incomplete)


def contexts(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Completes the names of the saved contexts."""
    return _matching(((name, "") for name in saved_contexts().named), incomplete)


def columns(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Completes the last name in a list of columns, leaving out the columns that are already in the list."""
    view = ctx.command.shown_view(ctx) if isinstance(ctx.command, GlobalOptions) else None
    if view is None:
        return []
    before, comma, last = incomplete.rpartition(",")
    present = {name.lstrip("-") for name in before.split(",")}
    minus = "-" if last.startswith("-") else ""
    names = ((f"{before}{comma}{minus}{name}", "") for name in view.names() if name not in present)
    return _matching(names, incomplete)


def rooms(ctx: click.Context, param: click.Parameter, incomplete: str) -> Items:
    """Completes the numbers of active and recently finished rooms, the latest first."""
    from kvctl.client.calls import Call

    found: dict[str, tuple[int, str]] = {}
    calls = tuple(Call(command, {"limit": _MOST_ROOMS}) for command in ("rooms", "history", "failed"))
    for row in _answers(ctx, calls):
        opened, text = row["opened_at_ns"], f"{row['state']} on {row['agent']}"
        if row["room"] not in found or found[row["room"]][0] < opened:
            found[row["room"]] = (opened, text)
    latest = sorted(found.items(), key=lambda each: each[1][0], reverse=True)
    return _matching(((room, text) for room, (_, text) in latest), incomplete)[:_MOST_ROOMS]


def _answers(ctx: click.Context, calls: Sequence[Call]) -> list[dict[str, Any]]:
    from kvctl.client.fleet import room_rows

    agents = _agents(ctx, calls)
    return [row for call in calls for agent in agents for row in room_rows(agent.data, call.command)]


def _agents(
    ctx: click.Context, calls: Sequence[Call] = (), flags: Mapping[str, Any] | None = None
) -> list[AgentAnswer]:
    """Returns the agents that answer `calls` in the time that a person waits for a completion.

    `flags` are by default those of the command line.
    """
    from kvctl.commands.queries import source

    settings = resolve(ctx.ensure_object(dict) if flags is None else flags)
    for timeout_ns in _ANSWER_NS:
        with source(replace(settings, timeout_ns=timeout_ns)) as fleet:
            survey = fleet.survey(calls)
        if survey.agents or not survey.discovery.live:
            break
    return survey.agents


def _matching(items: Iterable[tuple[str, str]], incomplete: str) -> Items:
    return [
        CompletionItem(value, help=one_line(text) or None)
        for value, text in items
        if value.startswith(incomplete) and _UNQUOTED.fullmatch(value)
    ]
