"""`kvctl config`: every configuration value of the agents, and where it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from kvctl.client.calls import Call
from kvctl.client.fleet import Survey
from kvctl.commands.mutations import DONE, act, named, yes_option
from kvctl.commands.options import KvctlGroup, pass_settings
from kvctl.commands.queries import nobody, run
from kvctl.commands.settings import Settings
from kvctl.render.report import Block, Grid, Line, Report, Text
from kvctl.render.view import Column, Kind, Row, View, Width
from kvctl_agent.contract.config import KEYS, KEYS_BY_NAME, Key

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


_ORIGIN = Column("origin", width=Width.NORMAL)

CONFIG = View(
    "config",
    (
        Column("key"),
        Column("value"),
        Column("unit", width=Width.NORMAL),
        _ORIGIN,
        Column("agents", kind=Kind.LIST),
        Column("default", width=Width.WIDE),
        Column("runtime", kind=Kind.FLAG, width=Width.WIDE),
        Column("help", width=Width.WIDE),
    ),
    sort=("key",),
)

# The same rows with the origin first and never hidden, for the question of who set a value.
ORIGINS = View(
    "config",
    (
        replace(_ORIGIN, width=Width.CORE),
        *(replace(column) for column in CONFIG.columns if column is not _ORIGIN),
    ),
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
        Column("agents", kind=Kind.LIST),
        Column("type", width=Width.WIDE, help="Type of the value."),
        Column("default", width=Width.WIDE),
        Column("minimum", width=Width.WIDE, help="Smallest allowed value."),
        Column("maximum", width=Width.WIDE, help="Largest allowed value."),
        Column("choices", kind=Kind.LIST, width=Width.WIDE, help="Allowed values."),
        Column("runtime", kind=Kind.FLAG, width=Width.WIDE),
        Column("environment", width=Width.WIDE, help="Environment variable that sets the key."),
        Column("sglang", width=Width.WIDE, help="Corresponding flag or environment variable of SGLang."),
        Column("help", width=Width.WIDE),
    ),
)


def shared(answers: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> list[dict[str, Any]]:
    """Returns the rows of all agents; agents with the same value and source of a key share a row.

    Args:
        answers: (agent name, its answer to `config`).
    """
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for agent, values in answers:
        for row in values:
            merged = rows.setdefault((row["key"], repr(row["value"]), row["origin"]), {**row, "agents": []})
            merged["agents"].append(agent)
    return list(rows.values())


def declared(key: Key) -> dict[str, Any]:
    """Returns the declaration of a key, for the rows of EXPLAINED."""
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


def page(key: Key, allowed: str) -> list[Line]:
    """Describes a key for a terminal: its purpose, its allowed values and how to set it.

    Args:
        key: the key.
        allowed: description of the allowed values.
    """
    default = "automatic" if key.default is None else str(key.default) or "empty"
    lines: list[Line] = [[(key.name, "bold"), (f"  {key.help}", "")], [("", "")]]
    facts = [
        ("takes", allowed),
        ("default", f"{default} {key.unit}".strip() if key.default is not None else default),
        ("set by", f"{key.name} in agent.toml, {key.environment}, or an argument of Agent"),
        ("while running", f"kvctl config set {key.name} VALUE" if key.runtime else "no: restart the agent"),
        *([("in SGLang", key.sglang)] if key.sglang else []),
    ]
    return [*lines, *([(f"{name:<15}", "dim"), (text, "")] for name, text in facts)]


@click.group(cls=KvctlGroup, default="show")
def config() -> None:
    """Configuration of the agents; `kvctl config` alone shows it."""


@config.command(
    view=CONFIG,
    short_help="Every value with its origin.",
    examples=[
        ("Values that differ from the defaults", "kvctl config show --origin"),
        ("One key on all agents", "kvctl config --filter 'key=staging_ring_mb'"),
    ],
)
@click.option(
    "--origin",
    is_flag=True,
    help="Only values that are not the default, with their origin: file, environment, argument.",
)
@pass_settings
def show(settings: Settings, origin: bool) -> None:
    """Every value with its origin: default, file, environment or argument. Agents that agree share a row."""
    view = ORIGINS if origin else CONFIG

    def read(survey: Survey) -> Report:
        answers = survey.answers("config")
        rows = shared([(agent.name, data) for agent, data in answers])
        chosen = [row for row in rows if not origin or row["origin"] != "default"]
        return Report(view, chosen, len(answers), survey.faults)

    run(settings, view, (Call("config"),), read)


class KeyName(click.ParamType[Key]):
    """The name of a configuration key, as files, variables or SGLang spell it."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Key:
        wanted = str(value).strip()
        spelled = wanted.lower().removeprefix("kvctl_").replace("-", "_")
        found = KEYS_BY_NAME.get(spelled)
        if found is None:
            found = next((key for key in KEYS_BY_NAME.values() if key.sglang and key.sglang == wanted), None)
        if found is None:
            from kvctl_agent.contract.settings import near

            hint = near(spelled, KEYS_BY_NAME) or "; all of them: kvctl config show"
            self.fail(f"no configuration key {value!r}{hint}", param, ctx)
        return found

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from click.shell_completion import CompletionItem

        return [
            CompletionItem(key.name, help=key.help) for key in KEYS_BY_NAME.values() if key.name.startswith(incomplete)
        ]


