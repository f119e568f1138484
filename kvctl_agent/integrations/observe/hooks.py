"""Puts hooks on methods of an engine's classes.

A hook runs on the engine's thread before or after the hooked method and changes neither its arguments nor its result.
It waits for nothing. One that fails is removed, with one line in the log; the engine does not notice.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from time import monotonic_ns as now_ns
from typing import Any

logger = logging.getLogger("kvctl")


def before(target: type, method: str, hook: Callable[..., None]) -> bool:
    """Makes `target.method` call `hook` with the same arguments before it runs.

    Returns False for a class without the method, which stays as it is.
    """
    original = getattr(target, method, None)
    if original is None:
        return False
    run: Callable[..., None] | None = hook

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        nonlocal run
        if run is not None:
            try:
                run(*args, **kwargs)
            except Exception as error:
                run = None
                _log_removed(target, method, error)
        return original(*args, **kwargs)

    setattr(target, method, hooked)
    return True


def after(target: type, method: str, hook: Callable[..., None]) -> bool:
    """Makes `target.method` call `hook(start in ns, result, *arguments)` after it has returned; as `before`."""
    original = getattr(target, method, None)
    if original is None:
        return False
    run: Callable[..., None] | None = hook

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        nonlocal run
        start_ns = now_ns()
        result = original(*args, **kwargs)
        if run is not None:
            try:
                run(start_ns, result, *args, **kwargs)
            except Exception as error:
                run = None
                _log_removed(target, method, error)
        return result

    setattr(target, method, hooked)
    return True


def after_awaited(target: type, method: str, hook: Callable[..., None]) -> bool:
    """Makes the coroutine of `target.method` call `hook` with its result before it ends; as `after`."""
    original = getattr(target, method, None)
    if original is None:
        return False
    run: Callable[..., None] | None = hook

    @functools.wraps(original)
    async def hooked(*args: Any, **kwargs: Any) -> Any:
        nonlocal run
        start_ns = now_ns()
        result = await original(*args, **kwargs)
        if run is not None:
            try:
                run(start_ns, result, *args, **kwargs)
            except Exception as error:
                run = None
                _log_removed(target, method, error)
        return result

    setattr(target, method, hooked)
    return True


def after_any(target: type, method: str, hook: Callable[..., None]) -> bool:
    """Makes `target.method` call `hook` with the same arguments after it has returned or raised; as `before`."""
    original = getattr(target, method, None)
    if original is None:
        return False
    run: Callable[..., None] | None = hook

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        nonlocal run
        try:
            return original(*args, **kwargs)
        finally:
            if run is not None:
                try:
                    run(*args, **kwargs)
                except Exception as error:
                    run = None
                    _log_removed(target, method, error)

    setattr(target, method, hooked)
    return True


# These functions each have the guard written out: a call less for every hook.
def _log_removed(target: type, method: str, error: Exception) -> None:
    logger.error("kvctl: hook on %s.%s removed: %s: %s", target.__name__, method, type(error).__name__, error)
