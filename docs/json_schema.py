"""Fields of what `-o json` prints, from the types and columns that the code declares; docs/render.py makes a page.

A row is what an agent answered (a type of `kvctl_agent.contract.snapshots`), or what the columns of the command's table
name, or both; `ADDED` has the fields that are in neither.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import click

import kvctl.commands
import kvctl.lab.bench
import kvctl.render
from kvctl.client.faults import Fault
from kvctl.commands.registry import COMMANDS, load
from kvctl.render.glossary import COMMON
from kvctl.render.view import Column, Kind, View
from kvctl_agent.contract import snapshots

Number = int | float | None
_KINDS: Mapping[Kind, Any] = {
    Kind.FLAG: bool | None,
    Kind.LIST: list[str] | None,
    Kind.MAP: dict[str, Any] | None,
    Kind.LAYERS: list[int] | None,
    Kind.COUNT: Number,
    Kind.NUMBER: Number,
    Kind.RATE: Number,
    Kind.RATIO: Number,
    **dict.fromkeys((Kind.DURATION, Kind.MILLISECONDS, Kind.SECOND, Kind.TIME, Kind.BYTES), int | None),
}
# What agents answer, by schema; rows of the others are those of their columns.
ANSWERS: Mapping[str, Any] = {
    "status": snapshots.Status,
    "rooms": snapshots.RoomRow,
    "history": snapshots.RoomRow,
    "slow": snapshots.RoomRow,
    "staging": snapshots.Staging,
    "staging_map": snapshots.RingAllocation,
    "layers": snapshots.LayerRow,
    "peers": snapshots.PeerRow,
    "probe": snapshots.ProbeRow,
    "nics": snapshots.Nic,
    "bootstrap": snapshots.Bootstrap,
    "events": snapshots.EventRow,
    "stacks": snapshots.ThreadStack,
    "done": snapshots.ActionResult,
}
# Documents of measurements have more fields than these, and some have their rows in a field.
OPEN = frozenset({"bench", "bench-plan", "bench-servers", "preflight", "tune"})
ROWS_IN = {"preflight": "pairs", "tune": "options"}


class Clock(TypedDict):
    """Clock of a rank of a room, as it was corrected."""

    agent: str
    host: str | None
    offset_ns: int  # clock of the agent minus that of this machine
    error_ns: int


class Part(TypedDict):
    """Times of one part of a room."""

    writer: int  # unique rank of the writer
    chunk: int
    layers: list[int]  # [lo, hi)
    decode: str  # name of the decode rank; "-": unknown
    moments: dict[str, int]  # wall clock of this machine at the end of each stage, by stage


class MissingParts(TypedDict):
    """Parts that a decode rank of an active room still expects from a writer."""

    writer: str
    decode: str
    cells: int
    chunks: list[int] | None  # [lo, hi); None: only final parts are missing
    layers: list[int] | None  # [lo, hi)
    finals: int  # missing final parts: aux row and state components
    waits_for: str
    age_ns: int  # since they were ready; if not ready, since the latest progress of the room


class RoomOfRank(snapshots.RoomRow):
    """A room on one of its ranks, in the joined document of the room."""

    owed_parts: NotRequired[list[snapshots.OwedParts]]  # active rooms only
    timeline_dropped: int
    clock_error_ns: int | None


class Event(snapshots.TimelineEvent):
    """An event of a room, on the clock of this machine."""

    room: str
    nonce: str
    relative_ns: int  # since the first event


class BootstrapRank(TypedDict):
    """A rank of a prefill instance, in its bootstrap registry."""

    rank: str
    agent: str | None
    state: str
    connected: int | None
    endpoint: str | None
    incarnation: str | None


Setting = str | int | float | bool | None
# Fields that are neither answered by agents nor columns, or whose columns show another value: type and meaning.
ADDED: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "status": {
        "health": (list[str], "Codes of the agent's findings in this reading, or why it did not answer."),
        "instance": (NotRequired[str], "Name of its instance."),
    },
    "agents": {
        "name": (NotRequired[str], "As `agent`; of agents that answered, like the following."),
        "now_ns": (NotRequired[int], "Wall clock of the agent when it replied."),
        "draining": (NotRequired[bool], "Whether it accepts no new rooms."),
        "ended_age_ns": (
            NotRequired[int | None],
            "Since its process ended without closing the agent; null: it has not.",
        ),
        "ended_why": (NotRequired[str | None], "How its process ended, as far as it is known."),
        "process_state": (NotRequired[snapshots.ProcessState | None], "State of its process by the kernel."),
        "turn_age_ns": (
            NotRequired[int | None],
            "Since its control loop last began a turn; null: it has not begun one.",
        ),
        "observer": (NotRequired[snapshots.ObserverKind], "What replied: process, or thread of the agent's process."),
        "pid": (NotRequired[int | None], COMMON["pid"]),
        "protocol": (NotRequired[list[int] | None], COMMON["protocol"]),
    },
    "version": {"protocol": (list[int] | None, COMMON["protocol"])},
    "peers.diff": {"a": (Setting, "Value of the first agent."), "b": (Setting, "Value of the second agent.")},
    "room": {
        "room": (str, COMMON["room"]),
        "nonce": (str, COMMON["nonce"]),
        "request_ids": (list[str], "The engines' ids of the request."),
        "state": (str, "The least advanced of its ranks' states; Failed if one of them has failed."),
        "started_at_ns": (int, "Time of the first event."),
        "first_failing_rank": (str | None, "Agent that failed first."),
        "failure": (snapshots.Failure | None, "First cause of the failure; null: it has not failed."),
        "owed_parts": (list[MissingParts], "Missing parts of an active room, the longest wait first."),
        "ranks": (list[RoomOfRank], "The room on each of its ranks, prefill ranks first."),
        "clocks": (list[Clock], "Clocks of the ranks."),
        "parts": (list[Part], "Times of each part."),
        "timeline": (list[Event], "Events of all ranks; `--filter` and `--sort-by` apply to them."),
    },
    "staging_map": {"agent": (str, COMMON["agent"])},
    "stacks": {"agent": (str, COMMON["agent"])},
    "config": {"value": (Setting, COMMON["value"]), "default": (Setting, COMMON["default"])},
    "config.key": {
        "value": (Setting, COMMON["value"]),
        "default": (Setting, COMMON["default"]),
        "minimum": (Number, "Smallest value allowed."),
        "maximum": (Number, "Largest value allowed."),
    },
    "metrics": {
        "labels": (dict[str, str], "Labels of the sample."),
        "buckets": (
            NotRequired[list[list[float | None]]],
            "Histograms: upper bound (null: none) and cumulative count.",
        ),
    },
    "peers.cost": {
        "tokens": (int, "Length of the prompt."),
        "ahead_ns": (int | None, "How long a room that begins now waits for those in transfer."),
        "bytes_per_token": (float | None, "KV bytes of a token."),
        "bytes_per_s": (int | None, "Rate of one prompt, beyond the fixed time."),
        "ranks": (list[snapshots.TransferCost], "Answers of the prefill ranks."),
    },
    "bootstrap": {
        "ranks": (list[BootstrapRank], "Its ranks."),
        "registered": (Number, "Number of ranks that have registered."),
        "missing": (list[str], "Ranks that have not registered."),
    },
    "nics": {"numa_node": (int | None, "NUMA node.")},
    "health": {"evidence": (dict[str, Any], "Measured values by name, with the unit in the name.")},
    "doctor": {
        "evidence": (dict[str, Any], "Measured values by name, with the unit in the name."),
    },
    "hosts": {"health": (list[str], "Why its agents are odd.")},
}
# Schemas that also have rows of agents that did not answer: the only fields of these.
SILENT: Mapping[str, frozenset[str]] = {"status": frozenset({"name", "host", "health"})}
# Meanings of fields for which neither a comment, nor a column, nor the glossary has one; by name.
MEANINGS: Mapping[str, str] = {
    "buffers": "staging buffers of a prefill rank; null: of a decode rank",
    "cells": "number of cells (writer, chunk, layer)",
    "connected": "peers that are connected to it",
    "copies": "copies from the ring to pages",
    "count": "number of measured values",
    "detail": "more about the event",
    "does": "effect",
    "end": "end of the region in the ring, bytes",
    "failed": "rooms that failed",
    "failure": "first cause of the failure; null: it has not failed",
    "fallbacks": "parts that took another path than the one asked for",
    "fds": "open file descriptors",
    "finished_at_ns": "end of the room; null: it is active",
    "gated": "parts of a prefill rank that wait for the ring",
    "gb_per_s": "KV bytes per time",
    "gids": "addresses of an RDMA port",
    "granted_total": "regions granted",
    "high_water_bytes": "most that was ever in use",
    "latency_ns": "decode: open to success; prefill: first ready to sent",
    "live": "allocations",
    "message": "what happened and the next step",
    "opened_at_ns": "start of the room on this rank",
    "p50_ns": "median",
    "p90_ns": "90th percentile",
    "p99_ns": "99th percentile",
    "pages": "pages of the room",
    "parts": "parts of the room",
    "peers": "agents that it transfers with",
    "pieces": "pieces of the buffers",
    "planned": "cells that are due",
    "process": "resources of the worker process",
    "public": "public key",
    "rate": "rate of transfers",
    "refused_total": "regions refused",
    "retransmits": "packets sent again, by the kernel's counters",
    "revoked_total": "regions revoked",
    "ring": "ring of a decode rank; null: of a prefill rank",
    "rooms": "number of rooms",
    "rooms_per_s": "rooms per time",
    "round": "how often allocation has wrapped around the ring",
    "rss_bytes": "resident memory",
    "scattered": "cells in their pages",
    "sent": "cells sent",
    "serial": "number of the allocation, never reused",
    "size_bytes": "size",
    "state": "state",
    "tail": "offset in the ring, bytes",
    "text": "description for people",
    "threads": "threads of the process",
    "timeline_dropped": "events that were dropped for lack of space",
    "verified": "whether every received byte was compared and right",
    "waits_for": "why they have not arrived",
    "watermark": "oldest allocation of the ring that is not free",
    "window_ns": "time over which it was measured",
    "writer": "rank that writes",
}
# Fields of the answers that the rows of a schema do not have.
LACKING: Mapping[str, frozenset[str]] = {"bootstrap": frozenset({"agent"})}


class Field(NamedTuple):
    """Field of a JSON object; `hint` is its Python type, without `NotRequired`."""

    name: str
    hint: Any
    text: str
    required: bool


@cache
def views() -> dict[str, View]:
    """Returns the views of all commands, by the name of their schema."""
    found: dict[str, View] = {}
    for package in (kvctl.render, kvctl.commands, kvctl.lab.bench):
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            found |= {each.name: each for each in vars(module).values() if isinstance(each, View)}
    return found


@cache
def schemas() -> dict[str, list[str]]:
    """Returns the commands that print a document, by the name of its schema."""
    found: dict[str, list[str]] = {}
    for name in COMMANDS:
        command = load(name)
        assert command is not None
        for path, view in _printed(command, name):
            found.setdefault(view, []).append(path)
    others = {"demo-faults": "demo --list-faults", "key": "key new"}
    others |= {"bench": "bench", "bench-plan": "bench --plan", "bench-servers": "bench --engine sglang", "tune": "tune"}
    others |= {"bench-servers-plan": "bench --engine sglang --plan"}
    found |= {name: [path] for name, path in others.items()}
    found |= {"recording": ["record", "debug bundle"], "status_watch": ["status -w"]}
    found["failed_causes"] = ["rooms failed --by cause"]
    return dict(sorted(found.items()))


def _printed(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            child = command.get_command(click.Context(command), name)
            assert child is not None
            yield from _printed(child, f"{path} {name}")
    elif isinstance(view := getattr(command, "view", None), View):
        yield path, view.name


def row_fields(schema: str) -> list[Field]:
    """Returns the fields of a row of `data`."""
    if schema in ROWS_IN:
        columns = ", ".join(f"`{field.name}`" for field in _columns(schema))
        return [Field(ROWS_IN[schema], list[Any], f"Objects with the fields {columns}.", True)]
    found = {field.name: field for field in fields(ANSWERS[schema])} if schema in ANSWERS else {}
    for column in _columns(schema) if schema != "room" else ():
        known = found.get(column.name, column)
        found[column.name] = known._replace(text=known.text or column.text)
    for name, (hint, text) in ADDED.get(schema, {}).items():
        optional = get_origin(hint) is NotRequired
        found[name] = Field(name, get_args(hint)[0] if optional else hint, text, required=not optional)
    always = SILENT.get(schema, found.keys())
    return [
        field._replace(required=field.required and field.name in always)
        for field in found.values()
        if field.name not in LACKING.get(schema, ())
    ]


def _columns(schema: str) -> Iterator[Field]:
    """Yields the columns of a view that are fields of its rows."""
    for column in views()[schema].columns:
        path = column.path or column.machine
        if isinstance(path, str) and "." not in path:
            yield Field(path, _kind(column), column.help or COMMON.get(column.name, ""), required=False)


def _kind(column: Column) -> Any:
    return _KINDS.get(column.kind, str | None)


@cache
def fields(kind: Any) -> list[Field]:
    """Returns the fields of a TypedDict; their texts are the comments behind them."""
    hints = get_type_hints(kind, include_extras=True)
    comments = _comments(kind)
    found = []
    for name, hint in hints.items():
        optional = get_origin(hint) is NotRequired
        text = re.sub(r"\bNone\b", "null", comments.get(name, ""))
        common = COMMON.get(name.removesuffix("_ns"), "")
        found.append(Field(name, get_args(hint)[0] if optional else hint, text or common, not optional))
    return found


def _comments(kind: Any) -> dict[str, str]:
    """Returns the comment behind each field of a TypedDict and of those that it extends."""
    source = inspect.getsource(kind)
    lines = source.splitlines()
    (declared,) = ast.parse(source).body
    assert isinstance(declared, ast.ClassDef)
    found: dict[str, str] = {}
    for base in declared.bases:  # at run time, a TypedDict has no bases
        module: Any = sys.modules[kind.__module__]
        for name in ast.unparse(base).split("."):
            module = getattr(module, name)
        found |= _comments(module) if is_typeddict(module) else {}
    for each in declared.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found[each.target.id] = lines[(each.end_lineno or each.lineno) - 1].partition("  # ")[2]
    return found


def conflicts(value: Any, hint: Any, path: str = "data") -> Iterator[str]:
    """Yields where a value is not what a type says, as `path: reason`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return
    if origin in (Union, UnionType):
        options = [list(conflicts(value, each, path)) for each in arguments]
        if all(options):
            yield from min(options, key=len)
    elif origin is Literal:
        if value not in arguments:
            yield f"{path}: {value!r} is none of {arguments}"
    elif origin is list:
        if not isinstance(value, list):
            yield f"{path}: {value!r} is no array"
        else:
            for index, each in enumerate(value):
                yield from conflicts(each, arguments[0], f"{path}[{index}]")
    elif origin is dict:
        if not isinstance(value, dict):
            yield f"{path}: {value!r} is no object"
        else:
            for name, each in value.items():
                yield from conflicts(each, arguments[1], f"{path}.{name}")
    elif is_typeddict(hint):
        yield from object_conflicts(value, fields(hint), path)
    elif not (value is None if hint in (None, NoneType) else _is(value, hint)):
        yield f"{path}: {value!r} is no {type_text(hint)}"


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def object_conflicts(value: Any, declared: list[Field], path: str, is_open: bool = False) -> Iterator[str]:
    """Yields where an object has other fields than those declared, or fields of another type."""
    if not isinstance(value, dict):
        yield f"{path}: {value!r} is no object"
        return
    names = {field.name for field in declared}
    yield from (f"{path}.{name}: is not documented" for name in value if name not in names and not is_open)
    for field in declared:
        if field.name in value:
            yield from conflicts(value[field.name], field.hint, f"{path}.{field.name}")
        elif field.required:
            yield f"{path}.{field.name}: is missing"


