"""Reads TOML files, which anybody may have written: limits of size and depth, and one kind of error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_MAX_BYTES = 1 << 20
_MAX_DOTS = 100  # in what may be a key
_SEPARATORS = re.compile(r"[\n=,\[\]{}]")
_MAX_DEPTH = 32  # below it, repr and comparison of the values cannot exceed Python's recursion limit


def read_text(path: Path) -> str:
    """Returns the text of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8, or has more than 1 MiB.
    """
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: {error.reason} at byte {error.start}") from None


def parse(text: str) -> dict[str, Any]:
    """Returns the table that a TOML text describes; raises ValueError if it is not TOML, or nested too deeply."""
    import tomllib  # imported here because every start of kvctl would pay for it at module level

    too_deep = f"values are nested more than {_MAX_DEPTH} deep"
    # The time for a key of many parts grows with the square of their number: 25 s for 20,000.
    if any(each.count(".") > _MAX_DOTS for each in _SEPARATORS.split(text)):
        raise ValueError(too_deep)
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    level: list[Any] = [table]
    for _ in range(_MAX_DEPTH):
        inner = [list(each.values()) if isinstance(each, dict) else each for each in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return table
    raise ValueError(too_deep)