@config.command(
    view=EXPLAINED,
    short_help="One key: meaning, allowed values, and the value on each agent.",
    examples=[
        ("What a key does, and its value on each agent", "kvctl config explain staging_ring_mb"),
        ("By its SGLang name", "kvctl config explain SGLANG_DISAGGREGATION_QUEUE_SIZE"),
    ],
)
@click.argument("wanted", metavar="KEY", type=KeyName())
@pass_settings
def explain(settings: Settings, wanted: Key) -> None:
    """What KEY does, its allowed values, how it is set, and its value on each agent with the origin.

    KEY may also be the name of its variable, or what SGLang calls it. Without agents the declaration alone is shown.
    """

    key = wanted  # --key is another matter

    def read(survey: Survey) -> Report:
        answers = survey.answers("config")
        values = shared([(agent.name, data) for agent, data in answers])
        mine = [row for row in values if row["key"] == key.name]
        rows = [declared(key) | {name: row[name] for name in ("value", "origin", "agents")} for row in mine]
        notes = [] if survey.agents or survey.faults else [f"as declared: {nobody(settings, survey).message}"]
        return Report(
            EXPLAINED,
            rows or [declared(key)],
            # The declaration is an answer, too.
            len(answers) or 1,
            survey.faults,
            blocks=lambda kept, width: _blocks(key, kept if rows else ()),
            notes=notes,
        )

    run(settings, EXPLAINED, (Call("config"),), read)


def _blocks(key: Key, rows: Sequence[Row]) -> list[Block]:
    from kvctl_agent.contract.settings import allowed

    return [Text(page(key, allowed(key))), *([Grid(EXPLAINED, rows)] if rows else [])]


class RuntimeKey(click.ParamType[str]):
    """A configuration key; those that can change while an agent runs complete.

    A key of an agent that is newer than this kvctl passes: the agents judge what is not like any known one.
    """

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from kvctl_agent.contract.settings import near

        known = KEYS_BY_NAME.get(str(value))
        if known is not None and not known.runtime:
            self.fail(f"{value} cannot change while an agent runs: set it where the agent is started", param, ctx)
        if known is None and (hint := near(str(value), KEYS_BY_NAME)):
            self.fail(f"no configuration key {value!r}{hint}", param, ctx)
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from click.shell_completion import CompletionItem

        return [
            CompletionItem(key.name, help=key.help) for key in KEYS if key.runtime and key.name.startswith(incomplete)
        ]


@config.command(
    "set",
    view=DONE,
    short_help="Change a value while the agents run.",
    examples=[("Wait a minute for input, on all decode ranks", "kvctl config set waiting_timeout_s 60 -l role=decode")],
)
@click.argument("name", metavar="KEY", type=RuntimeKey())
@click.argument("value")
@yes_option
@pass_settings
def set_value(settings: Settings, name: str, value: str, yes: bool) -> None:
    """Set KEY to VALUE on every agent that matches, until it ends; kvctl config explain KEY lists the allowed values.

    Only keys that kvctl config -o wide marks as RUNTIME can change. Level: admin.
    """
    act(
        settings,
        Call("set", {"key": name, "value": value}),
        lambda agents: f"Set {name} = {value} on {named(agents)}",
        yes=yes,
    )
