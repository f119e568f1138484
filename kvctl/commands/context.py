"""`kvctl context`: lists, shows, adds, selects and removes contexts, which are named fleets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvctl.client.discovery import split
from kvctl.client.keys import KeyNames
from kvctl.commands.context_file import KEYS, NAME
from kvctl.commands.options import KvctlGroup, completed_by
from kvctl.commands.output import Output
from kvctl.commands.settings import Settings, check_context, chosen_context, contexts
from kvctl.render.report import Report
from kvctl.render.view import Column, Kind, View, Width

CONTEXTS = View(
    "contexts",
    (
        Column("context", help="Name of the context."),
        Column(
            "in_use",
            Kind.FLAG,
            help="Whether this is the current context.",
            header="IN USE",
            styles={"True": "bold green"},
        ),
        Column("endpoint", Kind.LIST, help="Agents of the context."),
        Column("labels", Kind.LIST, Width.NORMAL, "Labels that select the agents."),
        Column("timeout", width=Width.NORMAL, help="Longest time to wait for an agent's answer."),
        Column("key", width=Width.NORMAL, help="Client key."),
        Column("server_key", width=Width.WIDE, help="Public key of the fleet."),
    ),
    sort=("context",),
    empty="no contexts: kvctl context add NAME -e tcp://HOST:PORT",
)


@click.group(cls=KvctlGroup, default="ls")
def context() -> None:
    """Named fleets: agents, labels, keys and timeout; `kvctl context` alone lists them.

    A context is chosen by `-c NAME`, KVCTL_CONTEXT=NAME or `kvctl context use NAME`. Precedence of values: flags, a
    context chosen by -c, environment, another context, user file.
    """


@context.command(
    "ls",
    view=CONTEXTS,
    short_help="All contexts; which one is in use.",
    examples=[("All contexts, and which one is in use", "kvctl context")],
)
def list_contexts(settings: Settings) -> None:
    """All contexts, and which one is in use."""
    _print(settings, contexts().named)


@context.command(short_help="One context.", examples=[("The context that is in use", "kvctl context show")])
@click.argument("name", required=False, shell_complete=completed_by("contexts"))
def show(settings: Settings, name: str | None) -> None:
    """One context; without NAME the one in use."""
    name = chosen_context(click.get_current_context().ensure_object(dict)) if name is None else name
    if name is None:
        raise click.UsageError("no context is in use: give a NAME, see kvctl context ls")
    _print(settings, {name: contexts().find(name, "NAME")})


@context.command(
    settings=False,
    short_help="Save -e, -l, --key, --server-key, --timeout as a context.",
    examples=[
        (
            "A fleet on two machines",
            "kvctl context add prod -e tcp://node-0:7000 -e tcp://node-1:7000 --server-key fleet.pub",
        ),
        (
            "The fleet that a prefill instance's registry knows",
            "kvctl context add prod -e registry://prefill-0:8998 --server-key fleet.pub",
        ),
        (
            "Pods of a headless service",
            "kvctl context add pods -e dns://kv-agents.default.svc:7311 --server-key fleet.pub",
        ),
        ("Agents that a file lists, which is read again each time", "kvctl context add lab -e file:///etc/agents.txt"),
        ("Decode ranks of this machine", "kvctl context add decode -l role=decode"),
    ],
)
@click.argument("name")
@click.option("--replace", is_flag=True, help="Replace the context of this name.")
@click.option("--use", "in_use", is_flag=True, help="Also use it from now on.")
@click.pass_context
def add(ctx: click.Context, /, name: str, replace: bool, in_use: bool) -> None:
    """Save the values of -e, -l, --key, --server-key and --timeout as context NAME.

    A discovery URL is asked for its agents whenever the context is used: such a context keeps up with its fleet.
    """
    if not NAME.fullmatch(name):
        raise click.UsageError(
            f"{name!r} is not a context name: use at most 64 letters, digits, dots, dashes, underscores"
        )
    flags = ctx.ensure_object(dict)
    values = {key: flags[key] for key in KEYS if flags.get(key)}
    if not values:
        raise click.UsageError(f"context {name} needs a value: give -e, -l, --key, --server-key or --timeout")
    check_context(values)
    KeyNames(values.get("key"), values.get("server_key")).check()
    file = contexts()
    if name in file.named and not replace:
        raise click.UsageError(f"context {name} exists in {file.path}: add --replace, or choose another name")
    for key in {"endpoint", "labels"} & values.keys():
        values[key] = [piece for text in values[key] for piece in split(text)]
    for key in ("key", "server_key"):  # a context is used from any directory
        if Path(values.get(key, "")).is_file():
            values[key] = str(Path(values[key]).absolute())
    file.named[name] = values
    file.in_use = name if in_use else file.in_use
    file.save()
    _note(ctx, f"saved context {name} in {file.path}" + ("; it is in use" if in_use else f": kvctl -c {name} status"))


@context.command(
    settings=False,
    short_help="Use a context from now on.",
    examples=[("Use context prod from now on", "kvctl context use prod"), ("Use none", "kvctl context use --none")],
)
@click.argument("name", required=False, shell_complete=completed_by("contexts"))
@click.option("--none", is_flag=True, help="Use none.")
@click.pass_context
def use(ctx: click.Context, name: str | None, none: bool) -> None:
    """Use context NAME from now on, unless a flag or variable selects another."""
    file = contexts()
    if (name is None) != none:
        raise click.UsageError(f"give the NAME of a context, or --none; contexts: {', '.join(file.named) or 'none'}")
    if name is not None:
        file.find(name, "NAME")
    file.in_use = name
    file.save()
    _note(ctx, f"context {name} is in use" if name else "no context is in use")


@context.command(
    settings=False, short_help="Remove a context.", examples=[("Remove context lab", "kvctl context rm lab")]
)
@click.argument("name", shell_complete=completed_by("contexts"))
@click.pass_context
def rm(ctx: click.Context, name: str) -> None:
    """Remove context NAME; the agents are not affected."""
    file = contexts()
    file.find(name, "NAME")
    del file.named[name]
    used = file.in_use == name
    file.in_use = None if used else file.in_use
    file.save()
    _note(ctx, f"removed context {name}" + ("; none is in use" if used else ""))


def _print(settings: Settings, named: Mapping[str, Mapping[str, Any]]) -> None:
    used = chosen_context(click.get_current_context().ensure_object(dict))
    rows = [
        {**dict.fromkeys(KEYS), **values, "context": name, "in_use": name == used} for name, values in named.items()
    ]
    Output(settings).emit(Report(CONTEXTS, rows, answered=1))


def _note(ctx: click.Context, text: str) -> None:
    if not ctx.ensure_object(dict).get("quiet"):
        click.echo(f"kvctl: {text}", err=True)
