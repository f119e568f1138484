"""Validated reads of agents' answers, which may lack fields (older agents) or contain anything (broken ones).

A value that is missing or of the wrong type counts as unknown; no function of this module raises.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]

NO_ROW: Row = {}

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def number(row: Row, key: str) -> float | None:
    """Returns a finite number; None if there is none. Booleans are not numbers."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def amount(row: Row, key: str) -> float:
    """Returns a number, 0 if it is unknown."""
    return number(row, key) or 0


def text(row: Row, key: str) -> str:
    """Returns a string, "" if there is none."""
    value = row.get(key)
    return value if isinstance(value, str) else ""


def texts(row: Row, key: str) -> list[str]:
    """Returns the strings of a list."""
    value = row.get(key)
    return [item for item in value if isinstance(item, str)] if isinstance(value, list | tuple) else []


def inner(row: Row, key: str) -> Row:
    """Returns an object, an empty one if there is none."""
    value = row.get(key)
    return value if isinstance(value, Mapping) else NO_ROW


def rows(value: Any) -> list[Row]:
    """Returns the objects of a list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def numbers(row: Row, key: str) -> list[float]:
    """Returns a list of numbers, an empty one if an item is not a number."""
    value = row.get(key)
    if not isinstance(value, list | tuple):
        return []
    found = [number({key: item}, key) for item in value]
    return [item for item in found if item is not None] if None not in found else []


def counts(row: Row, key: str) -> dict[str, float]:
    """Returns the numbers of an object, by name."""
    found = inner(row, key)
    return {name: value for name in found if isinstance(name, str) and (value := number(found, name)) is not None}


def is_agent_name(name: str) -> bool:
    """Returns whether this can be an agent's name; random data sent to a control socket can appear as a peer's name."""
    return _NAME.fullmatch(name) is not None
