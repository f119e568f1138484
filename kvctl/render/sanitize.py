"""Makes text safe to show: control, bidirectional and zero-width characters are replaced or escaped.

Agents report names, errors and events that came from other machines. A terminal obeys some of those characters, and
others change what a reader sees. Every text that reaches stdout, stderr or the screen of `kvctl top` passes here.
"""

from __future__ import annotations

import json
import re

REPLACEMENT = "\ufffd"
_NOT_ASCII_PRINTABLE = re.compile(r"[^\x20-\x7e]")
_NOT_ASCII_TEXT = re.compile(r"[^\x20-\x7e\n\t]")
_STYLED = re.compile("(\x1b\\[[0-9;]*m)")


def printable(text: str) -> str:
    """One line of text, each unprintable character replaced by U+FFFD."""
    return _NOT_ASCII_PRINTABLE.sub(lambda found: found[0] if found[0].isprintable() else REPLACEMENT, text)


def printable_lines(text: str, styled: bool = False) -> str:
    """The same for several lines, which keep newlines and tabs.

    Args:
        styled: the text has colours of our own: SGR sequences are kept.
    """
    if styled:
        pieces = _STYLED.split(text)  # the sequences are at odd places
        return "".join(piece if at % 2 else printable_lines(piece) for at, piece in enumerate(pieces))
    return _NOT_ASCII_TEXT.sub(lambda found: found[0] if found[0].isprintable() else REPLACEMENT, text)


def one_line(text: str) -> str:
    """Text without line breaks, runs of white space as one space, unprintable characters replaced."""
    return printable(" ".join(text.split()))


def escaped(text: str) -> str:
    """One line of text with backslash escapes in place of backslashes and unprintable characters: `\\t`, `\\u202e`."""
    return _NOT_ASCII_PRINTABLE.sub(
        lambda found: found[0] if found[0].isprintable() else found[0].encode("unicode_escape").decode(),
        text.replace("\\", "\\\\"),
    )


def json_escaped(document: str) -> str:
    """A JSON document with its unprintable characters as JSON escapes; it decodes to the same data."""
    return _NOT_ASCII_TEXT.sub(
        lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], document
    )
