"""`kvctl context`: lists, shows, adds, selects and removes contexts, which are named fleets in the user file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from kvctl.client.discovery import KINDS, split
from kvctl.client.keys import KeyNames
from kvctl.commands import context_file
from kvctl.commands.completion import contexts
from kvctl.commands.options import KvctlGroup
from kvctl.commands.output import Output
from kvctl.commands.settings import (
    CONTEXT,
    CONTEXT_KEYS,
    File,
    Settings,
    check_context,
    chosen_context,
    context_of,
    user_file,
)
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

    A context is chosen by `-c NAME`, KVCTL_CONTEXT=NAME, `kvctl context use NAME`, or context = "NAME" in a project's
    .kvctl.toml. Its values rank right above the source that chose it: flags > environment > project file > user file.
    """


@context.command(
    "ls",
    view=CONTEXTS,
    short_help="All contexts; which one is in use.",
    examples=[("All contexts, and which one is in use", "kvctl context")],
)
def list_contexts(settings: Settings) -> None:
    """All contexts, and which one is in use in this directory."""
    _print(settings, user_file().contexts)


@context.command(short_help="One context.", examples=[("The context that is in use", "kvctl context show")])
@click.argument("name", required=False, shell_complete=contexts)
def show(settings: Settings, name: str | None) -> None:
    """One context; without NAME the one in use."""
    name = chosen_context(click.get_current_context().ensure_object(dict)) if name is None else name
    if name is None:
        raise click.UsageError("no context is in use: give a NAME, see kvctl context ls")
    _print(settings, {name: context_of(user_file(), name, "NAME")})


def _source_options(function: Callable[..., None]) -> Callable[..., None]:
    """Decorator that adds one option per kind of source."""
    for scheme, kind in reversed(KINDS.items()):
        text = f"{kind.help}; short for -e {kind.form}. Repeatable."
        function = click.option(kind.option, scheme, multiple=True, metavar=kind.metavar, help=text)(function)
    return function


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
            "kvctl context add prod --bootstrap prefill-0:8998 --server-key fleet.pub",
        ),
        (
            "Pods of a headless service",
            "kvctl context add pods --dns kv-agents.default.svc:7311 --server-key fleet.pub",
        ),
        ("Agents that a file lists, which is read again each time", "kvctl context add lab --file agents.txt"),
        ("Agents that a command prints", "kvctl context add batch --command '/opt/fleet/list-agents'"),
        ("Decode ranks of this machine", "kvctl context add decode -l role=decode"),
    ],
)
@click.argument("name")
@click.option("--replace", is_flag=True, help="Replace the context of this name.")
@click.option("--use", "in_use", is_flag=True, help="Also use it from now on.")
@_source_options
@click.pass_context
def add(ctx: click.Context, /, name: str, replace: bool, in_use: bool, **sources: tuple[str, ...]) -> None:
    """Save the values of -e, -l, --key, --server-key and --timeout as context NAME.

    A source is asked for its agents whenever the context is used: a context of sources keeps up with its fleet.
    """
    if not context_file.NAME.fullmatch(name):
        raise click.UsageError(
            f"{name!r} is not a context name: use at most 64 letters, digits, dots, dashes, underscores"
        )
    flags = ctx.ensure_object(dict)
    urls = [_url(scheme, value) for scheme, values in sources.items() for value in values]
    flags = {**flags, "endpoint": (*flags.get("endpoint", ()), *urls)}
    values = {key: flags[key] for key in CONTEXT_KEYS if flags.get(key)}
    if not values:
        options = ", ".join(kind.option for kind in KINDS.values())
        raise click.UsageError(
            f"context {name} needs a value: give -e, {options}, -l, --key, --server-key or --timeout"
        )
    check_context(values)
    KeyNames(values.get("key"), values.get("server_key")).check()
    file = user_file()
    if name in file.contexts and not replace:
        raise click.UsageError(f"context {name} exists in {file.path}: add --replace, or choose another name")
    context_file.put(file.path, name, _with_absolute_paths(_values(values)))
    if in_use:
        context_file.use(file.path, name)
    _note(ctx, f"saved context {name} in {file.path}" + ("; it is in use" if in_use else f": kvctl -c {name} status"))


@context.command(
    settings=False,
    short_help="Use a context from now on.",
    examples=[
        ("Use context prod from now on", "kvctl context use prod"),
        ("Use none", "kvctl context use --none"),
    ],
)
@click.argument("name", required=False, shell_complete=contexts)
@click.option("--none", is_flag=True, help="Use none.")
@click.pass_context
def use(ctx: click.Context, name: str | None, none: bool) -> None:
    """Use context NAME from now on, unless a flag, variable or project file selects another."""
    if (name is None) != none:
        raise click.UsageError("give the NAME of a context, or --none; contexts: " + _names(user_file()))
    file = user_file()
    if name is not None:
        context_of(file, name, "NAME")
    context_file.use(file.path, name)
    _note(ctx, f"context {name} is in use" if name else "no context is in use")


@context.command(
    settings=False, short_help="Remove a context.", examples=[("Remove context lab", "kvctl context rm lab")]
)
@click.argument("name", shell_complete=contexts)
@click.pass_context
def rm(ctx: click.Context, name: str) -> None:
    """Remove context NAME; the agents are not affected."""
    file = user_file()
    context_of(file, name, "NAME")
    context_file.remove(file.path, name)
    _note(ctx, f"removed context {name}" + ("; none is in use" if file.values.get(CONTEXT) == name else ""))


def _url(scheme: str, value: str) -> str:
    """Returns the discovery URL for the value of an option; the path of a file becomes absolute."""
    if scheme == "file":
        value = quote(str(Path(value).expanduser().absolute()))
    return f"{KINDS[scheme].prefix}{value}"


def _print(settings: Settings, named: Mapping[str, Mapping[str, Any]]) -> None:
    used = chosen_context(click.get_current_context().ensure_object(dict))
    rows = [
        {**dict.fromkeys(CONTEXT_KEYS), **_values(values), "context": name, "in_use": name == used}
        for name, values in named.items()
    ]
    Output(settings).emit(Report(CONTEXTS, rows, answered=1))


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with endpoints and labels as lists; flags and files may join them with commas."""
    values = dict(given)
    for key in ("endpoint", "labels"):
        if key in values:
            texts = [values[key]] if isinstance(values[key], str) else values[key]
            values[key] = [piece for text in texts for piece in split(text)]
    return values


def _with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with absolute paths of key files, because a context is used from any directory."""
    return values | {
        key: str(Path(values[key]).absolute()) for key in ("key", "server_key") if Path(values.get(key, "")).is_file()
    }


def _names(file: File) -> str:
    return ", ".join(file.contexts) or "none"


def _note(ctx: click.Context, text: str) -> None:
    if not ctx.ensure_object(dict).get("quiet"):
        click.echo(f"kvctl: {text}", err=True)
