"""Root command of `kvctl`; reports exceptions as an error message and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvctl.commands.options import KvctlGroup, global_options, write_options
from kvctl.commands.registry import COMMANDS, SECTIONS, load
from kvctl.commands.stdio import open_missing_streams, print_error, print_stderr, silence_stdout, unwritable
from kvctl.errors import CliError
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract import VERSION
from kvctl_agent.contract.extras import install

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Errors of writes to stdout, other than a closed pipe. Errors of other files contain the file name.
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT})
_COMPLETE = "_KVCTL_COMPLETE"  # set by the scripts of `kvctl completion`


class _Root(KvctlGroup):
    """Root command group: lists commands from the registry, and imports only the command that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load(cmd_name)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes command names from the registry; reading the help from the commands would import all of them."""
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, COMMANDS))
        for title, section in SECTIONS.items():
            with formatter.section(title):
                # The same width in every section, so that the descriptions are aligned.
                formatter.write_dl([(name.ljust(widest), text) for name, text in section.items()])

    def format_global_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_options(formatter, "Global options, before or after the command", global_options(), ctx)


@click.command(
    cls=_Root,
    invoke_without_command=True,
    short_help="observe, measure and check KV cache transfers",
    examples=[
        ("A small fleet with traffic on this machine, to try the other commands", "kvctl demo"),
        ("The fleet on one screen", "kvctl status"),
        ("Rooms older than five seconds, the oldest first", "kvctl rooms --filter 'age>5s' --sort-by -age"),
        ("Problems, with the next command for each", "kvctl doctor"),
        ("Help for one command", "kvctl help rooms show"),
    ],
)
@click.version_option(VERSION, prog_name="kvctl", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Observe, measure and check KV cache transfers between prefill and decode workers.

    Data goes to stdout, messages to stderr. Exit codes: 0 ok, 1 failed, 2 usage, 3 no agent, 4 timeout,
    5 not permitted, 6 protocol mismatch, 7 partial (some agents answered), 130 interrupted.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: list[str] | None = None) -> NoReturn:
    """Runs `kvctl` and ends the process."""
    sys.exit(run(sys.argv[1:] if args is None else args))


def run(args: list[str]) -> int:
    """Runs `kvctl` and returns the exit code."""
    open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        # On a terminal without UTF-8, print a question mark for unencodable characters instead of raising an error.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    if _COMPLETE in os.environ:
        from kvctl.commands.completion import answer

        return answer(cli)
    try:
        code: Any = cli.main(args, prog_name="kvctl", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        _explain(error)
        return ExitCode.USAGE if isinstance(error, click.UsageError) else ExitCode.FAILED
    except CliError as error:
        print_error(str(error))
        return error.code
    except (KeyboardInterrupt, click.Abort):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Output.write handles the pipe of a command that only prints; this command was not finished.
        silence_stdout()
        return ExitCode.FAILED
    except ModuleNotFoundError as error:
        # The wheel of the command line has of the agent the contract only; kvctl.lab starts agents.
        if not (error.name or "").startswith("kvctl_agent."):
            raise
        print_error(f"this command starts agents, and kvctl-agent is not installed: {install('nixl')}")
        return ExitCode.FAILED
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        print_error(unwritable(error))
        silence_stdout()
        return ExitCode.FAILED
    return code if isinstance(code, int) else ExitCode.OK


def _explain(error: click.ClickException) -> None:
    print_error(" ".join(error.format_message().split()))  # click prints choices on separate lines
    if isinstance(error, click.UsageError) and error.ctx is not None:
        print_stderr(f"Try '{error.ctx.command_path} --help'.")
