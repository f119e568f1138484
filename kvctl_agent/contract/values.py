"""Reads values that callers of the public API hand over: integers of any type, text that can be encoded."""

from __future__ import annotations

import operator
import reprlib

_SHOWN = 60  # characters
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _SHOWN


def integer(value: object) -> int | None:
    """The integer that `value` is, whatever type of integer it has (numpy's and torch's too); None for anything else.

    A boolean is no integer here. Neither is a number on a GPU: to read it the caller would wait for the device.
    """
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool) or hasattr(value, "__cuda_array_interface__"):
            return None
        if "bool" in str(getattr(value, "dtype", "")):
            return None
        return int(operator.index(value))  # type: ignore[arg-type]
    except Exception:  # the caller's own type may raise anything
        return None


def shown(value: object) -> str:
    """`value` as an error message repeats it: short, one line, and never an exception."""
    try:
        text = " ".join(_repr.repr(value).split())
    except Exception:  # an int of more digits than Python prints, or the caller's own type
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def encodable(text: str) -> str:
    """`text` with lone surrogates, which UTF-8 does not have, written as \\udXXX."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
