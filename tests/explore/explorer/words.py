"""Describes a history, one numbered line for each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.protocol import codec
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.tag import Tag
from tests.explore.explorer.flow import Budget, Step
from tests.explore.explorer.space import Space

_MAX_ITEMS = 6  # of a list
_MAX_TEXT = 300  # characters
_HIDDEN_FIELDS = frozenset({"nonce", "cancel", "share", "who", "inputs", "incarnation", "moments", "host", "held"})


def history(space: Space, steps: list[Step]) -> str:
    """Describes the steps from the space's start; their meaning depends on the states between them."""
    state = space.first(space.budgets[0] if space.budgets else Budget())
    lines: list[str] = []
    for number, step in enumerate(steps, 1):
        lines.append(f"{number:>4}. {describe(space, state, step)}")
        if number < len(steps):
            there = space.perform(state, step)
            assert there is not None
            state = there
    return "\n".join(lines)


def describe(space: Space, state: tuple[int, ...], step: Step) -> str:
    """Describes one step from a state."""
    names = space.names
    if step.channel < 0:
        who = names[step.agent] if step.agent >= 0 else ""
        words = {
            "time": "time passes everywhere",
            "resume": f"{who} goes on",
            "resume late": f"{who} goes on, and looks at the clock first",
            "early": f"time passes at {who}",
            "deadline": f"{who}: room {step.other} has waited for too long",
            "abort": f"{who} aborts room {step.other}",
            "recall": f"{who}'s engine takes the pages of room {step.other} back",
            "lapse": f"{who}: room {step.other} has waited for too long to be opened or claimed",
            "lapse early": f"{who}: room {step.other} has waited for too long to be opened or claimed",
            "release": f"{who} is told to take allocation {step.other} back",
            "deaf": f"{who} hears nothing from {step.other} for long",
            "forget": f"{who} forgets {step.other}",
            "pause": f"{who} is paused",
            "kill": f"{who} is killed",
            "freeze": f"{who} is frozen, and what its workers have begun may be written at any time",
            "leave": f"{who} says good-bye and ends",
            "restart": f"{who} starts anew",
            "again": f"the number {step.other} is used for another room",
        }
        return words[step.what]
    kind, to, by = space.channels[step.channel]
    number = space.contents[state[space.first_channel + step.channel]][step.place]
    item = space.items[number]
    if kind == "message":
        words_ = f"{names[by]} → {names[to]}: {fields_text(codec.decode(item)[1][0])}"
    elif kind == "tag":
        words_ = f"{names[by]} → {names[to]}: tag, {_tag(item)}"
    elif kind == "begin":
        words_ = f"{names[to]} begins to write {_write(space, item[0])}" + (", or would: dropped" if item[1] else "")
    elif kind == "flight":
        words_ = f"{names[to]}'s write lands: {_write(space, item)}"
    elif kind == "scatter":
        action = space.machines.scatters[item]
        done = "cannot scatter" if step.what == "fail" else "has scattered"
        words_ = f"{names[to]} {done} {action.key} of room {action.room}, serial {action.serial}"
    elif kind == "engine":
        words_ = f"{names[to]}'s engine: {', '.join(map(_call, space.calls_of(number)))}"
    elif kind == "proof":
        words_ = f"{names[to]} learns that {names[item[0]]} (incarnation {item[1]}) is dead"
    else:
        words_ = f"{names[to]}: {item[0]} {' '.join(map(str, item[2:]))}"
    how = {
        "do": "",
        "lose": "   (lost)",
        "copy": "   (and will come again)",
        "overtake": "   (out of turn)",
        "fail": "",
    }
    return words_ + how[step.what]


def _tag(data: bytes) -> str:
    tag = Tag.unpack(data)
    serial = f" serial {tag.serial}" if tag.serial else ""
    return f"{tag.kind.name} {tag.key} of room {tag.room} nonce {tag.nonce}{serial}"


def _write(space: Space, number: int) -> str:
    order = space.machines.writes[number].order
    where = f", ring {order.grant.offset}..{order.grant.end} round {order.grant.round}" if order.grant else ""
    return f"{_tag(order.tag)} to {order.peer}{where}"


def _call(event: ev.Event) -> str:
    return f"{type(event).__name__}({getattr(event, 'room', '')})"


def fields_text(value: msgspec.Struct) -> str:
    """Formats the type of an event or message, and its fields that differ from their defaults."""
    fields = [
        f"{field.name}={_value(item)}"
        for field in msgspec.structs.fields(value)
        if field.name not in _HIDDEN_FIELDS and not _equal(item := getattr(value, field.name), field.default)
    ]
    return " ".join([type(value).__name__, *fields])[:_MAX_TEXT]


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, np.ndarray) and bool(value == default)


def _value(value: Any) -> str:
    match value:
        case np.ndarray():
            return f"[{_items(value.tolist())}]"
        case Tag():
            serial = f" serial {value.serial}" if value.serial else ""
            return f"({value.kind.name} room {value.room} {value.key}{serial})"
        case bytes():
            try:
                return _value(Tag.unpack(value))
            except RemoteProtocolError:
                return f"{len(value)} bytes"
        case tuple() if hasattr(value, "_fields"):
            return f"({value})"
        case list() | tuple():
            return f"[{_items(value)}]"
        case msgspec.Struct():
            return f"({fields_text(value)})"
        case dict():
            return str(value.get("text", f"{len(value)} fields"))
    return str(getattr(value, "label", value))


def _items(values: Sequence[Any]) -> str:
    if len(values) > _MAX_ITEMS:
        return f"{', '.join(map(_value, values[:2]))}, … {_value(values[-1])}: {len(values)}"
    return ", ".join(map(_value, values))
