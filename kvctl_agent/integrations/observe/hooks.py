"""Puts hooks on methods of an engine's classes.

A hook runs on the engine's thread before or after the hooked method and changes neither its arguments nor its result.
It waits for nothing. One that fails is removed, with one line in the log; the engine does not notice.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from time import monotonic_ns as now_ns
from typing import Any

logger = logging.getLogger("kvctl")

Method = Callable[..., Any]
Hook = Callable[..., None]
Hooks = Iterable[tuple[Callable[[type, str, Hook], bool], str, Hook]]
"""`before` or `after`, the name of a method, and its hook."""

_HOOKS = "_kvctl_hooks"
"""Attribute of a hooked method with its hooks."""


def before(target: type, method: str, hook: Hook) -> bool:
    """Makes `target.method` call `hook` with the same arguments before it runs.

    A method that is inherited with the hook stays as it is. Returns False for a class without the method.
    """
    return _add(target, method, hook, _calling_before)


def after(target: type, method: str, hook: Hook) -> bool:
    """Makes `target.method` call `hook(start in ns, result, *arguments)` after it has returned; as `before`.

    The method may be a coroutine function.
    """
    return _add(target, method, hook, _calling_after)


def add_hooks(target: type, hooks: Hooks) -> list[str]:
    """Adds hooks to the methods of a class; returns the methods that it does not have."""
    return [f"{target.__name__}.{method}" for place, method, hook in hooks if not place(target, method, hook)]


def _add(target: type, method: str, hook: Hook, calling: Callable[[Method, Hook], Method]) -> bool:
    original = getattr(target, method, None)
    if original is None:
        return False
    present = getattr(original, _HOOKS, ())
    if hook in present:
        return True
    run: Hook | None = hook

    def guarded(*args: Any, **kwargs: Any) -> None:
        nonlocal run
        if run is not None:
            try:
                run(*args, **kwargs)
            except Exception as error:
                run = None
                text = f"{type(error).__name__}: {error}"
                logger.error("kvctl: hook on %s.%s removed: %s", target.__name__, method, text)

    hooked = functools.wraps(original)(calling(original, guarded))
    setattr(hooked, _HOOKS, (*present, hook))
    setattr(target, method, hooked)
    return True


def _calling_before(original: Method, hook: Hook) -> Method:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return original(*args, **kwargs)

    return hooked


def _calling_after(original: Method, hook: Hook) -> Method:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        start_ns = now_ns()
        result = original(*args, **kwargs)
        hook(start_ns, result, *args, **kwargs)
        return result

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        start_ns = now_ns()
        result = await original(*args, **kwargs)
        hook(start_ns, result, *args, **kwargs)
        return result

    return awaited if inspect.iscoroutinefunction(original) else hooked