def document_conflicts(document: Any) -> list[str]:
    """Returns where a document that `-o json` printed is not as documented."""
    found = list(object_conflicts(document, ENVELOPE, "document"))
    if found:
        return found
    schema = document["schema"].removeprefix("kvctl.").removesuffix("/1")
    if schema not in schemas():
        return [f"schema {document['schema']} is not documented"]
    declared, is_open = row_fields(schema), schema in OPEN
    return [
        each
        for n, row in enumerate(document["data"])
        for each in object_conflicts(row, declared, f"data[{n}]", is_open)
    ]


class Error(TypedDict):
    """Why an agent did not answer."""

    agent: str  # "": not one agent's
    code: str  # unreachable, timeout, stopped, protocol, not-permitted, not-captured, or a code of the agent
    message: str


assert Error.__annotations__.keys() == Fault.__annotations__.keys()
ENVELOPE = [
    Field("schema", str, "`kvctl.NAME/VERSION`: which rows `data` has, by the sections below.", True),
    Field("generated_at_ns", int, "Wall clock of this machine; of a recording, the time of the snapshot.", True),
    Field("data", list[Any], "The rows that the filters keep. Empty if there are none.", True),
    Field("errors", list[Error], "Agents that did not answer; the exit code is then 7, or 3 if none did.", True),
]


