"""Generates the reference pages in docs/ from the declarations in the code; `make docs` runs it.

A test compares the pages with the code, so that they cannot become outdated.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docs import figures, json_schema
from kvctl.cli import cli
from kvctl.commands.completion import FILES, script
from kvctl.commands.help import global_options_text
from kvctl.commands.mcp_server import READING, tool_of
from kvctl.commands.registry import COMMANDS as CLI_COMMANDS
from kvctl.commands.registry import load
from kvctl.exit_codes import FINDING_EXITS, ExitCode
from kvctl.health.codes import CODES
from kvctl.render.glossary import entries, tables
from kvctl_agent.contract.commands import COMMANDS, REGISTRY_COMMANDS
from kvctl_agent.contract.config import KEYS, Key
from kvctl_agent.contract.metrics import METRICS

HERE = Path(__file__).parent
NOTE = "<!-- Written by docs/render.py from what the code declares: `make docs`. -->"
# Results of `benchmarks/side_by_side.py` by host; docs/performance.md has them between these lines.
SIDE_BY_SIDE = HERE / "side_by_side"
BEGIN, END = "<!-- Written from docs/side_by_side/ by `make docs`. -->", "<!-- End of what is written. -->"
HELP_COLUMNS = 100
HELP_NAMES = ["-h", "--help"]  # as every command has them when the program runs
# A wrong byte is no matter of a minute.
AT_ONCE = ("KV_CHECKSUM_MISMATCH", "KV_PAGE_REUSED", "KV_READY_VIOLATION")


def configuration() -> str:
    """Page of the agent's configuration keys."""

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
        "Sources, in increasing precedence: defaults, the file named by `KVCTL_CONFIG` (else "
        "`$XDG_CONFIG_HOME/kvctl/agent.toml`), the environment (`KVCTL_` and the key in capitals), arguments of "
        "`Agent`. The integrations with engines set some defaults of their own, such as `listen` and `name_suffix`, "
        "which the other sources override. `kvctl config show` prints each value with its source.",
        table(("key", "default", "allowed", "while running", "description", "name in SGLang"), rows),
    )


def admin() -> str:
    """Page of the admin socket's commands."""
    rows = [
        (
            f"`{command.name}`",
            command.level.label,
            ", ".join(f"`{arg.name}`{'' if arg.required else '?'}: {arg.help}" for arg in command.args),
            command.help,
        )
        for command in COMMANDS
    ]
    return page(
        "The admin socket",
        "Commands that every agent answers on a Unix socket in `KVCTL_SOCKET_DIR` (else `$XDG_RUNTIME_DIR/kvctl`, "
        "`/run/kvctl` or `/tmp/kvctl-<uid>`), in JSON over ZMQ; the message format is in "
        "`kvctl_agent/contract/admin.py`. `?` marks an optional argument. The socket of a bootstrap registry answers "
        "on the same wire: " + "; ".join(f"`{command.name}`, {command.help}" for command in REGISTRY_COMMANDS) + ".",
        table(("command", "level", "arguments", "answers"), rows),
    )


def metrics() -> str:
    """Page of the metrics."""
    rows = [
        (f"`{metric.name}`", metric.kind, metric.unit, ", ".join(f"`{label}`" for label in metric.labels), metric.help)
        for metric in METRICS
    ]
    return page(
        "Metrics",
        "`kvctl metrics` prints these metrics; `-o prom` prints Prometheus text.",
        table(("name", "kind", "unit", "labels", "description"), rows),
    )


def command_pages() -> dict[str, str]:
    """A page per command, with the help of every command below it, and the page that lists them."""
    pages: dict[str, str] = {}
    rows: list[Sequence[str]] = []
    for name, summary in CLI_COMMANDS.items():
        command = load(name)
        assert command is not None
        blocks: list[str] = []
        for path, text, shown in helps(
            command, click.Context(command, info_name=f"kvctl {name}", help_option_names=HELP_NAMES)
        ):
            blocks += [f"## {path}", f"```\n{text}\n```"]
            blocks += [block for block in glossary(shown) if block not in blocks]
        blocks += ["## Tools", mcp_tools()] if name == "mcp" else []
        more = "Options of all commands, and exit codes: [commands](../commands.md)."
        pages[f"commands/{name}.md"] = page(f"kvctl {name}", summary, *blocks, more)
        rows.append((f"[`kvctl {name}`](commands/{name}.md)", summary))
    codes = table(("code", "means"), [(str(code.value), code.name.lower().replace("_", " ")) for code in ExitCode])
    listed = table(("command", "description"), rows)
    context = click.Context(cli, terminal_width=HELP_COLUMNS, max_content_width=HELP_COLUMNS)
    options = f"```\n{global_options_text(context)}\n```"
    checks = "Only `kvctl check` follows the monitoring-plugin guidelines: 0 OK, 1 WARNING, 2 CRITICAL, 3 UNKNOWN."
    judged = [(f"{each}", str(code.value), f"{state.value} {state.name}") for each, code, state in FINDING_EXITS]
    verdicts = table(("result", "`kvctl doctor`, `kvctl health`", "`kvctl check`"), judged)
    about = "Exit codes of the commands that check the fleet; findings hidden by `--filter` count, too:"
    pages["commands.md"] = page(
        "Commands", listed, "## Global options", options, "## Exit codes", codes, checks, about, verdicts
    )
    return pages


