"""Themes of the TUI, which define the colours for the colour names in the styles of views.

The hues are those of Okabe and Ito, which are distinguishable with all common colour-vision deficiencies, lightened or
darkened to a contrast of at least 4.5 with their background. No information depends on colour alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.color import blend_rgb, parse_rgb_hex
from rich.style import Style
from textual.theme import Theme

_FAINT = 0.6
"""Share of the background colour in a faint colour."""


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of one theme.

    Attributes:
        colours: colours by the names in the styles of views, including `dim`.
        bar: background of the bars at the top and bottom.
        rule: colour of title lines.
        cursor: background of the row under the cursor.
    """

    name: str
    dark: bool
    foreground: str
    background: str
    bar: str
    rule: str
    cursor: str
    accent: str
    colours: Mapping[str, str]
    _styles: dict[str, Style] = field(default_factory=dict, compare=False)

    def style(self, text: str) -> Style:
        """Returns the rich style for a view's style in words, such as `bold red`.

        Besides the words of views, the TUI uses `faint` (after a colour), `cursor`, `bar`, `rule` and `accent`. Unknown
        words are ignored.
        """
        found = self._styles.get(text)
        if found is None:
            found = self._styles[text] = self._parse(text.split())
        return found

    def _parse(self, words: list[str]) -> Style:
        colour, background = self.foreground, self.background
        for word in words:
            if word == "cursor":
                background = self.cursor
            elif word == "bar":
                background = self.bar
            elif word == "rule":
                colour = self.rule
            elif word == "accent":
                colour = self.accent
            elif word == "faint":
                colour = blend_rgb(parse_rgb_hex(colour[1:]), parse_rgb_hex(self.background[1:]), _FAINT).hex
            else:
                colour = self.colours.get(word, colour)
        return Style(
            color=colour, bgcolor=background, bold="bold" in words, italic="italic" in words, reverse="reverse" in words
        )


DARK = Palette(
    "dark",
    dark=True,
    foreground="#d8dde3",
    background="#0f1318",
    bar="#1b222b",
    rule="#7c8794",
    cursor="#27405c",
    accent="#6fb7f0",
    colours={
        "dim": "#8b96a3",
        "red": "#f4794a",
        "yellow": "#eab030",
        "green": "#3cc49a",
        "blue": "#6aa5ee",
        "cyan": "#5fcfe0",
        "magenta": "#dc96c4",
    },
)
LIGHT = Palette(
    "light",
    dark=False,
    foreground="#1e2329",
    background="#fbfbf8",
    bar="#e8ebee",
    rule="#6a737d",
    cursor="#cfe3f7",
    accent="#00569c",
    colours={
        "dim": "#616a73",
        "red": "#b03c00",
        "yellow": "#855700",
        "green": "#00704f",
        "blue": "#0059a8",
        "cyan": "#006a82",
        "magenta": "#97396f",
    },
)
CONTRAST = Palette(
    "high-contrast",
    dark=True,
    foreground="#ffffff",
    background="#000000",
    bar="#262626",
    rule="#d0d0d0",
    cursor="#004f9e",
    accent="#8cd3ff",
    colours={
        "dim": "#c6c6c6",
        "red": "#ff9067",
        "yellow": "#ffd400",
        "green": "#4dffbe",
        "blue": "#9accff",
        "cyan": "#86f6ff",
        "magenta": "#ffb0e2",
    },
)
PALETTES = (DARK, LIGHT, CONTRAST)
BY_NAME = {palette.name: palette for palette in PALETTES}


def theme_of(palette: Palette) -> Theme:
    """Returns the textual theme of a palette."""
    return Theme(
        name=palette.name,
        primary=palette.accent,
        secondary=palette.colours["blue"],
        accent=palette.accent,
        warning=palette.colours["yellow"],
        error=palette.colours["red"],
        success=palette.colours["green"],
        foreground=palette.foreground,
        background=palette.background,
        surface=palette.background,
        panel=palette.bar,
        dark=palette.dark,
    )
