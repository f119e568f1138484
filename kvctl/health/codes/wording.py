"""How findings speak: names in a row, counts with their noun, names found in an agent's own words."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_MOST = 3


def listed(names: Iterable[str]) -> str:
    """`prefill-0, prefill-1, prefill-2 and 5 more`; "nobody" for none."""
    names = list(names)
    if len(names) > _MOST + 1:
        return f"{', '.join(names[:_MOST])} and {len(names) - _MOST} more"
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:]))) or "nobody"


def counted(count: float, noun: str) -> str:
    """`1 room`, `7 rooms`."""
    return f"{count:.0f} {noun}{'' if count == 1 else 's'}"


def named_in(text: str, names: Collection[str]) -> list[str]:
    """Those of these agents whose names stand in a text, in the order of the text."""
    words = re.findall(r"[\w.-]*\w", text)
    return list(dict.fromkeys(word for word in words if word in names))


def pair(writer: str, reader: str) -> str:
    """Subject of what is between two agents."""
    return f"{writer} → {reader}"
