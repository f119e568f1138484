"""Validates sizes and lists of sizes, with the same error text everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvctl_agent.contract.values import integer, shown
from kvctl_agent.errors import KvctlError, LayoutError

MAX_SIZE = 2**31 - 1
"""Largest size: sizes are used in plan inputs and in index arrays, whose elements are signed 32-bit numbers."""


def check_size(
    name: str, value: object, minimum: int = 1, maximum: int = MAX_SIZE, error: type[KvctlError] = LayoutError
) -> int:
    """Returns `value` as an int if it is a whole number from `minimum` to `maximum`. A bool is not accepted.

    Args:
        name: Name of the size, for the error text.
        error: The exception to raise.

    Raises:
        LayoutError, or `error`: `value` is anything else; the text has the name, the value and the allowed range.
    """
    number = integer(value)
    if number is None or not minimum <= number <= maximum:
        raise error(f"{name} is {shown(value)}: it must be a whole number from {minimum} to {maximum}")
    return number


def set_sizes(instance: object, *names: str, minimum: int = 1) -> None:
    """Checks that the named attributes of a frozen dataclass instance are sizes, and converts them to int.

    Raises:
        LayoutError: as for `check_size`.
    """
    for name in names:
        object.__setattr__(instance, name, check_size(name, getattr(instance, name), minimum))


def check_sizes(name: str, values: object, minimum: int = 1, error: type[KvctlError] = LayoutError) -> tuple[int, ...]:
    """Returns a list of whole numbers as a tuple of ints; `name` is for error texts.

    Raises:
        LayoutError, or `error`: `values` is not a list, or an element is not a whole number of at least `minimum`.
    """
    items = as_list(values)
    if items is None:
        raise error(f"{name} is {shown(values)}: it must be a list of whole numbers")
    return tuple(check_size(name, value, minimum, error=error) for value in items)


def as_list(values: object) -> Sequence[Any] | None:
    """Returns `values` as a sequence, or None if it is neither a sequence nor an array.

    An array without dimensions and an iterator have no length, so the result for them is None, too.
    """
    if isinstance(values, np.ndarray):
        return list(values) if values.ndim else None
    return values if isinstance(values, Sequence) else None
