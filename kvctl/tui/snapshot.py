"""One screen without a terminal: as a picture or as text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from rich.style import Style
from textual.app import App

from kvctl.errors import CliError
from kvctl.tui.app import TopApp
from kvctl.tui.palette import BY_NAME, DARK
from kvctl.tui.png import png
from kvctl.tui.svg import Run, picture

_POLL_S = 0.02


def snapshot(app: TopApp, path: Path, size: tuple[int, int], patience_ns: int) -> None:
    """Runs the app unseen until there is something to show of everything, or patience ends, and writes its screen.

    Raises:
        CliError: the file cannot be written.
    """
    drawn = asyncio.run(_screen(app, path.suffix, size, patience_ns))
    data = png(drawn) if path.suffix == ".png" else drawn.encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error


async def _screen(app: TopApp, suffix: str, size: tuple[int, int], patience_ns: int) -> str:
    async with app.run_test(size=size) as pilot:
        deadline = time.monotonic_ns() + patience_ns
        while not app.complete and time.monotonic_ns() < deadline:
            await pilot.pause(_POLL_S)
        await pilot.pause()
        return text(app) if suffix == ".txt" else svg(app)


def svg(app: App[None]) -> str:
    """The screen as a picture that needs nothing from elsewhere."""
    palette = BY_NAME.get(app.theme, DARK)
    return picture(_runs(app), palette.foreground, palette.background)


def text(app: App[None]) -> str:
    """The screen as lines of text."""
    return "".join("".join(run for run, _ in line).rstrip() + "\n" for line in _runs(app))


def _runs(app: App[None]) -> Sequence[Sequence[Run]]:
    """What is on screen, dialogs over panels; textual has no public way to read it but its own SVG."""
    compositor = app.screen._compositor
    compositor.render_update(full=True, screen_stack=app._background_screens)
    strips = [strip.simplify() for strip in compositor.render_strips()]
    return [[(segment.text, segment.style or Style.null()) for segment in strip] for strip in strips]