# ---- the page ------------------------------------------------------------------------------------------------------


def type_text(hint: Any) -> str:
    """Returns the JSON type of a Python type, as a link if it is an object with a section of its own."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        texts = [type_text(each) for each in arguments]
        if "integer" in texts and "number" in texts:
            texts.remove("integer")
        return " or ".join(dict.fromkeys(texts))
    if origin is Literal:
        return " or ".join(f"`{each}`" for each in arguments)
    if origin is list:
        return "array" if arguments[0] is Any else f"array of {type_text(arguments[0])}"
    if origin is dict:
        return "object" if arguments[1] is Any else f"object of {type_text(arguments[1])}"
    if is_typeddict(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    names = {
        str: "string",
        int: "integer",
        float: "number",
        bool: "boolean",
        None: "null",
        NoneType: "null",
        Any: "any",
    }
    return names[hint]


def unit(name: str) -> str:
    """Returns the unit of a field, from the end of its name."""
    ends = {
        "at_ns": "ns since 1970",
        "_ns": "ns",
        "gb_per_s": "10⁹ bytes/s",
        "bytes_per_s": "bytes/s",
        "bytes": "bytes",
        "bytes_total": "bytes",
        "_ratio": "1 is 100 %",
        "rooms_per_s": "1/s",
    }
    return next((text for end, text in ends.items() if name.endswith(end)), "")


def nested(hint: Any) -> Iterator[Any]:
    """Yields the TypedDicts in a type, outer ones first."""
    if is_typeddict(hint):
        yield hint
        for field in fields(hint):
            yield from nested(field.hint)
    for each in get_args(hint):
        yield from nested(each)


def page_text() -> list[str]:
    """Returns the paragraphs of the page."""
    types: dict[Any, None] = {Error: None}
    sections = []
    for schema, commands in schemas().items():
        declared = row_fields(schema)
        types |= dict.fromkeys(each for field in declared for each in nested(field.hint))
        printed_by = ", ".join(f"`kvctl {command}`" for command in commands)
        more = " There are more fields, of which nothing is promised." if schema in OPEN else ""
        if schema in SILENT:
            names = ", ".join(f"`{name}`" for name in sorted(SILENT[schema]))
            more = f" The row of an agent that did not answer has {names} only."
        sections += [f"### kvctl.{schema}/1", f"{printed_by}.{more}", _table(declared)]
    objects = []
    for each in sorted(types, key=lambda kind: str(kind.__name__)):
        text = re.sub(r"\bNone\b", "null", " ".join((each.__doc__ or "").split()))
        objects += [f"### {each.__name__}", *([text] if text else []), _table(fields(each))]
    return [INTRODUCTION, _table(ENVELOPE), PROMISE, "## Rows", *sections, "## Objects in rows", *objects]


def broken_promises(before: str, now: str) -> list[str]:
    """Returns the fields of a page that a newer page lacks, or has with another type.

    A type may become narrower by `null`, and name further values.
    """
    old, new = _promised(before), _promised(now)
    broken = []
    for (section, name), kind in old.items():
        options = {each for each in kind.split(" or ") if each != "null" and not each.startswith("`")}
        late = new.get((section, name))
        if late is None:
            broken.append(f"{section}: {name} is gone")
        elif not options <= {*late.split(" or ")} or ("null" in late and "null" not in kind):
            broken.append(f"{section}: {name} was {kind}, is {late}")
    return broken


def _promised(text: str) -> dict[tuple[str, str], str]:
    found, section = {}, ""
    for line in text.splitlines():
        if line.startswith("### "):
            section = line[4:]
        elif match := re.match(r"\| `(\w+)` \| (.*?)(?:, optional)? \|", line):
            found[section, match[1]] = match[2]
    return found


def _table(declared: list[Field]) -> str:
    lines = ["| field | type | unit | meaning |", "| --- | --- | --- | --- |"]
    for field in declared:
        kind = type_text(field.hint) + ("" if field.required else ", optional")
        cells = (f"`{field.name}`", kind, unit(field.name), field.text or MEANINGS.get(field.name, ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


INTRODUCTION = """`-o json` prints one document per reading; with `-w`, `-o json` prints each on a
line. `-o jsonl` prints the rows of `data`, one on a line, without the document around them. With `--columns`, rows
have these columns only, under the names that `-o tsv` has in its header.

