"""Writes one screen of the app to a file without a terminal, as SVG or text."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Sequence
from pathlib import Path

from rich.color import parse_rgb_hex
from rich.console import Console
from rich.segment import Segment, Segments
from rich.terminal_theme import TerminalTheme
from textual.app import App

from kvctl.errors import CliError
from kvctl.tui.app import TopApp
from kvctl.tui.palette import BACKGROUND, FOREGROUND

_POLL_S = 0.02
_CELL, _LINE, _MARGIN = 12.2, 24.4, 14  # width and height of a cell as rich draws it
_FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
# No font is downloaded; at 21 px the block glyphs of common fonts are as high as a line.
_FORMAT = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}">
<style>
.s-matrix {{{{ font: 21px {fonts} }}}}
{{styles}}
</style>
<defs>{{lines}}</defs>
<rect width="100%" height="100%" rx="11" fill="{paper}"/>
<g transform="translate({margin} {margin})">{{backgrounds}}<g class="s-matrix">
{{matrix}}</g></g>
</svg>
"""


def snapshot(app: TopApp, path: Path, size: tuple[int, int], patience_ns: int) -> None:
    """Runs the app without a terminal and writes its screen to a file, in the format of the suffix.

    Args:
        app: the app; it must not have run before.
        patience_ns: how long to wait for data; the screen is written earlier if it is complete.

    Raises:
        CliError: the file cannot be written.
    """
    drawn = asyncio.run(_screen(app, path.suffix, size, patience_ns))
    try:
        path.write_text(drawn, encoding="utf-8")
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error


def svg(app: App[None]) -> str:
    """Returns the screen of an app as an SVG without external references."""
    return picture(_lines(app), app.size.width)


def picture(lines: Sequence[Sequence[Segment]], columns: int) -> str:
    """Draws lines of `columns` cells as SVG."""
    console = Console(width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor", record=True)
    console.print(Segments([segment for line in lines for segment in (*line, Segment.line())]), end="")
    ansi = [(0, 0, 0)] * 8  # unused: no style has a terminal colour
    return console.export_svg(
        unique_id="s",
        theme=TerminalTheme(parse_rgb_hex(BACKGROUND[1:]), parse_rgb_hex(FOREGROUND[1:]), ansi),
        code_format=_FORMAT.format(
            width=columns * _CELL + 2 * _MARGIN,
            height=len(lines) * _LINE + 2 * _MARGIN,
            margin=_MARGIN,
            paper=BACKGROUND,
            fonts=_FONTS,
        ),
    )


def text(app: App[None]) -> str:
    """Returns the screen of an app as plain text."""
    return "".join("".join(segment.text for segment in line).rstrip() + "\n" for line in _lines(app))


async def _screen(app: TopApp, suffix: str, size: tuple[int, int], patience_ns: int) -> str:
    async with app.run_test(size=size) as pilot:
        deadline = time.monotonic_ns() + patience_ns
        while not app.complete and time.monotonic_ns() < deadline:
            await pilot.pause(_POLL_S)
        await pilot.pause()
        return text(app) if suffix == ".txt" else svg(app)


def _lines(app: App[None]) -> Sequence[Sequence[Segment]]:
    """Returns the segments of each line on screen, including dialogs.

    Uses textual's internals, because its public function exports an SVG that downloads fonts.
    """
    compositor = app.screen._compositor
    compositor.render_update(full=True, screen_stack=app._background_screens)
    return [list(strip.simplify()) for strip in compositor.render_strips()]
