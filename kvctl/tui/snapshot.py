"""Writes one screen of the app to a file without a terminal, as SVG, PNG or text."""

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
from kvctl.tui.palette import BY_NAME, DARK
from kvctl_agent.contract.extras import install

_POLL_S = 0.02
_SCALE = 2  # pixels per unit of the SVG, for sharp text on high-resolution screens
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
_LETTER = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 18" font-family="{_FONTS}"><text y="14">M</text></svg>'
)


def snapshot(app: TopApp, path: Path, size: tuple[int, int], patience_ns: int) -> None:
    """Runs the app without a terminal and writes its screen to a file, in the format of the suffix.

    Args:
        app: the app; it must not have run before.
        path: the file: `.svg`, `.png` or `.txt`.
        size: columns and lines of the screen.
        patience_ns: how long to wait for data; the screen is written earlier if it is complete.

    Raises:
        CliError: the file cannot be written, or resvg, which a PNG needs, is not installed.
    """
    drawn = asyncio.run(_screen(app, path.suffix, size, patience_ns))
    data = _png(drawn) if path.suffix == ".png" else drawn.encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error


def check_png() -> None:
    """Checks that this host can render a PNG.

    Raises:
        CliError: resvg is not installed, or this host has no monospaced font, so that all text would be missing.
    """
    if _png(_LETTER) == _png(_LETTER.replace("M", "")):
        raise CliError("PNG: this host has no monospaced font; apt-get install fonts-dejavu-core, or write FILE.svg")


def svg(app: App[None]) -> str:
    """Returns the screen of an app as an SVG without external references."""
    palette = BY_NAME.get(app.theme, DARK)
    lines = _lines(app)
    return picture(lines, app.size.width, palette.foreground, palette.background)


def picture(lines: Sequence[Sequence[Segment]], columns: int, foreground: str, background: str) -> str:
    """Draws lines of `columns` cells as SVG; `foreground` and `background` are the default colours, as `#rrggbb`."""
    console = Console(width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor", record=True)
    console.print(Segments([segment for line in lines for segment in (*line, Segment.line())]), end="")
    ansi = [(0, 0, 0)] * 8  # unused: no style has a terminal colour
    return console.export_svg(
        unique_id="s",
        theme=TerminalTheme(parse_rgb_hex(background[1:]), parse_rgb_hex(foreground[1:]), ansi),
        code_format=_FORMAT.format(
            width=columns * _CELL + 2 * _MARGIN,
            height=len(lines) * _LINE + 2 * _MARGIN,
            margin=_MARGIN,
            paper=background,
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


def _png(drawn: str) -> bytes:
    """Renders an SVG as PNG, with the fonts of this host.

    Raises:
        CliError: resvg is not installed.
    """
    try:
        import resvg_py
    except ImportError as error:
        raise CliError(f"PNG needs resvg: {install('png')}; or write FILE.svg") from error
    return bytes(resvg_py.svg_to_bytes(svg_string=drawn, zoom=_SCALE))
