"""`kvctl config`: lists configuration values of the agents with their origin, explains keys, and changes values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.mutations import DONE, act, named, yes_option
from kvctl.commands.options import KvctlGroup
from kvctl.commands.queries import no_agent, run
from kvctl.commands.settings import Settings
from kvctl.render.report import Block, Grid, Line, Report, Text
from kvctl.render.view import Column, Kind, Row, View, Width
from kvctl_agent.contract.config import KEYS, KEYS_BY_NAME, Key

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

CONFIG = View(
    "config",
    (
        Column("key"),
        Column("value"),
        Column("unit", width=Width.NORMAL),
        Column("origin", width=Width.NORMAL),
        Column("agents", Kind.LIST),
        Column("default", width=Width.WIDE),
        Column("runtime", Kind.FLAG, Width.WIDE),
        Column("help", width=Width.WIDE),
    ),
    sort=("key",),
)

# With the origin first and never hidden.
ORIGINS = View(
    "config",
    (Column("origin"), *(column for column in CONFIG.columns if column.name != "origin")),
    sort=("origin", "key"),
    empty="every value is the default",
)

EXPLAINED = View(
    "config.key",
    (
        Column("key", width=Width.WIDE),
        Column("value"),
        Column("unit", width=Width.NORMAL),
        Column("origin"),
        Column("agents", Kind.LIST),
        Column("type", width=Width.WIDE, help="Type of the value."),
        Column("default", width=Width.WIDE),
        Column("minimum", width=Width.WIDE, help="Smallest allowed value."),
        Column("maximum", width=Width.WIDE, help="Largest allowed value."),
        Column("choices", Kind.LIST, Width.WIDE, "Allowed values."),
        Column("runtime", Kind.FLAG, Width.WIDE),
        Column("environment", width=Width.WIDE, help="Environment variable that sets the key."),
        Column("sglang", width=Width.WIDE, help="Corresponding flag or environment variable of SGLang."),
        Column("help", width=Width.WIDE),
    ),
)


@click.group(cls=KvctlGroup, default="show")
def config() -> None:
    """Configuration of the agents; without a subcommand, like `kvctl config show`."""


@config.command(
    view=CONFIG,
    short_help="List every value with its origin.",
    examples=[
        ("Values that differ from the defaults", "kvctl config show --origin"),
        ("One key on all agents", "kvctl config --filter 'key=staging_ring_mb'"),
    ],
)
@click.option(
    "--origin",
    is_flag=True,
    help="Only values other than the default, sorted by origin: engine, file, environment, argument.",
)
def show(settings: Settings, origin: bool) -> None:
    """List every value with its origin: default, engine, automatic, file, environment or argument.

    Agents with the same value from the same origin share a row.
    """
    view = ORIGINS if origin else CONFIG

    def read(survey: Survey) -> Report:
        rows = [row for row in _rows(survey) if not origin or row["origin"] != "default"]
        return Report(view, rows, len(survey.answers("config")), survey.faults)

    run(settings, view, (Call("config"),), read)


def _rows(survey: Survey) -> list[dict[str, Any]]:
    """Returns one row per key, value and origin, with the names of the agents that have this value."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for agent, values in survey.answers("config"):
        for row in values:
            shared = rows.setdefault((row["key"], repr(row["value"]), row["origin"]), {**row, "agents": []})
            shared["agents"].append(agent.name)
    return list(rows.values())


def _complete(names: Sequence[Key], incomplete: str) -> list[CompletionItem[str]]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(key.name, help=key.help) for key in names if key.name.startswith(incomplete)]


