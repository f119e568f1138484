"""Converts and formats values: integers of any type, values in error texts, text without surrogates, layer ranges."""

from __future__ import annotations

import operator
import reprlib

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


def layer_range(lo: int, hi: int) -> str:
    """Formats layers [lo, hi) with inclusive ends: `0-3`, `3` for one layer, `[5, 5)` for none."""
    return f"{lo}-{hi - 1}" if hi > lo + 1 else str(lo) if hi > lo else f"[{lo}, {hi})"
