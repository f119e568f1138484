"""`kvctl help`: the help of a command, and the options that all commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvctl.commands.options import KvctlCommand, KvctlGroup, global_options, unknown_command, write_options

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

OPTIONS = "options"
"""`kvctl help options` is about no command."""
COLUMNS = "columns"
"""`kvctl help columns COMMAND` is about what a command prints."""


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    words: tuple[str, ...] = ctx.params.get("command") or ()
    topics = [] if words else [OPTIONS, COLUMNS]
    words = words[1:] if words[:1] == (COLUMNS,) else words
    at = _context(ctx.find_root(), words)
    if not isinstance(at.command, click.Group):
        return []
    names = [*at.command.list_commands(at), *topics]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command(
    cls=KvctlCommand,
    examples=[
        ("Help for one command", "kvctl help rooms show"),
        ("The options that every command takes", "kvctl help options"),
        ("What the columns of a command mean", "kvctl help columns rooms"),
    ],
)
@click.argument("command", nargs=-1, shell_complete=_complete)
@click.pass_context
def help_command(ctx: click.Context, command: tuple[str, ...]) -> None:
    """Help for COMMAND, as COMMAND --help prints it; `kvctl help` lists the commands, `kvctl help options` the global
    options, `kvctl help columns COMMAND` what a command prints.
    """
    root = ctx.find_root()
    if command == (OPTIONS,):
        click.echo(global_options_text(ctx))
    elif command[:1] == (COLUMNS,):
        click.echo(columns_text(ctx, _context(root, command[1:])))
    else:
        click.echo(_context(root, command).get_help())


def global_options_text(ctx: click.Context) -> str:
    """The options that all commands share."""
    formatter = ctx.make_formatter()
    write_options(formatter, "Global options, before or after the command", global_options(), ctx)
    return formatter.getvalue().strip("\n")


def columns_text(ctx: click.Context, of: click.Context) -> str:
    """Glossary of what the command of `of` prints.

    Raises:
        click.UsageError: it prints no table.
    """
    from kvctl.render.glossary import entries, tables
    from kvctl.render.view import folded

    command = of.command
    view = command.default_view(of) if isinstance(command, KvctlGroup) else getattr(command, "view", None)
    if view is None:
        raise click.UsageError(f"{of.command_path} prints no table of its own; one that does: kvctl help columns rooms")
    formatter = ctx.make_formatter()
    for title, each in tables(view):
        with formatter.section(title or f"Columns of {of.command_path}"):
            formatter.write_dl(
                [
                    (header, text if name == folded(header) else f"{text} ({name})")
                    for header, name, _, text in entries(each)
                ]
            )
    formatter.write_text(
        "In brackets: the name in tsv and csv, which ends in the unit. --columns, --sort-by and --filter take the "
        "header, this name and the name in JSON, in any case."
    )
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
