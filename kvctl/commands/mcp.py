"""`kvctl mcp`: serves the commands that only read to an assistant, by the Model Context Protocol."""

from __future__ import annotations

import sys

import click

from kvctl.commands.options import command
from kvctl.commands.settings import Settings
from kvctl.commands.stdio import print_stderr
from kvctl.errors import CliError
from kvctl_agent.contract.extras import install

# Global options that choose the fleet, by the name of their parameter. Clients cannot set them.
_FLEET = ("endpoint", "context", "key", "server_key", "timeout", "from_file")


@command(
    name="mcp",
    examples=[
        ("The agents of this machine, for an assistant that starts this command", "kvctl mcp"),
        ("A fleet that is saved as a context", "kvctl mcp -c prod"),
        ("An incident", "kvctl mcp --from incident.kvrec"),
    ],
)
@click.pass_context
def mcp_command(ctx: click.Context, settings: Settings) -> None:
    """Serve the commands that only read as tools of an MCP server, on stdin and stdout, until stdin ends.

    An assistant starts this command, and can then look at the fleet: status, rooms, findings, events. It can change
    nothing. -e, -c, --key, --server-key, -l, --timeout and --from choose the fleet, which the assistant cannot change.
    Needs the extra mcp.
    """
    try:
        from kvctl.commands.mcp_server import serve
    except ModuleNotFoundError as error:
        raise CliError(f"kvctl mcp needs the extra mcp ({error}): {install('mcp')}") from error
    if sys.stdin.isatty():
        print_stderr("kvctl mcp waits for messages of an MCP client on stdin; Ctrl-C ends it. See docs/assistants.md.")
    options = {option.name: option for option in ctx.command.params}
    flags = ctx.ensure_object(dict)
    fleet = [text for name in _FLEET if name in flags for text in _spelled(options[name], flags[name])]
    # Also those of a context, which labels of a call would replace; labels that contradict each other are refused.
    serve([*fleet, *(f"--label={key}={value}" for key, value in settings.labels.items())])


def _spelled(option: click.Parameter, value: object) -> list[str]:
    values = value if isinstance(value, tuple) else (value,)
    return [text for each in values for text in (option.opts[-1], str(each))]
