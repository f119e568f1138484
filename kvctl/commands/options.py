"""The global options, declared once and accepted before and after the command's name, and the classes that do it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvctl.commands.settings import COLOURS, DEFAULT_TIMEOUT, OUTPUTS, PROMETHEUS, Settings, resolve
from kvctl.render.units import parse_seconds

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from kvctl.render.view import View
if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Example = tuple[str, str]
"""What a command line does, and the command line."""

_WATCH = ("-w", "--watch")
_DEFAULT_WATCH = "2"
_Command = TypeVar("_Command", bound=Callable[..., Any])


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Collects into the dictionary that all contexts of one call share: the innermost flag wins, lists add up."""
    flags = ctx.ensure_object(dict)
    name = str(param.name)
    if isinstance(value, tuple):
        flags[name] = (*flags.get(name, ()), *value)
    elif value is not None and value is not False:
        flags[name] = value


def _option(*names: str, help: str, **more: Any) -> click.Option:
    return click.Option(list(names), help=help, expose_value=False, callback=_remember, **more)


def _completed_by(kind: str) -> Callable[[click.Context, click.Parameter, str], Any]:
    """One of the functions of `completing`, which is imported when a shell asks."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> Any:
        from kvctl.commands import completion

        return getattr(completion, kind)(ctx, param, incomplete)

    return complete


class _Format(click.Choice[str]):
    """An output format; a file name in its place is answered with where the file belongs."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            if ctx is None or all(each.name != "file" for each in ctx.command.params):
                raise
            text = (
                f"{value!r} is not one of {', '.join(self.choices)}; a file is an argument: {ctx.command_path} {value}"
            )
            raise click.BadParameter(text, ctx, param) from error


def global_options() -> list[click.Option]:
    """Fresh parameters, because click ties each to one command."""
    return [
        _option(
            "-e",
            "--endpoint",
            "endpoint",
            multiple=True,
            metavar="AGENT",
            shell_complete=_completed_by("agents"),
            help="Only this agent: name, glob, ipc:// or tcp:// address. Repeatable.",
        ),
        _option(
            "-c",
            "--context",
            metavar="NAME",
            shell_complete=_completed_by("contexts"),
            help="Use this context: see kvctl context.",
        ),
        _option("--key", metavar="NAME|FILE", help="Your key for tcp:// agents. [default: default, see kvctl key new]"),
        _option("--server-key", metavar="KEY|FILE", help="Public key of the tcp:// agents' fleet."),
        _option(
            "-l",
            "--label",
            "labels",
            multiple=True,
            metavar="K=V,…",
            help="Only agents with these labels: role=decode,tp=0.",
        ),
        _option("--timeout", metavar="TIME", help=f"Time that an agent has to answer. [default: {DEFAULT_TIMEOUT}]"),
        _option(
            "-o",
            "--output",
            type=_Format([*OUTPUTS, PROMETHEUS]),
            metavar="|".join(OUTPUTS),
            help="Output format. Tables show units for people, and whole texts in a pipe; tsv, csv, json and yaml "
            "give whole numbers in the unit that the name ends in. prom: metrics and check only. [default: table]",
        ),
        _option(
            "--columns",
            metavar="A,B,…",
            shell_complete=_completed_by("columns"),
            help="These columns, in this order; kvctl help columns COMMAND says what they mean.",
        ),
        _option(
            "--sort-by",
            metavar="A,-B,…",
            shell_complete=_completed_by("columns"),
            help="Sort by these columns; - in front for descending.",
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
            help="Read this recording or bundle in place of live agents; with -w all its moments in turn.",
        ),
        _option("--color", type=click.Choice(COLOURS), help="Colour on stdout. [default: auto, honours NO_COLOR]"),
        _option("-q", "--quiet", is_flag=True, help="Only errors on stderr."),
        _option(
            "-v",
            "--verbose",
            is_flag=True,
            help="Name on stderr the agents that answered, with their round trip times.",
        ),
    ]


