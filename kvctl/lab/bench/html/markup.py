"""Builds HTML and SVG so that escaping cannot be forgotten: text becomes markup only through here.

Names of models, agents and paths come from other machines. Whatever is no `Markup` is escaped, and control and
bidirectional characters and lone surrogates are replaced: neither HTML nor XML can hold most of them.
"""

from __future__ import annotations

import html

from kvctl.render.sanitize import printable_lines

_VOID = frozenset({"meta"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | None
Attribute = str | float | None


def escape(text: str) -> Markup:
    """The text as it has to stand between tags or inside a quoted attribute."""
    return text if isinstance(text, Markup) else Markup(html.escape(printable_lines(text)))


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """One element, written so that it is well-formed XML too.

    Args:
        children: text or markup, in order; None is left out.
        attributes: `class_` and `stroke_width` become `class` and `stroke-width`; None is left out, and numbers are
            written with two decimals at most, which is finer than any screen.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = joined(*children)
    return Markup(f"<{name}{written} />" if name in _VOID else f"<{name}{written}>{inside}</{name}>")


def joined(*children: Child) -> Markup:
    """Several children as one."""
    return Markup("".join(escape(child) for child in children if child is not None))


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return escape(value)
    return f"{value:.2f}".rstrip("0").rstrip(".")
