"""Reads fields of agents' answers without trusting them: old agents lack fields, broken agents may send anything.

A field that is missing or has the wrong type counts as unknown; no function of this module raises.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]

NO_ROW: Row = {}
_LIST = (list, tuple)  # `list | tuple` builds a union at each call
_OBJECT = (dict, Mapping)  # a dict, as JSON has them, is recognised several times faster than another Mapping

_NAME = re.compile(r"[A-Za-z0-9_.@:#\[\]-]{1,512}")


def number(row: Row, key: str) -> float | None:
    """Returns a field that is a finite number, otherwise None; booleans are not numbers."""
    value = row.get(key)
    if type(value) is float:  # tens of thousands are read for a large fleet, and isinstance takes three times as long
        return value if math.isfinite(value) else None
    return value if type(value) is int else None


def amount(row: Row, key: str) -> float:
    """Returns a field that is a finite number, otherwise 0."""
    return number(row, key) or 0


def text(row: Row, key: str) -> str:
    """Returns a field that is a string, otherwise ""."""
    value = row.get(key)
    return value if isinstance(value, str) else ""


def not_ready(status: Row) -> str:
    """Returns why an agent cannot take a new room; "" if it can. Old agents tell only what they wait for."""
    return text(status, "not_ready" if "not_ready" in status else "waiting_for")


def texts(row: Row, key: str) -> list[str]:
    """Returns the strings in a field that is a list, without its other items; [] if it is not a list."""
    value = row.get(key)
    return [item for item in value if isinstance(item, str)] if isinstance(value, _LIST) else []


def inner(row: Row, key: str) -> Row:
    """Returns a field that is a JSON object, otherwise an empty one."""
    value = row.get(key)
    return value if isinstance(value, _OBJECT) else NO_ROW


def rows(value: Any) -> list[Row]:
    """Returns the JSON objects in a list, without its other items; [] if `value` is not a list."""
    return [item for item in value if isinstance(item, _OBJECT)] if isinstance(value, _LIST) else []


def numbers(row: Row, key: str) -> list[float]:
    """Returns a field that is a list of finite numbers; [] if it is not, or if any item is not a number."""
    value = row.get(key)
    if not isinstance(value, list | tuple):
        return []
    found = [number({key: item}, key) for item in value]
    return [item for item in found if item is not None] if None not in found else []


def counts(row: Row, key: str) -> dict[str, float]:
    """Returns the finite numbers in a field that is a JSON object, by key; other values are left out."""
    found = inner(row, key)
    return {name: value for name in found if isinstance(name, str) and (value := number(found, name)) is not None}


def is_agent_name(name: str) -> bool:
    """Returns whether a string can be an agent's name.

    Random data that another program sends to a control socket can appear as a peer's name.
    """
    return _NAME.fullmatch(name) is not None
