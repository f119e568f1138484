"""Replaces agents' names in their answers, where kvctl has to tell agents with equal names apart.

An agent knows itself and its peers by the names that they gave themselves. Its peers with equal names of other agents
are identified by what it says about them in its answer to `peers`: incarnation and host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any

Identity = tuple[str, str]
"""Own name of an agent, and its incarnation or host."""


class _Part(Enum):
    NAME = "a name"
    NAMES = "a list of names"
    KEYS = "an object whose keys are names"
    TEXT = "a text in which names occur"


_NAME, _NAMES, _KEYS, _TEXT = _Part

_Form = Mapping[str, "_Part | _Form"]

_ROOM: _Form = {
    "agent": _NAME,
    "peers": _NAMES,
    "missing": _NAMES,
    "owed": _KEYS,
    "failure": {"rank": _NAME, "text": _TEXT},
}
_ROOMS: _Form = {"rooms": _ROOM}
_EVENT: _Form = {"agent": _NAME, "peer": _NAME, "text": _TEXT, "detail": _TEXT}
_OTHER: _Form = {"agent": _NAME}

# By command; the form of an answer that is a list is that of its items.
_FORMS: Mapping[str, _Form] = {
    "status": {"name": _NAME, "waiting_for": _TEXT, "not_ready": _TEXT},
    "rooms": _ROOM,
    "history": _ROOM,
    "slow": _ROOM,
    "failed": _ROOMS,
    "room": {**_ROOM, "timeline": _EVENT, "owed_parts": {"writer": _NAME, "decode": _NAME}},
    "staging": {"agent": _NAME, "gated": {"peer": _NAME}, "ring": {"allocations": {"writer": _NAME}}},
    "peers": {"agent": _NAME, "peer": _NAME, "last_error": _TEXT},
    "cost": {"agent": _NAME, "costs": {"agent": _NAME, "peer": _NAME, "reason": _TEXT}},
    "events": {"events": _EVENT},
    "bootstrap": {"agent": _NAME, "registered": {"name": _NAME}, "text": _TEXT},
}


class Renaming:
    """Replaces names in the answers of one agent."""

    def __init__(self, names: Collection[str], new: Callable[[str], str]) -> None:
        self._names = names
        self._new = new
        words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        self._words = re.compile(rf"(?<![\w.@#-])(?:{words})(?![\w@#]|[.-]\w)")

    def answer(self, command: str, data: Any) -> Any:
        """Returns the answer to a command with the new names; the given one is not changed."""
        return self._renamed(data, _FORMS.get(command, _OTHER)) if self._names else data

    def _renamed(self, data: Any, form: _Form) -> Any:
        if isinstance(data, list):
            return [self._renamed(item, form) for item in data]
        if not isinstance(data, dict):
            return data
        return {**data, **{key: self._part(data[key], part) for key, part in form.items() if data.get(key)}}

    def _part(self, value: Any, part: _Part | _Form) -> Any:
        match part:
            case _Part.NAME:
                return self._name(value)
            case _Part.NAMES if isinstance(value, list):
                return [self._name(name) for name in value]
            case _Part.KEYS if isinstance(value, dict):
                return {self._name(name): item for name, item in value.items()}
            case _Part.TEXT if isinstance(value, str):
                return self._words.sub(lambda found: self._new(found[0]), value)
            case Mapping():
                return self._renamed(value, part)
        return value

    def _name(self, value: Any) -> Any:
        return self._new(value) if isinstance(value, str) and value in self._names else value


def mentioned(command: str, data: Any, names: Collection[str]) -> set[str]:
    """Returns those of `names` that an answer to a command mentions."""
    found: set[str] = set()

    def note(name: str) -> str:
        found.add(name)
        return name

    Renaming(names, note).answer(command, data)
    return found


def peer_names(peers: Any, new: Mapping[Identity, str]) -> dict[str, str]:
    """Returns the new names of an agent's peers, by own name.

    Args:
        peers: the agent's answer to `peers`.
        new: new names by own name and incarnation, and by own name and host.
    """
    found = {}
    for row in peers if isinstance(peers, list) else ():
        if isinstance(row, dict):
            name = str(row.get("peer"))
            known = new.get((name, str(row.get("incarnation")))) or new.get((name, str(row.get("peer_host"))))
            if known:
                found[name] = known
    return found
