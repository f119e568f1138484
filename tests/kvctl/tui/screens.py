"""Tests that are scripts beside the app."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

Script = Callable[..., Awaitable[None]]


def on_screen(view: str = "overview", **options: Any) -> Callable[[Script], Callable[..., None]]:
    """Decorator: runs `async def test(pilot, …)` beside an app that shows the specimen.

    Args:
        view: the view, unless the test has an argument `view`.
        options: further arguments of the fixture `build`.
    """

    def decorate(test: Script) -> Callable[..., None]:
        own = inspect.signature(test).parameters.keys() - {"pilot"}

        @functools.wraps(test)
        def run(**given: Any) -> None:
            app = given["build"](given["specimen"], given.get("view", view), **options)
            given["drive"](app, lambda pilot: test(pilot, **{name: given[name] for name in own}))

        fixtures = sorted(own | {"specimen", "build", "drive"})
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in fixtures]
        )
        return run

    return decorate


async def press(pilot: Any, *keys: str) -> None:
    """Presses keys, and waits until the app has handled them."""
    await pilot.press(*keys)
    await pilot.pause()


async def beat(pilot: Any) -> None:
    """Advances the time of the specimen by a second, and waits until the app has shown it."""
    pilot.app.feed.beat()
    await pilot.pause()