class KeyName(click.ParamType[Key]):
    """Parameter type of a configuration key, given by its name in files, environment variable or SGLang name."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Key:
        wanted = str(value).strip()
        name = wanted.lower().removeprefix("kvctl_").replace("-", "_")
        found = KEYS_BY_NAME.get(name) or next((key for key in KEYS if key.sglang and key.sglang == wanted), None)
        if found is None:
            from kvctl_agent.contract.values import near

            hint = near(name, KEYS_BY_NAME) or "; kvctl config show lists all keys"
            self.fail(f"no configuration key {value!r}{hint}", param, ctx)
        return found

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        return _complete(KEYS, incomplete)


@config.command(
    view=EXPLAINED,
    short_help="Describe a key: meaning, allowed values, and the value on each agent.",
    examples=[
        ("The meaning of a key, and its value on each agent", "kvctl config explain staging_ring_mb"),
        ("By its SGLang name", "kvctl config explain SGLANG_DISAGG_STAGING_POOL_SIZE_MB"),
    ],
)
@click.argument("wanted", metavar="KEY", type=KeyName())  # `key` is the parameter of the global option --key
def explain(settings: Settings, wanted: Key) -> None:
    """Describe KEY: its meaning, allowed values, how to set it, and its value on each agent with the origin.

    KEY may also be the name of its environment variable or of the corresponding setting of SGLang. If no agent answers,
    only the declaration is printed.
    """

    def read(survey: Survey) -> Report:
        from kvctl_agent.contract.settings import allowed

        found = [row for row in _rows(survey) if row["key"] == wanted.name]
        rows = [_declaration(wanted) | {name: row[name] for name in ("value", "origin", "agents")} for row in found]
        alone = not (survey.agents or survey.faults)

        def blocks(kept: Sequence[Row], width: int) -> list[Block]:
            return [Text(_description(wanted, allowed(wanted))), *([Grid(EXPLAINED, kept)] if rows else [])]

        return Report(
            EXPLAINED,
            rows or [_declaration(wanted)],
            len(survey.answers("config")) or 1,  # the declaration counts as an answer
            survey.faults,
            blocks=blocks,
            notes=[f"only the declaration: {no_agent(settings, survey).message}"] if alone else [],
        )

    run(settings, EXPLAINED, (Call("config"),), read)


def _declaration(key: Key) -> dict[str, Any]:
    """Returns the declaration of a key as a row of EXPLAINED, without a value."""
    return {
        "key": key.name,
        "value": None,
        "unit": key.unit,
        "origin": None,
        "agents": [],
        "type": key.type.__name__,
        "default": key.default,
        "minimum": key.minimum,
        "maximum": key.maximum,
        "choices": list(key.choices),
        "runtime": key.runtime,
        "environment": key.environment,
        "sglang": key.sglang,
        "help": key.help,
    }


def _description(key: Key, allowed: str) -> list[Line]:
    """Formats the meaning, allowed values and default of a key, and how to set it, for a terminal."""
    default = "automatic" if key.default is None else f"{str(key.default) or 'empty'} {key.unit}".strip()
    facts: Mapping[str, str] = {
        "takes": allowed,
        "default": default,
        "set by": f"{key.name} in agent.toml, {key.environment}, or an argument of Agent",
        "while running": f"kvctl config set {key.name} VALUE" if key.runtime else "no: restart the agent",
        **({"in SGLang": key.sglang} if key.sglang else {}),
    }
    lines: list[Line] = [[(key.name, "bold"), (f"  {key.help}", "")], [("", "")]]
    return [*lines, *([(f"{name:<15}", "dim"), (text, "")] for name, text in facts.items())]


class RuntimeKey(click.ParamType[str]):
    """Parameter type of the name of a configuration key that can change while an agent runs.

    An unknown name that is not similar to a known one is accepted, since a newer agent may have that key.
    """

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from kvctl_agent.contract.values import near

        known = KEYS_BY_NAME.get(str(value))
        if known is not None and not known.runtime:
            self.fail(f"{value} cannot change while an agent runs: set it and restart the agent", param, ctx)
        if known is None and (hint := near(str(value), KEYS_BY_NAME)):
            self.fail(f"no configuration key {value!r}{hint}", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        return _complete([key for key in KEYS if key.runtime], incomplete)


@config.command(
    "set",
    view=DONE,
    short_help="Change a value while the agents run.",
    examples=[
        ("A minute to wait for input, on all decode ranks", "kvctl config set waiting_timeout_s 60 -l role=decode")
    ],
)
@click.argument("name", metavar="KEY", type=RuntimeKey())
@click.argument("value")
@yes_option
def set_value(settings: Settings, name: str, value: str, yes: bool) -> None:
    """Set KEY to VALUE on every selected agent, until it ends; kvctl config explain KEY lists the allowed values.

    Only keys that kvctl config -o wide marks as RUNTIME can be set. Level: admin.
    """
    act(
        settings,
        Call("set", {"key": name, "value": value}),
        lambda agents: f"Set {name} = {value} on {named(agents)}",
        yes=yes,
    )
