"""Global options, accepted before and after the name of a command, and the base classes of all commands."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from kvctl.commands.settings import COLOURS, DEFAULT_TIMEOUT, OUTPUTS, PROMETHEUS, resolve
from kvctl.render.units import parse_seconds
from kvctl_agent.contract.states import MAX_ROOM

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from kvctl.render.view import View

Example = tuple[str, str]
"""(description, command line)"""

ROW_LIMIT = click.IntRange(1, 1_000_000)
"""Parameter type of `--limit`."""

_WATCH = ("-w", "--watch")
_DEFAULT_WATCH = "2"
_Command = TypeVar("_Command", bound=Callable[..., Any])
_Value = TypeVar("_Value")


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Stores a flag in the dictionary that all click contexts of one call share.

    Repeated flags are joined; a single flag after the subcommand overrides the same flag before it.
    """
    flags = ctx.ensure_object(dict)
    name = str(param.name)
    if isinstance(value, tuple):
        flags[name] = (*flags.get(name, ()), *value)
    elif value is not None and value is not False:
        flags[name] = value


def _option(*names: str, help: str, **more: Any) -> click.Option:
    return click.Option(list(names), help=help, expose_value=False, callback=_remember, **more)


def completed_by(kind: str) -> Callable[[click.Context, click.Parameter, str], Any]:
    """Returns a shell-completion function, which imports the module `completion` only when it is called.

    Args:
        kind: function of that module: agents, hosts, labels, contexts, columns or rooms.
    """

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> Any:
        from kvctl.commands import completion

        return getattr(completion, kind)(ctx, param, incomplete)

    return complete


def global_options() -> list[click.Option]:
    """Returns new option objects for the global options, since each command needs its own."""
    return [
        _option(
            "-e",
            "--endpoint",
            "endpoint",
            multiple=True,
            metavar="AGENT",
            shell_complete=completed_by("agents"),
            help="Only these agents: name, glob, ipc:// or tcp:// address, or a discovery URL such as "
            "registry://HOST:PORT. Repeatable.",
        ),
        _option(
            "-c",
            "--context",
            metavar="NAME",
            shell_complete=completed_by("contexts"),
            help="Use this context; see kvctl context.",
        ),
        _option("--key", metavar="NAME|FILE", help="Your key for tcp:// agents; see kvctl key new. [default: default]"),
        _option("--server-key", metavar="KEY|NAME|FILE", help="Public key of the fleet, for tcp:// agents."),
        _option(
            "-l",
            "--label",
            "labels",
            multiple=True,
            metavar="K=V,…",
            shell_complete=completed_by("labels"),
            help="Only agents with these labels: role=decode,tp=0,host=node-3.",
        ),
        _option(
            "--timeout", metavar="TIME", help=f"Time limit for the answer of each agent. [default: {DEFAULT_TIMEOUT}]"
        ),
        _option(
            "-o",
            "--output",
            type=click.Choice([*OUTPUTS, PROMETHEUS]),
            metavar="|".join(OUTPUTS),
            help="Output format. Tables show values with units, and in a pipe untruncated; tsv, csv and json "
            "contain numbers in the unit at the end of the name. prom: metrics and check only. [default: table]",
        ),
        _option(
            "--columns",
            metavar="A,B,…",
            shell_complete=completed_by("columns"),
            help="Print these columns in this order; kvctl help columns COMMAND describes them.",
        ),
        _option(
            "--sort-by",
            metavar="A,-B,…",
            shell_complete=completed_by("columns"),
            help="Sort by these columns; a leading - means descending.",
        ),
        _option(
            "--filter",
            "filters",
            multiple=True,
            metavar="EXPR",
            help="Only rows that match: 'age>5s', 'bytes>=64MiB', 'state=Failed', 'text~lost'. "
            "Repeatable; all must match.",
        ),
        _option(
            "-w",
            "--watch",
            metavar="[SECONDS]",
            help=f"Read again every SECONDS until Ctrl-C. [default: {_DEFAULT_WATCH}]",
        ),
        _option(
            "--from",
            "from_file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Read this recording instead of live agents; with -w, all its snapshots in order.",
        ),
        _option(
            "--color", type=click.Choice(COLOURS), help="Colours on stdout. [default: auto, which honours NO_COLOR]"
        ),
        _option("-q", "--quiet", is_flag=True, help="Print only errors on stderr."),
        _option(
            "-v", "--verbose", is_flag=True, help="List the agents that answered and their round trip times on stderr."
        ),
    ]


