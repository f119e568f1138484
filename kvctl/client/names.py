"""Names of agents that share a name, and the natural order of names."""

from __future__ import annotations

import re

_PIECES = re.compile(r"\d+|[^\d_-]+|[_-]")
_INCARNATION = re.compile(r"#[0-9a-f]{6}$")


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Returns a sort key that orders `decode-2` before `decode-10`, and host `n2` before `n10`."""
    pieces: list[tuple[int, int, str]] = []
    for each in _PIECES.findall(name):
        digits = each.lstrip("0") if each.isdecimal() else ""  # int() rejects numbers with thousands of digits
        pieces.append((0, len(digits), digits) if each.isdecimal() else (1, 0, each))
    return pieces


def original_name(name: str, host: str) -> str:
    """Returns the name that an agent gave itself, from the name by which kvctl tells it apart from others."""
    return _INCARNATION.sub("", name.removesuffix(f"@{host}") if host else name)
