"""`kvctl help`: prints the help of a command, the global options, or the columns that a command prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvctl.commands.options import GlobalOptions, KvctlCommand, global_options, unknown_command, write_options

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Topics besides the commands: `kvctl help options`, `kvctl help columns COMMAND`.
OPTIONS = "options"
COLUMNS = "columns"


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    words: tuple[str, ...] = ctx.params.get("command") or ()
    topics = [] if words else [OPTIONS, COLUMNS]
    words = words[1:] if words[:1] == (COLUMNS,) else words
    context = _context(ctx.find_root(), words)
    if not isinstance(context.command, click.Group):
        return []
    names = [*context.command.list_commands(context), *topics]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command(
    cls=KvctlCommand,
    examples=[
        ("Help for one command", "kvctl help rooms show"),
        ("The options that every command accepts", "kvctl help options"),
        ("The meaning of a command's columns", "kvctl help columns rooms"),
    ],
)
@click.argument("command", nargs=-1, shell_complete=_complete)
@click.pass_context
def help_command(ctx: click.Context, command: tuple[str, ...]) -> None:
    """Print the help of COMMAND, like COMMAND --help.

    `kvctl help` lists the commands, `kvctl help options` the global options, and `kvctl help columns COMMAND` the
    meaning of the columns that a command prints.
    """
    root = ctx.find_root()
    if command == (OPTIONS,):
        click.echo(global_options_text(ctx))
    elif command[:1] == (COLUMNS,):
        click.echo(columns_text(ctx, _context(root, command[1:])))
    else:
        click.echo(_context(root, command).get_help())


def global_options_text(ctx: click.Context) -> str:
    """Returns the help of the global options."""
    formatter = ctx.make_formatter()
    write_options(formatter, "Global options, before or after the command", global_options(), ctx)
    return formatter.getvalue().strip("\n")


def columns_text(ctx: click.Context, context: click.Context) -> str:
    """Returns the descriptions of the columns that the command of `context` prints.

    Raises:
        click.UsageError: the command prints no table.
    """
    from kvctl.render.glossary import entries, tables
    from kvctl.render.view import folded

    command = context.command
    view = command.shown_view(context) if isinstance(command, GlobalOptions) else None
    if view is None:
        raise click.UsageError(f"{context.command_path} prints no table; try: kvctl help columns rooms")
    formatter = ctx.make_formatter()
    for title, each in tables(view):
        rows = [
            (header, text if name == folded(header) else f"{text} ({name})") for header, name, _, text in entries(each)
        ]
        with formatter.section(title or f"Columns of {context.command_path}"):
            formatter.write_dl(rows)
    formatter.write_paragraph()
    formatter.write_text(
        "In parentheses: the name in tsv and csv, which ends in the unit. --columns, --sort-by and --filter accept the "
        "header, this name and the name in JSON, in upper or lower case."
    )
    return formatter.getvalue().strip("\n")


def _context(root: click.Context, words: tuple[str, ...]) -> click.Context:
    """Returns the context of the command that `words` name, such as ("rooms", "show").

    Raises:
        click.UsageError: there is no such command.
    """
    context = root
    for word in words:
        group = context.command
        if not isinstance(group, click.Group):
            raise click.UsageError(f"{context.command_path} has no subcommands, so there is no {word!r}")
        command = group.get_command(context, word)
        if command is None:
            raise unknown_command(word, group, context, (OPTIONS, COLUMNS) if context is root else ())
        context = click.Context(command, info_name=word, parent=context, **command.context_settings)
    return context
