"""`kvctl help`: the help of a command, and the options that all commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvctl.commands.options import KvctlCommand, global_options, unknown_command, write_options

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

OPTIONS = "options"
"""`kvctl help options` is about no command."""


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    words: tuple[str, ...] = ctx.params.get("command") or ()
    at = _context(ctx.find_root(), words)
    if not isinstance(at.command, click.Group):
        return []
    names = [*at.command.list_commands(at), *([] if words else [OPTIONS])]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command(
    cls=KvctlCommand,
    examples=[
        ("Help for one command", "kvctl help rooms show"),
        ("The options that every command takes", "kvctl help options"),
    ],
)
@click.argument("command", nargs=-1, shell_complete=_complete)
@click.pass_context
def help_command(ctx: click.Context, command: tuple[str, ...]) -> None:
    """Help for COMMAND, as COMMAND --help prints it; `kvctl help` lists the commands, `kvctl help options` the global
    options.
    """
    root = ctx.find_root()
    if command == (OPTIONS,):
        click.echo(global_options_text(ctx))
    else:
        click.echo(_context(root, command).get_help())


def global_options_text(ctx: click.Context) -> str:
    """The options that all commands share."""
    formatter = ctx.make_formatter()
    write_options(formatter, "Global options, before or after the command", global_options(), ctx)
    return formatter.getvalue().strip("\n")


def _context(root: click.Context, words: tuple[str, ...]) -> click.Context:
    """Where the help of a command is made.

    Raises:
        click.UsageError: there is no such command.
    """
    at = root
    for word in words:
        group = at.command
        if not isinstance(group, click.Group):
            raise click.UsageError(f"{at.command_path} has no commands under it, so there is no {word!r}")
        command = group.get_command(at, word)
        if command is None:
            raise unknown_command(word, group.list_commands(at), at)
        at = click.Context(command, info_name=word, parent=at, **command.context_settings)
    return at
