"""Inputs and actions in a line each, for people, and which rooms they are about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvctl_agent.errors import RemoteProtocolError
from kvctl_agent.protocol import events as ev
from kvctl_agent.protocol.tag import Tag

_SHOWN = 6  # numbers of a list
_LONGEST = 300
# What says nothing to a reader of one line, or says it elsewhere in it.
_HIDDEN = frozenset({"nonce", "cancel", "share", "who", "inputs", "incarnation", "moments", "host", "held"})


def rooms_of(event: ev.Event, actions: Sequence[ev.Action] = ()) -> set[int]:
    """The rooms that an input and what it led to are about."""
    found: set[int] = set()
    for one in (event, *actions):
        message = getattr(one, "message", None)
        tag = getattr(one, "tag", None)
        room = getattr(one, "room", getattr(message, "room", getattr(tag, "room", None)))
        if room is not None:
            found.add(room)
    return found


def said(event: ev.Event) -> str:
    """An input: "prefill-0 says RoomAccepted room=12"."""
    if isinstance(event, ev.Received):
        return f"{event.peer} says {_struct(event.message)}"
    return _struct(event)


def done(action: ev.Action) -> str:
    """An action: "tell prefill-0 RoomOpen room=12 …"."""
    if isinstance(action, ev.Send):
        return f"tell {action.peer} {_struct(action.message)}"
    return _struct(action)


def _struct(value: msgspec.Struct) -> str:
    fields = [
        f"{name}={_value(getattr(value, name))}"
        for name, default in zip(value.__struct_fields__, _defaults(value), strict=True)
        if name not in _HIDDEN and not _same(getattr(value, name), default)
    ]
    return " ".join([type(value).__name__, *fields])[:_LONGEST]


def _defaults(value: msgspec.Struct) -> list[Any]:
    return [field.default for field in msgspec.structs.fields(value)]


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and not isinstance(value, np.ndarray) and bool(value == default)


def _value(value: Any) -> str:
    match value:
        case np.ndarray():
            return f"[{_few(value.tolist())}]"
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
            return f"[{_few(value)}]"
        case msgspec.Struct():
            return f"({_struct(value)})"
        case dict():
            return str(value.get("text", f"{len(value)} fields"))
    return str(getattr(value, "label", value))


def _few(values: Sequence[Any]) -> str:
    if len(values) > _SHOWN:
        return f"{', '.join(map(_value, values[:2]))}, … {_value(values[-1])}: {len(values)}"
    return ", ".join(map(_value, values))
