"""What counts as a size: one check, so that every refused number is refused in the same words."""

from __future__ import annotations

from kvctl_agent.errors import LayoutError

MAX_SIZE = 2**31 - 1
"""Sizes travel in plan inputs and index arrays; above this they no longer fit a signed 32-bit index."""


def check_size(name: str, value: object, minimum: int = 1) -> int:
    """Return a whole number from `minimum` to `MAX_SIZE`, and refuse anything else (a bool is not a number here).

    Raises:
        LayoutError: naming the size and what it is.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_SIZE:
        raise LayoutError(f"{name} is {value!r:.40}: it must be a whole number from {minimum} to {MAX_SIZE}")
    return value
