"""Names by which agents with equal names are told apart, and the natural order of names."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

_REPLACED = ".ended-"
_DIGITS = 6
_MOST_HOSTS = 4
_MOST_NAMES = 16
_PIECES = re.compile(r"\d+|[^\d_-]+|[_-]")
_INCARNATION = re.compile(r"#[0-9a-f]{6}$")


@lru_cache(maxsize=4096)  # of the same names each second in kvctl top
def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Returns a sort key that orders `decode-2` before `decode-10`, and host `n2` before `n10`."""
    pieces: list[tuple[int, int, str]] = []
    for each in _PIECES.findall(name):
        digits = each.lstrip("0") if each.isdecimal() else ""  # int() rejects numbers with thousands of digits
        pieces.append((0, len(digits), digits) if each.isdecimal() else (1, 0, each))
    return tuple(pieces)


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
        if host and places[name, host] == 1 and f"{name}@{host}" not in names
        else f"{name}#{incarnation[-_DIGITS:]}"
        for name, host, incarnation in agents
    ]


def replaced_by(name: str) -> str:
    """Returns the name that an ended agent had, which another agent has now: `decode-0` for `decode-0.ended-4711`.

    "" if `name` is not that of such an agent.
    """
    before, replaced, pid = name.rpartition(_REPLACED)
    return before if replaced and pid.isdecimal() else ""


def matches_name(wanted: str, *names: str) -> bool:
    """Returns whether a name or glob of `-e` stands for an agent with these names."""
    return any(wanted == name or fnmatch.fnmatchcase(name, wanted) for name in names)


def few(names: Sequence[str], most: int, noun: str = "") -> str:
    """Formats names: `n1, n2 and n3`; of more than `most`, one less, and the number of the others."""
    if len(names) > most:
        names = [*names[: most - 1], f"{len(names) - most + 1} more {noun}".rstrip()]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def by_host(names: Sequence[str], hosts: Mapping[str, str]) -> str:
    """Formats names of agents; hosts of which all agents are among them stand for these.

    Returns:
        For example `host n17 (all 8 agents), decode-0@n3`.
    """
    whole = whole_hosts(names, hosts)
    if not whole:
        return few_commas(names)
    agents = [name for name in names if hosts.get(name) in whole]
    number = f"all {len(agents)} agents"
    shown = f"host{'s' * (len(whole) > 1)} {few(whole, _MOST_HOSTS)} ({number})"
    rest = [name for name in names if hosts.get(name) not in whole]
    return f"{shown}, {few_commas(rest)}" if rest else shown


def few_commas(names: Sequence[str], most: int = _MOST_NAMES) -> str:
    """Formats names, separated by commas; of more than `most`, one less, and the number of the others."""
    return ", ".join(names) if len(names) <= most else few(names, most)


def whole_hosts(names: Iterable[str], hosts: Mapping[str, str]) -> list[str]:
    """Returns the hosts, of several, that have at least two agents and all of them among `names`."""
    total = Counter(hosts.values())
    counts = Counter(hosts.get(name, "") for name in names)
    return sorted(
        (host for host, number in counts.items() if host and len(total) > 1 and number == total[host] > 1),
        key=natural_key,
    )
