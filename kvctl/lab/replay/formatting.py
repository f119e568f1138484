"""Formats inputs and actions of state machines as lines of text, and finds the rooms that they concern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.tag import Tag

_MAX_ITEMS = 6  # of a list
_MAX_TEXT = 300  # characters
_HIDDEN_FIELDS = frozenset({"nonce", "cancel", "share", "who", "inputs", "incarnation", "moments", "host", "held"})


def rooms_of(event: ev.Event, actions: Sequence[ev.Action] = ()) -> set[int]:
    """Returns the numbers of the rooms that an input and the resulting actions concern."""
    found: set[int] = set()
    for each in (event, *actions):
        message, tag = getattr(each, "message", None), getattr(each, "tag", None)
        room = getattr(each, "room", getattr(message, "room", getattr(tag, "room", None)))
        if room is not None:
            found.add(room)
    return found


def input_text(event: ev.Event) -> str:
    """Formats an input as one line, such as `from prefill-0: RoomAccepted room=12`."""
    if isinstance(event, ev.Received):
        return f"from {event.peer}: {fields_text(event.message)}"
    return fields_text(event)


def action_text(action: ev.Action) -> str:
    """Formats an action as one line, such as `to prefill-0: RoomOpen room=12`."""
    if isinstance(action, ev.Send):
        return f"to {action.peer}: {fields_text(action.message)}"
    return fields_text(action)


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