`data` of a command has rows of one kind, which `schema` names. Numbers are in the unit that the name of the field
ends in. Room numbers and nonces are strings of decimal digits, because they have 64 bits. `null` is an unknown
value, or one that does not apply, never 0. A field marked *optional* may be missing, and so may a field that agents
of an earlier version do not know."""

PROMISE = """## What stays, and what may change

The number at the end of `schema` is the version of its rows. As long as it is the same:

- No field is removed or renamed, and none changes its type, its unit or its meaning. A field that is not `null`
  here does not become `null`.
- Fields may be added to any object, and values to a field that names one of several, such as states, codes and
  kinds: ignore what you do not know. Schemas may be added.
- The order of fields in an object is not promised, and that of rows only with `--sort-by`.
- Texts for people may change: `cause`, `remedy`, `text`, `detail`, `message`, `reason`, `waits_for`, the names in
  `evidence`, and what errors on stderr say. Codes do not: use `code` and [exit codes](commands.md#exit-codes).
- Of `kvctl bench`, `tune` and `preflight`, only the fields below are promised.

A change that breaks one of these gets the next number, for this schema only, and not in a patch release. The
[changelog](../CHANGELOG.md) announces it under *Changed*, with the names of the schema and of the fields. `kvctl`
has no switch for an earlier version: compare `schema` before you read `data`."""
