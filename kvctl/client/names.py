"""Names by which agents with equal names are told apart, and the natural order of names."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Sequence

_DIGITS = 6
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


def told_apart(agents: Sequence[tuple[str, str, str]]) -> list[str]:
    """Returns a name for each agent that no other has.

    Agents with equal names are called `decode-0@n1` by their hosts; those of one host `decode-0#487f51` by the last
    digits of their incarnations, whose first digits are the start time.

    Args:
        agents: (name, host, incarnation) of each agent.
    """
    names = Counter(name for name, _, _ in agents)
    places = Counter((name, host) for name, host, _ in agents)
    return [
        name
        if names[name] == 1
        else f"{name}@{host}"
        if host and places[name, host] == 1
        else f"{name}#{incarnation[-_DIGITS:]}"
        for name, host, incarnation in agents
    ]


def matches_name(wanted: str, *names: str) -> bool:
    """Returns whether a name or glob of `-e` stands for an agent with these names."""
    return any(wanted == name or fnmatch.fnmatchcase(name, wanted) for name in names)
