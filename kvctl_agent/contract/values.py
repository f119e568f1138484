"""Converts and formats values: integers of any type, quantiles, names in error texts, plain text, layer ranges."""

from __future__ import annotations

import difflib
import operator
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

_Number = TypeVar("_Number", int, float)

_SHOWN = 60  # characters
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _SHOWN


def integer(value: object) -> int | None:
    """Converts an integer of any type, including numpy and torch scalars, to int; returns None for any other value.

    Booleans are rejected, and so are numbers on a GPU, because reading one would wait for the device.
    """
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool) or hasattr(value, "__cuda_array_interface__"):
            return None
        if "bool" in str(getattr(value, "dtype", "")):
            return None
        return int(operator.index(value))  # type: ignore[arg-type]
    except Exception:  # a type defined by the caller may raise anything
        return None


def shown(value: object) -> str:
    """Formats `value` for an error text: one short line; never raises."""
    try:
        text = " ".join(_repr.repr(value).split())
    except Exception:  # an int with more digits than Python prints, or a type defined by the caller
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def encodable(text: str) -> str:
    """Replaces lone surrogates in `text`, which UTF-8 cannot encode, with the escape \\udXXX."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def all_encodable(value: Any) -> Any:
    """Returns a copy of nested lists, tuples and mappings in which every text is as `encodable` returns it."""
    match value:
        case str():
            return encodable(value)
        case Mapping():
            return {all_encodable(key): all_encodable(each) for key, each in value.items()}
        case list() | tuple():
            return [all_encodable(each) for each in value]
    return value


def layer_range(lo: int, hi: int) -> str:
    """Formats layers [lo, hi) with inclusive ends: `0-3`, `3` for one layer, `[5, 5)` for none."""
    return f"{lo}-{hi - 1}" if hi > lo + 1 else str(lo) if hi > lo else f"[{lo}, {hi})"


def near(word: str, known: Iterable[str]) -> str:
    """Returns `, did you mean A or B?` for the names closest to `word`, ignoring case; "" if none is close.

    The closest to `age` is `room-age`, of which it is a word, before `agents`, which has similar letters.
    """
    folded, by_folded = word.casefold(), {name.casefold(): name for name in known}
    matches = [name for name in by_folded if folded in re.split("[-_.]", name)]
    matches = (matches or difflib.get_close_matches(folded, by_folded, cutoff=0.6))[:3]
    return f", did you mean {' or '.join(by_folded[match] for match in matches)}?" if matches else ""


def nearest_rank(ascending: Sequence[_Number], quantile: float) -> _Number | None:
    """Returns the quantile (0 to 1) of values in ascending order, by nearest rank; None if there are no values."""
    if not ascending:
        return None
    rank = -int(-quantile * len(ascending) // 1)  # ceiling
    return ascending[max(0, rank - 1)]
