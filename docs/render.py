"""Writes the reference pages next to it from what the code declares; `make docs` runs it, a test compares.

A page that a person has to keep in step with the code goes stale; these cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from kvctl.commands.registry import COMMANDS as CLI_COMMANDS
from kvctl.commands.registry import load
from kvctl.exit_codes import ExitCode
from kvctl_agent.contract.commands import COMMANDS
from kvctl_agent.contract.config import KEYS, Key
from kvctl_agent.contract.faults import FAULT_COMMAND
from kvctl_agent.contract.metrics import METRICS

HERE = Path(__file__).parent
NOTE = "<!-- Written by docs/render.py from what the code declares: `make docs`. -->"
HELP_COLUMNS = 100
HELP_NAMES = ["-h", "--help"]  # as every command has them when the program runs
GLOBAL_OPTIONS = "Global options, before or after the command:"


def configuration() -> str:
    """The agent's configuration keys."""

    def allowed(key: Key) -> str:
        if key.choices:
            return ", ".join(f"`{choice}`" for choice in key.choices)
        if key.minimum is not None and key.maximum is not None:
            return f"{key.minimum:g} to {key.maximum:g} {key.unit}".strip()
        return key.type.__name__

    rows = [
        (
            f"`{key.name}`",
            "automatic" if key.default is None else f"`{key.default}`" if key.default != "" else "empty",
            allowed(key),
            "yes" if key.runtime else "no",
            key.help,
            f"`{key.sglang}`" if key.sglang else "",
        )
        for key in KEYS
    ]
    return page(
        "Configuration of the agent",
        "Sources, the later ones winning: defaults, the file named by `KVCTL_CONFIG` (else "
        "`$XDG_CONFIG_HOME/kvctl/agent.toml`), the environment (`KVCTL_` and the key in capitals), arguments of "
        "`Agent`. `kvctl config show` tells each value and where it came from.",
        table(("key", "default", "allowed", "while running", "what it does", "known in SGLang as"), rows),
    )


def admin() -> str:
    """The admin socket's commands."""
    rows = [
        (
            f"`{command.name}`",
            command.level.label,
            ", ".join(f"`{arg.name}`{'' if arg.required else '?'}: {arg.help}" for arg in command.args),
            command.help,
        )
        for command in (*COMMANDS, FAULT_COMMAND)
    ]
    return page(
        "The admin socket",
        "Every agent answers these on a Unix socket in `KVCTL_SOCKET_DIR` (else `$XDG_RUNTIME_DIR/kvctl`, "
        "`/run/kvctl` or `/tmp/kvctl-<uid>`), in JSON over ZMQ; the message format is in "
        "`kvctl_agent/contract/admin.py`. `?` marks an argument that may be left out.",
        table(("command", "level", "arguments", "answers"), rows),
    )


def metrics() -> str:
    """The metrics."""
    rows = [
        (f"`{metric.name}`", metric.kind, metric.unit, ", ".join(f"`{label}`" for label in metric.labels), metric.help)
        for metric in METRICS
    ]
    return page(
        "Metrics",
        "Printed by `kvctl metrics`; `-o prom` gives Prometheus text.",
        table(("name", "kind", "unit", "labels", "what it counts"), rows),
    )


def command_line() -> str:
    """The help of every command, and the exit codes."""
    codes = ", ".join(f"{code.value} {code.name.lower().replace('_', ' ')}" for code in ExitCode)
    blocks: list[str] = []
    common = ""
    for name in CLI_COMMANDS:
        command = load(name)
        assert command is not None
        for path, text in helps(
            command, click.Context(command, info_name=f"kvctl {name}", help_option_names=HELP_NAMES)
        ):
            own, _, common = text.partition("\n\n" + GLOBAL_OPTIONS)
            blocks += [f"## {path}", f"```\n{own}\n```"]
    blocks += ["## Global options", f"```\n{GLOBAL_OPTIONS}{common}\n```"]
    return page("Commands", f"Exit codes: {codes}.", *blocks)


def helps(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """(command path, help text) of a command and of everything under it."""
    context.terminal_width = context.max_content_width = HELP_COLUMNS
    yield context.command_path, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from helps(child, click.Context(child, parent=context, info_name=name))


def page(title: str, *paragraphs: str) -> str:
    return "\n\n".join([f"# {title}", NOTE, *paragraphs]) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


PAGES = {"configuration.md": configuration, "admin.md": admin, "metrics.md": metrics, "commands.md": command_line}

if __name__ == "__main__":
    for name, render in PAGES.items():
        (HERE / name).write_text(render())
