"""Colours of the TUI, by the names in the styles of views.

The hues are those of Okabe and Ito, which are distinguishable with all common colour-vision deficiencies, lightened to
a contrast of at least 4.5 with the background. No information depends on colour alone.
"""

from __future__ import annotations

from functools import cache

from rich.color import blend_rgb, parse_rgb_hex
from rich.style import Style
from textual.theme import Theme

FOREGROUND, BACKGROUND = "#d8dde3", "#0f1318"
BAR = "#1b222b"  # background of the bars at the top and bottom
CURSOR = "#27405c"  # background of the row under the cursor
COLOURS = {
    "dim": "#8b96a3",
    "red": "#f4794a",
    "yellow": "#eab030",
    "green": "#3cc49a",
    "blue": "#6aa5ee",
    "cyan": "#5fcfe0",
    "magenta": "#dc96c4",
    "rule": "#7c8794",  # of title lines
    "accent": "#6fb7f0",
}
_FAINT = 0.6  # share of the background colour in a faint colour

THEME = Theme(
    name="kvctl",
    primary=COLOURS["accent"],
    secondary=COLOURS["blue"],
    accent=COLOURS["accent"],
    warning=COLOURS["yellow"],
    error=COLOURS["red"],
    success=COLOURS["green"],
    foreground=FOREGROUND,
    background=BACKGROUND,
    surface=BACKGROUND,
    panel=BAR,
    dark=True,
)


@cache
def style(text: str) -> Style:
    """Returns the rich style for a view's style in words, such as `bold red`.

    Besides the words of views, the TUI uses `faint` (after a colour), `cursor`, `bar`, `rule` and `accent`. Unknown
    words are ignored.
    """
    words = text.split()
    colour, background = FOREGROUND, BACKGROUND
    for word in words:
        if word in {"cursor", "bar"}:
            background = CURSOR if word == "cursor" else BAR
        elif word == "faint":
            colour = blend_rgb(parse_rgb_hex(colour[1:]), parse_rgb_hex(BACKGROUND[1:]), _FAINT).hex
        else:
            colour = COLOURS.get(word, colour)
    return Style(
        color=colour, bgcolor=background, bold="bold" in words, italic="italic" in words, reverse="reverse" in words
    )
