"""The palettes as textual wants them, for what it draws itself: dialogs and notes."""

from __future__ import annotations

from textual.theme import Theme

from kvctl.tui.palette import Palette


def theme_of(palette: Palette) -> Theme:
    """One palette."""
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
