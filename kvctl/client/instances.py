"""Which ranks form an instance, from their answers to `status`.

Ranks of one instance share role, sizes and the stem of their names: `prefill-3` and `prefill-4` are of `prefill`,
`p1-prefill-0` is of `p1-prefill`, `decode-dp1-tp0@10.0.0.5:30000` of `decode@10.0.0.5:30000`. Prefill ranks also share
their registry. If ranks with equal coordinates remain, as on hosts that give their agents the same names, they are of
different instances, and ranks of one host stay together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from kvctl.client.names import natural_key, original_name
from kvctl_agent.contract.addresses import is_local

Status = Mapping[str, Any]

_AXES = ("dp", "pp", "cp")
_TP = re.compile(r"-tp\d+")
_NUMBER = re.compile(r"-(\d+)$")


def name_stem(status: Status) -> str:
    """Returns a rank's name without what tells it apart from the other ranks of its instance."""
    name = original_name(status["name"], status.get("host", ""))
    sizes, rank = status["sizes"], status["rank"]
    label, at, server = name.partition("@")
    stem = _TP.sub("", label)
    for axis in _AXES:
        if sizes.get(axis, 1) > 1:
            stem = re.sub(rf"-{axis}{rank[axis]}(?!\d)", "", stem)
    if stem == label and prod(sizes.values()) > 1:
        number = _NUMBER.search(label)
        if number and int(number[1]) == rank["unique"]:
            stem = label[: number.start()]
    return stem + at + server


def instances(statuses: Sequence[Status]) -> list[str]:
    """Returns the name of each rank's instance, in the order of `statuses`.

    The name is the stem of the ranks' names; where several instances have the same, followed by the host of their first
    rank (`prefill@n1`), and if that is the same as well, by the instance's registry or a number.
    """
    by_key: dict[tuple[Any, ...], dict[str, list[int]]] = {}
    for index, status in enumerate(statuses):
        hosts = by_key.setdefault(_key(status), {})
        hosts.setdefault(status.get("host", ""), []).append(index)
    members: list[list[int]] = []
    for key, hosts in by_key.items():
        members += _split(statuses, hosts) if not key[-1] else [[index for each in hosts.values() for index in each]]
    names = _names([[statuses[index] for index in each] for each in members])
    found = [""] * len(statuses)
    for name, each in zip(names, members, strict=True):
        for index in each:
            found[index] = name
    return found


def _key(status: Status) -> tuple[Any, ...]:
    """Returns what ranks of one instance have in common; the last item is their registry, "" if it is unknown."""
    registry = status.get("registry") or ""
    if is_local(registry):
        registry = f"{status.get('host', '')} {registry}"
    return status["role"], tuple(status["sizes"].items()), name_stem(status), registry


def _split(statuses: Sequence[Status], hosts: Mapping[str, Sequence[int]]) -> list[list[int]]:
    """Divides ranks, given by host, so that no instance has two ranks with the same coordinates."""
    found: list[tuple[set[int], list[int]]] = []
    for host in sorted(hosts, key=natural_key):
        here: list[tuple[set[int], list[int]]] = []
        for index in hosts[host]:
            _add(here, {statuses[index]["rank"]["unique"]}, [index])
        for ranks, indices in here:
            _add(found, ranks, indices)
    return [indices for _, indices in found]


def _add(instances: list[tuple[set[int], list[int]]], ranks: set[int], indices: list[int]) -> None:
    """Adds ranks to the first instance that has none of them, or else as a new instance."""
    for known, members in instances:
        if known.isdisjoint(ranks):
            known |= ranks
            members += indices
            return
    instances.append((set(ranks), list(indices)))


def _names(members: Sequence[Sequence[Status]]) -> list[str]:
    stems = [name_stem(ranks[0]) for ranks in members]
    hosts = [min((str(rank.get("host", "")) for rank in ranks), key=natural_key) for ranks in members]
    names = _told_apart(stems, hosts)
    names = _told_apart(names, [str(ranks[0].get("registry") or "").rpartition("/")[2] for ranks in members])
    total, seen = Counter(names), Counter[str]()
    for index, name in enumerate(names):
        seen[name] += 1
        if total[name] > 1:
            names[index] = f"{name}#{seen[name]}"
    return names


def _told_apart(names: Sequence[str], marks: Sequence[str]) -> list[str]:
    """Appends its mark to each name that several instances have, where the marks differ."""
    same: dict[str, set[str]] = {}
    for name, mark in zip(names, marks, strict=True):
        same.setdefault(name, set()).add(mark)
    return [f"{name}@{mark}" if mark and len(same[name]) > 1 else name for name, mark in zip(names, marks, strict=True)]
