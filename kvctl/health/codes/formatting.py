"""How findings speak: names in a row, counts with their noun, names found in an agent's own words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

_MOST = 3
_Pair = tuple[str, str]


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


def common_factors(pairs: Sequence[_Pair]) -> Iterator[tuple[str, list[_Pair]]]:
    """The fewest agents that explain all these pairs (writer, reader), each with the pairs that it explains.

    Of two agents that explain as many, the one that is in more pairs at all, then a reader, then the last by name.
    """
    left = sorted(pairs)
    in_all = Counter(name for each in pairs for name in each)
    while left:
        in_left = Counter(name for each in left for name in each)
        readers = {reader for _, reader in left}
        common = max(in_left, key=lambda name: (in_left[name], in_all[name], name in readers, name))
        yield common, [each for each in left if common in each]
        left = [each for each in left if common not in each]
