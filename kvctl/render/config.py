"""Views of the agents' configuration: one row per value with the agents that have it, and one key in detail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvctl.render.kinds import Kind
from kvctl.render.report import Line
from kvctl.render.view import Column, View, Width
from kvctl_agent.contract.config import Key

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
        Column("type", width=Width.WIDE),
        Column("default", width=Width.WIDE),
        Column("minimum", width=Width.WIDE),
        Column("maximum", width=Width.WIDE),
        Column("choices", kind=Kind.LIST, width=Width.WIDE),
        Column("runtime", kind=Kind.FLAG, width=Width.WIDE),
        Column("environment", width=Width.WIDE),
        Column("sglang", width=Width.WIDE),
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