def mcp_tools() -> str:
    """Table of the tools of `kvctl mcp`, with the parameters that each has beside those of every tool."""
    every = {"label", "filter", "sort_by"}
    listed = "Every tool also has `label`, `filter` and `sort_by`, like the option of the same name."
    rows = [
        (
            f"`{tool.name}`",
            f"`{tool.title}`",
            ", ".join(f"`{name}`" for name in tool.input_schema["properties"] if name not in every),
        )
        for tool in map(tool_of, READING)
    ]
    return listed + "\n\n" + table(("tool", "command", "parameters"), rows)


def health_pages() -> dict[str, str]:
    """A page per health code, and the page that lists them."""
    pages = {}
    rows: list[Sequence[str]] = []
    for code in CODES:
        rows.append((f"[`{code.name}`](health/{code.name}.md)", code.severity.label, code.sees))
        alert = ["## Alert", f"```\n{code.alert}\n```"] if code.alert else []
        pages[f"health/{code.name}.md"] = page(
            code.name,
            f"Highest severity: **{code.severity.label}**. Symptom: {code.sees}",
            "## Meaning",
            code.means,
            "## Remedy",
            code.remedy,
            *alert,
            f"`kvctl health explain {code.name}` prints this page; `kvctl doctor` names the agents concerned.",
        )
    text = (
        "Problems that `kvctl health`, `kvctl doctor`, `kvctl check` and `kvctl top` detect, ordered so that causes "
        "come before their consequences."
    )
    pages["health.md"] = page("Health codes", text, table(("code", "highest severity", "symptom"), rows))
    return pages


def alert_rules() -> str:
    """Prometheus alert rules of the health codes that metrics can express."""
    lines = [
        "# Written by docs/render.py from the health codes: `make docs`.",
        "groups:",
        "  - name: kvctl",
        "    rules:",
    ]
    for code in CODES:
        if code.alert:
            lines += [
                f"      - alert: {code.name}",
                f"        expr: {json.dumps(code.alert)}",
                f"        for: {'0m' if code.name in AT_ONCE else '1m'}",
                "        labels:",
                f"          severity: {code.severity.label}",
                "        annotations:",
                f"          summary: {json.dumps(code.sees)}",
                f"          description: {json.dumps(code.remedy)}",
                f"          runbook: kvctl health explain {code.name}",
            ]
    return "\n".join(lines) + "\n"


def grafana(form: str) -> str:
    """The Grafana dashboard as JSON: `imported` or `provisioned`."""
    return json.dumps(runpy.run_path(str(HERE / "dashboard.py"))[form](), indent=1) + "\n"


def glossary(command: click.Command) -> list[str]:
    """For each table that the command prints, a table with the meaning of its columns."""
    view = getattr(command, "view", None)
    header = ("column", "name in tsv and csv", "unit", "meaning")
    return [
        f"{title or 'Columns'}:\n\n"
        + table(header, [(shown, f"`{name}`", unit, text) for shown, name, unit, text in entries(each)])
        for title, each in (tables(view) if view is not None else [])
    ]


def helps(command: click.Command, context: click.Context) -> Iterator[tuple[str, str, click.Command]]:
    """Yields (command path, help text, command) for a command and every command below it."""
    context.terminal_width = context.max_content_width = HELP_COLUMNS
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    yield context.command_path, text, command
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


def by_hand() -> dict[str, str]:
    """The pictures of terminals, and the hand-written pages with what is quoted on them, by path below docs/.

    performance.md has the results of side_by_side.py, a section per host.
    """
    markdown = runpy.run_path(str(HERE.parent / "benchmarks" / "side_by_side.py"))["markdown"]
    sections = [
        f"### {path.stem.replace('-', ' ')}\n\n{markdown(json.loads(path.read_text()))}"
        for path in sorted(SIDE_BY_SIDE.glob("*.json"))
    ]
    written = "\n\n".join([BEGIN, *sections, END])
    between = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    texts = {path: path.read_text() for path in (HERE.parent / "README.md", *HERE.glob("*.md"))}
    filled = {
        os.path.relpath(path, HERE): figures.filled(between.sub(lambda match: written, text))
        for path, text in texts.items()
        if NOTE not in text
    }
    pictures = {name: figures.terminal(*shown) for name, shown in figures.TERMINALS.items()}
    return {**filled, **pictures, "top.svg": figures.picture()}


def pages() -> dict[str, str]:
    """Returns every generated file by its path below docs/."""
    return {
        "configuration.md": configuration(),
        "admin.md": admin(),
        "metrics.md": metrics(),
        "grafana/kvctl.json": grafana("imported"),
        "prometheus/kvctl-alerts.yml": alert_rules(),
        # Helm reads no file outside the chart.
        "../charts/kvctl/files/dashboard.json": grafana("provisioned"),
        "../charts/kvctl/files/alerts.yml": alert_rules(),
        **command_pages(),
        **health_pages(),
        **{f"../completions/{file}": script(shell) for shell, file in FILES.items()},
        "json.md": page("JSON", *json_schema.page_text()),
    }


if __name__ == "__main__":
    written = {**pages(), **by_hand()}
    promises = HERE / "json.md"
    if broken := json_schema.broken_promises(promises.read_text() if promises.exists() else "", written["json.md"]):
        sys.exit("docs/json.md promises fields: give the schema its next number, or keep them:\n" + "\n".join(broken))
    for folder in ("commands", "health"):
        for old in (HERE / folder).glob("*.md"):
            if f"{folder}/{old.name}" not in written:
                old.unlink()
    for name, text in written.items():
        (HERE / name).parent.mkdir(parents=True, exist_ok=True)
        (HERE / name).write_text(text)
