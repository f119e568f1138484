"""What counts as a size: one check, so that every refused number is refused in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvctl_agent.contract.values import integer, shown
from kvctl_agent.errors import KvctlError, LayoutError

MAX_SIZE = 2**31 - 1
"""Sizes travel in plan inputs and index arrays; above this they no longer fit a signed 32-bit index."""


def check_size(
    name: str, value: object, minimum: int = 1, maximum: int = MAX_SIZE, error: type[KvctlError] = LayoutError
) -> int:
    """Return a whole number from `minimum` to `maximum` as an int, and refuse anything else (a bool is no number here).

    Raises:
        LayoutError, or `error`: naming the size, what it is and what is allowed.
    """
    number = integer(value)
    if number is None or not minimum <= number <= maximum:
        raise error(f"{name} is {shown(value)}: it must be a whole number from {minimum} to {maximum}")
    return number


def set_sizes(of: object, *names: str, minimum: int = 1) -> None:
    """Check attributes of a frozen dataclass, and make each an int.

    Raises:
        LayoutError: as `check_size`.
    """
    for name in names:
        object.__setattr__(of, name, check_size(name, getattr(of, name), minimum))


def check_sizes(name: str, values: object, minimum: int = 1) -> tuple[int, ...]:
    """Return a list of whole numbers as a tuple of ints.

    Raises:
        LayoutError: it is no list, or `check_size` refuses a number.
    """
    items = as_list(values)
    if items is None:
        raise LayoutError(f"{name} is {shown(values)}: it must be a list of whole numbers")
    return tuple(check_size(name, value, minimum) for value in items)


def as_list(values: object) -> Sequence[Any] | None:
    """A sequence or array as it is; None for what has no length, an iterator or an array of no dimension too."""
    if isinstance(values, np.ndarray):
        return list(values) if values.ndim else None
    return values if isinstance(values, Sequence) else None
