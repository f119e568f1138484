"""One screen without a terminal: as a picture or as text."""

from __future__ import annotations

import asyncio
import io
import re
import time
from pathlib import Path

from rich.console import Console
from textual.app import App

from kvctl.errors import CliError
from kvctl.tui.app import TopApp

SUFFIXES = (".svg", ".txt")
# The picture must not reach for the network when it is looked at: every system has some monospaced font.
_FONT_FACE = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_POLL_S = 0.02


def snapshot(app: TopApp, path: Path, size: tuple[int, int], patience_ns: int) -> None:
    """Runs the app unseen until there is something to show of everything, or patience ends, and writes its screen.

    Raises:
        CliError: the file cannot be written.
    """
    text = asyncio.run(_screen(app, path.suffix, size, patience_ns))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error


async def _screen(app: TopApp, suffix: str, size: tuple[int, int], patience_ns: int) -> str:
    async with app.run_test(size=size) as pilot:
        deadline = time.monotonic_ns() + patience_ns
        while not app.complete and time.monotonic_ns() < deadline:
            await pilot.pause(_POLL_S)
        await pilot.pause()
        return svg(app) if suffix == ".svg" else text(app)


def svg(app: App[None]) -> str:
    """The screen as a picture that needs nothing from elsewhere."""
    return _FONT_FACE.sub("", app.export_screenshot())


def text(app: App[None]) -> str:
    """The screen as lines of text."""
    width, height = app.size
    console = Console(width=width, height=height, file=io.StringIO(), record=True, legacy_windows=False)
    console.print(app.screen._compositor.render_update(full=True))
    return "".join(f"{line.rstrip()}\n" for line in console.export_text().splitlines()[:height])