class GlobalOptions(click.Command):
    """Command that accepts the global options; an option of its own replaces a global one with the same flag.

    Args:
        view: view of the output, for the completion of column names.
        examples: descriptions and command lines for the help.
    """

    def __init__(self, *args: Any, view: View | None = None, examples: Sequence[Example] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.view = view
        self.examples = examples
        own = {name for param in self.params for name in param.opts}
        self.global_options = [option for option in global_options() if own.isdisjoint(option.opts)]
        self.params.extend(self.global_options)
        self.context_settings.setdefault("help_option_names", ["-h", "--help"])

    def shown_view(self, ctx: click.Context) -> View | None:
        """Returns the view of the command's output; None if it prints no table."""
        return self.view

    def sections(self, ctx: click.Context) -> list[tuple[str, list[click.Parameter]]]:
        """Returns the command's own options by section of the help, as (title, options)."""
        own = [
            param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and param not in self.global_options
        ]
        return [("Options", [*own])]

    def shown_examples(self) -> Sequence[Example]:
        """Returns the examples to show in the help, as (description, command line)."""
        return self.examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        examples = self.shown_examples()
        if examples:
            with formatter.section("Examples"):
                for number, (does, line) in enumerate(examples):
                    # Not wrapped, so that the line can be pasted.
                    formatter.write(("\n" if number else "") + f"  # {does}\n  {line}\n")
        for title, params in self.sections(ctx):
            write_options(formatter, title, params, ctx)
        self.format_global_options(ctx, formatter)

    def format_global_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a line that refers to the global options; the root command overrides it and lists them."""
        formatter.write("\nGlobal options (-e, -l, -o, --filter, -w, --from, ...): kvctl help options\n")


def write_options(
    formatter: click.HelpFormatter, title: str, params: Sequence[click.Parameter], ctx: click.Context
) -> None:
    """Writes a section of options to a help text, unless it would be empty."""
    records = [record for param in params if (record := param.get_help_record(ctx)) is not None]
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


class KvctlCommand(GlobalOptions):
    """Command without subcommands."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spell_out_watch(args))


def pass_settings(function: _Command) -> _Command:
    """Decorator that passes the resolved `Settings` to the command as the first argument."""

    @click.pass_context
    def wrapper(ctx: click.Context, /, *args: Any, **kwargs: Any) -> Any:
        return ctx.invoke(function, resolve(ctx.ensure_object(dict)), *args, **kwargs)

    wrapper.__doc__ = function.__doc__
    wrapper.__name__ = function.__name__
    # The options of decorators that ran before this one.
    wrapper.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def given(names: Iterable[str]) -> set[str]:
    """Returns those of the running command's parameters that are on its command line."""
    source = click.get_current_context().get_parameter_source
    return {name for name in names if source(name) is not ParameterSource.DEFAULT}


def command(**attributes: Any) -> Callable[[Callable[..., Any]], KvctlCommand]:
    """Decorator for a top-level command whose function gets the `Settings` first; arguments as for `KvctlCommand`."""
    return lambda function: click.command(cls=KvctlCommand, **attributes)(pass_settings(function))


class KvctlGroup(GlobalOptions, click.Group):
    """Command with subcommands; `default` runs if none is named. Its help shows one example per subcommand."""

    command_class = KvctlCommand

    def __init__(self, *args: Any, default: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._default = default

    def command(  # type: ignore[override]
        self, name: str | None = None, *, settings: bool = True, **attributes: Any
    ) -> Callable[[Callable[..., Any]], click.Command]:
        """Decorator for a subcommand; its function gets the `Settings` first, unless `settings` is False."""
        register = super().command(name, **attributes)
        return lambda function: register(pass_settings(function) if settings else function)

    def shown_examples(self) -> Sequence[Example]:
        if self.examples:
            return self.examples
        return [
            each for child in self.commands.values() if isinstance(child, GlobalOptions) for each in child.examples[:1]
        ]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        GlobalOptions.format_options(self, ctx, formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args = spell_out_watch(args)
        if self._default is not None and self._wants_default(ctx, args):
            if ctx.resilient_parsing and not self._has_foreign_option(args):
                return super().parse_args(ctx, args)  # for the shell completion of subcommands
            args = [self._default, *args]
        return super().parse_args(ctx, args)

    def _wants_default(self, ctx: click.Context, args: Sequence[str]) -> bool:
        """Returns whether to run the default subcommand.

        That is the case if no argument names a subcommand or is --help, and the first one is not an unknown word.
        """
        named = any(arg in self.list_commands(ctx) for arg in args)
        mistyped = bool(args) and not args[0].startswith("-")
        return not (named or mistyped or {"-h", "--help"} & set(args))

    def shown_view(self, ctx: click.Context) -> View | None:
        default = self.get_command(ctx, self._default) if self._default is not None else None
        return default.view if isinstance(default, GlobalOptions) else None

    def _has_foreign_option(self, args: Sequence[str]) -> bool:
        """Returns whether an option is used that this group lacks, and that must be one of the default subcommand."""
        own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        return any(arg.startswith("-") and arg.partition("=")[0] not in own for arg in args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes subcommands, the group's options, and the options of the default subcommand."""
        items = super().shell_complete(ctx, incomplete)
        default = self.get_command(ctx, self._default) if self._default is not None else None
        if default is not None and incomplete.startswith("-"):
            known = {item.value for item in items}
            items += [item for item in default.shell_complete(ctx, incomplete) if item.value not in known]
        return items

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        command = self.get_command(ctx, args[0])
        if command is None:
            raise unknown_command(args[0], self, ctx)
        return args[0], command, args[1:]


def unknown_command(name: str, group: click.Group, ctx: click.Context, topics: Sequence[str] = ()) -> click.UsageError:
    """Returns the error for an unknown command of a group, or topic of kvctl help; it suggests the most similar."""
    known = {word: f"{ctx.command_path} {word}" for word in group.list_commands(ctx)}
    near = difflib.get_close_matches(name, [*known, *topics], n=1)
    meant = known.get(near[0], f"{ctx.command_path} help {near[0]}") if near else ""
    hint = f"did you mean '{meant}'?" if near else f"there are: {', '.join(known)}"
    return click.UsageError(f"no command '{name}'; {hint}", ctx)


def spell_out_watch(args: Sequence[str]) -> list[str]:
    """Replaces `-w [SECONDS]` by `--watch=SECONDS`, so that `-w status` does not take "status" for a time."""
    spelled: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg == "--":
            return [*spelled, arg, *rest]
        if arg not in _WATCH:
            spelled.append(arg)
        elif rest and _is_time(rest[0]):
            spelled.append(f"--watch={rest.pop(0)}")
        else:
            spelled.append(f"--watch={_DEFAULT_WATCH}")
    return spelled


def _is_time(text: str) -> bool:
    try:
        parse_seconds(text)
    except ValueError:
        return False
    return True


class Parsed(click.ParamType[_Value]):
    """Parameter type of a value that `parse` makes of a text; its ValueError is the text of the error."""

    def __init__(self, name: str, parse: Callable[[str], _Value]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> _Value:
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def duration(least: str) -> Parsed[int]:
    """Returns the parameter type of a time such as `500ms` or `2m`, at least `least`, converted to ns."""

    def parse(text: str) -> int:
        ns = parse_seconds(text)
        if ns < parse_seconds(least):
            raise ValueError(f"{text!r} is shorter than {least}")
        return ns

    return Parsed("time", parse)


class RoomOrRequest(click.ParamType[str]):
    """Parameter type of a room number, an unsigned 64-bit integer, or of a request id, any text that is not a number.

    Both are text, room numbers as in the admin protocol; `commands.room_number` finds the room of a request.
    """

    name = "room"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if text and not text.isdecimal():
            return text
        if not text or int(text) > MAX_ROOM:
            self.fail(f"{value!r} is not a room number, 0 to {MAX_ROOM}", param, ctx)
        return str(int(text))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        items: list[CompletionItem[str]] = completed_by("rooms")(ctx, param, incomplete)
        return items
