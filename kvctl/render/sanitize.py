"""Makes text safe to print: control, bidirectional and zero-width characters are replaced or escaped.

Agents report names, errors and events that came from other machines. Some of those characters control the terminal,
others change the visible text. All text for stdout, stderr and `kvctl top` passes through this module.
"""

from __future__ import annotations

import json
import re

REPLACEMENT = "\ufffd"
_NOT_ASCII_PRINTABLE = re.compile(r"[^\x20-\x7e]")
_NOT_ASCII_TEXT = re.compile(r"[^\x20-\x7e\n\t]")
_STYLED = re.compile("(\x1b\\[[0-9;]*m)")


def printable(text: str) -> str:
    """Replaces each unprintable character of one line of text, including line breaks, with U+FFFD."""
    return _NOT_ASCII_PRINTABLE.sub(lambda found: found[0] if found[0].isprintable() else REPLACEMENT, text)


def printable_lines(text: str, styled: bool = False) -> str:
    """Replaces unprintable characters other than newlines and tabs with U+FFFD.

    Args:
        styled: whether to keep SGR colour sequences, for text that kvctl itself formatted.
    """
    if styled:
        pieces = _STYLED.split(text)  # the sequences have odd indices
        return "".join(piece if at % 2 else printable_lines(piece) for at, piece in enumerate(pieces))
    return _NOT_ASCII_TEXT.sub(lambda found: found[0] if found[0].isprintable() else REPLACEMENT, text)


def one_line(text: str) -> str:
    """Formats text as one line: joins lines, collapses white space, and replaces unprintable characters."""
    return printable(" ".join(text.split()))


def escaped(text: str) -> str:
    """Replaces backslashes and unprintable characters of one line with escapes: `\\t`, `\\u202e`."""
    return _NOT_ASCII_PRINTABLE.sub(
        lambda found: found[0] if found[0].isprintable() else found[0].encode("unicode_escape").decode(),
        text.replace("\\", "\\\\"),
    )


def json_escaped(document: str) -> str:
    """Replaces unprintable characters of a JSON document with JSON escapes, so that it decodes to the same data."""
    return _NOT_ASCII_TEXT.sub(
        lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], document
    )
