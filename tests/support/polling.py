"""Waiting for something that other threads or processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    condition: Callable[[], T | None], what: object = "the condition", within_s: float = 60.0, pause_s: float = 0.002
) -> T:
    """Waits until `condition` returns something true, and returns it.

    Args:
        what: what is waited for, for the error message; of a function, what it returns then.
        pause_s: time between two calls of `condition`.

    Raises:
        AssertionError: it is not true within `within_s`.
    """
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what() if callable(what) else what}")
        time.sleep(pause_s)
    return found
