"""A picture as PNG: resvg, an optional requirement, renders the SVG with the fonts of this host."""

from __future__ import annotations

from kvctl.errors import CliError
from kvctl.tui.svg import FONTS

_SCALE = 2  # pixels per unit of the SVG: text of 14 units stays sharp on a screen with a high resolution
_LETTER = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 18" font-family="{FONTS}"><text y="14">M</text></svg>'
)


def check() -> None:
    """Whether a PNG can be rendered here.

    Raises:
        CliError: resvg is not installed, or this host has none of the fonts, so that all text would be missing.
    """
    if _render(_LETTER) == _render(_LETTER.replace("M", "")):
        raise CliError("PNG: no monospaced font here; apt-get install fonts-dejavu-core, or write FILE.svg")


def png(svg: str) -> bytes:
    """Renders a picture of kvctl.tui.svg.

    Raises:
        CliError: resvg is not installed.
    """
    return _render(svg)


def _render(svg: str) -> bytes:
    try:
        import resvg_py
    except ImportError as error:
        raise CliError("PNG needs resvg: pip install 'kvctl[png]'; or write FILE.svg") from error
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=_SCALE))