class GlobalOptions(click.Command):
    """A command that takes the global options; its help says where they are listed.

    An option of the command's own takes the place of a global one of that name.

    Args:
        view: of what it prints, so that a shell can complete names of columns.
        filter_view: the view whose rows --filter chooses, where that is another one.
        examples: command lines, shown in the help.
    """

    def __init__(
        self,
        *args: Any,
        view: View | None = None,
        filter_view: View | None = None,
        examples: Sequence[Example] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.view = view
        self.filter_view = filter_view or view
        self.examples = examples
        own = {name for param in self.params for name in param.opts}
        self.global_options = [option for option in global_options() if own.isdisjoint(option.opts)]
        self.params.extend(self.global_options)
        self.context_settings.setdefault("help_option_names", ["-h", "--help"])

    def sections(self, ctx: click.Context) -> list[tuple[str, list[click.Parameter]]]:
        """Titles of the help's lists of options, with the command's own options under them."""
        own = [
            param
            for param in self.get_params(ctx)
            if isinstance(param, click.Option) and param not in self.global_options
        ]
        return [("Options", [*own])]

    def shown_examples(self) -> Sequence[Example]:
        """Examples for the help text."""
        return self.examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        examples = self.shown_examples()
        if examples:
            with formatter.section("Examples"):
                for number, (does, line) in enumerate(examples):
                    # Written as they are: a line that is broken cannot be pasted.
                    formatter.write(("\n" if number else "") + f"  # {does}\n  {line}\n")
        for title, params in self.sections(ctx):
            write_options(formatter, title, params, ctx)
        self.format_global_options(ctx, formatter)

    def format_global_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Says where they are listed; the help of the root command lists them."""
        formatter.write("\nGlobal options (-e, -l, -o, --filter, -w, --from, ...): kvctl help options\n")


def write_options(
    formatter: click.HelpFormatter, title: str, params: Sequence[click.Parameter], ctx: click.Context
) -> None:
    """One list of options in a help text."""
    records = [record for param in params if (record := param.get_help_record(ctx)) is not None]
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


class KvctlCommand(GlobalOptions):
    """A leaf command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spell_out_watch(args))


class KvctlGroup(GlobalOptions, click.Group):
    """A command with sub-commands; `default` runs where none is named. Its help shows an example of each."""

    command_class = KvctlCommand

    def __init__(self, *args: Any, default: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._default = default

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
            if ctx.resilient_parsing and not self._beyond_us(args):
                return super().parse_args(ctx, args)  # a shell completes our sub-commands here
            args = [self._default, *args]
        return super().parse_args(ctx, args)

    def _wants_default(self, ctx: click.Context, args: Sequence[str]) -> bool:
        """True unless a sub-command is named, help is wanted, or a word stands where one should be."""
        named = any(arg in self.list_commands(ctx) for arg in args)
        mistyped = bool(args) and not args[0].startswith("-")
        return not (named or mistyped or {"-h", "--help"} & set(args))

    def default_view(self, ctx: click.Context) -> View | None:
        """View of the sub-command that runs where none is named."""
        default = self.get_command(ctx, self._default) if self._default is not None else None
        return default.view if isinstance(default, GlobalOptions) else None

    def _beyond_us(self, args: Sequence[str]) -> bool:
        """Whether an option is used that the sub-command has and we do not."""
        ours = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        return any(arg.startswith("-") and arg.partition("=")[0] not in ours for arg in args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Ours, and the options of the sub-command that runs where none is named."""
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
            raise unknown_command(args[0], self.list_commands(ctx), ctx)
        return args[0], command, args[1:]


def unknown_command(name: str, known: Sequence[str], ctx: click.Context) -> click.UsageError:
    """The error for a mistyped command, with what was probably meant."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{ctx.command_path} {near[0]}'?" if near else f"there are: {', '.join(known)}"
    return click.UsageError(f"no command '{name}'; {hint}", ctx)


def spell_out_watch(args: Sequence[str]) -> list[str]:
    """Makes the value of `-w` explicit, so that `-w status` does not watch every "status" seconds."""
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


def pass_settings(function: _Command) -> _Command:
    """Gives the command its resolved `Settings` as the first argument."""

    @click.pass_context
    def wrapper(ctx: click.Context, /, *args: Any, **kwargs: Any) -> Any:
        return ctx.invoke(function, settings_of(ctx), *args, **kwargs)

    wrapper.__doc__ = function.__doc__
    wrapper.__name__ = function.__name__
    # click collects the options of decorators that ran before this one here.
    wrapper.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def settings_of(ctx: click.Context) -> Settings:
    """The global options of this call.

    Raises:
        click.UsageError: one of them is wrong.
    """
    return resolve(ctx.ensure_object(dict))


_LARGEST_ROOM = (1 << 64) - 1


class AgentName(click.ParamType[str]):
    """The name of an agent."""

    name = "agent"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from kvctl.commands import completion

        return completion.agents(ctx, param, incomplete)


class RoomNumber(click.ParamType[str]):
    """An unsigned 64-bit number, kept as the text that the admin socket wants."""

    name = "room"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not str(value).isdecimal() or int(value) > _LARGEST_ROOM:
            self.fail(f"{value!r} is not a room number, 0 to {_LARGEST_ROOM}", param, ctx)
        return str(int(value))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from kvctl.commands import completion

        return completion.rooms(ctx, param, incomplete)
