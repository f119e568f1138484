"""Reads of what agents answered that trust nothing: an older agent lacks fields, a broken one sends anything.

A value that is absent or of another kind is not known; nothing here raises.
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
    """A finite number; None where there is none. JSON's true and false are no numbers."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def amount(row: Row, key: str) -> float:
    """As `number`, for what is 0 where it is not known."""
    return number(row, key) or 0


def text(row: Row, key: str) -> str:
    """A string; "" where there is none."""
    value = row.get(key)
    return value if isinstance(value, str) else ""


def texts(row: Row, key: str) -> list[str]:
    """The strings of a list."""
    value = row.get(key)
    return [one for one in value if isinstance(one, str)] if isinstance(value, list | tuple) else []


def inner(row: Row, key: str) -> Row:
    """An object; an empty one where there is none."""
    value = row.get(key)
    return value if isinstance(value, Mapping) else NO_ROW


def rows(value: Any) -> list[Row]:
    """The objects of a list."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list | tuple) else []


def numbers(row: Row, key: str) -> list[float]:
    """The numbers of a list of numbers; empty where one of them is none."""
    value = row.get(key)
    if not isinstance(value, list | tuple):
        return []
    found = [number({key: one}, key) for one in value]
    return [one for one in found if one is not None] if None not in found else []


def counts(row: Row, key: str) -> dict[str, float]:
    """The numbers of an object of numbers."""
    found = inner(row, key)
    return {name: value for name in found if isinstance(name, str) and (value := number(found, name)) is not None}


def is_agent_name(name: str) -> bool:
    """Whether this can be an agent: whoever finds a control socket may send noise under any name."""
    return _NAME.fullmatch(name) is not None
